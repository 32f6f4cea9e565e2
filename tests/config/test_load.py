"""YAML and overrides become the values that were meant, and what is wrong is said in one sentence each."""

from __future__ import annotations

import random
import string
from pathlib import Path
from typing import Any

import pytest

from luthier.config import RunConfig, dump_config, load_config
from luthier.config.shape import known_paths, shape_of
from luthier.errors import ConfigError

EXAMPLE = """\
model: Qwen/Qwen3-0.6B
data:
  train: {path: hf://Salesforce/wikitext, subset: wikitext-2-raw-v1, split: train, format: text}
  sequence_length: 1024
adapter: {kind: lora, rank: 16, alpha: 32, target: [attn]}
optimizer: {name: adamw, learning_rate: 1e-4}
schedule: {name: cosine, warmup: 0.03}
train: {steps: 100, tokens_per_step: 16384, precision: bf16, activation_checkpointing: off}
"""

AWKWARD = [
    "a=b",
    "=",
    "k: v",
    "[x]",
    "[x",
    "{a: 1}",
    "# no comment",
    "text # no comment",
    "null",
    "~x"[1:],
    "true",
    "off",
    "12",
    "1e-4",
    "0123",
    "12:30:45",
    "2024-01-01",
    "- item",
    "'quoted'",
    '"quoted"',
    "back\\slash",
    "%percent",
    "@at",
    "*star",
    "&and",
    "!bang",
    "|",
    ">",
    "?",
    ":",
    ",",
    "",
    " lead and trail ",
    "two\nlines\n",
    "tab\tin",
    "ünïcödé 漢字 🎻",
    "\u2028",
    "\x85",
    "<<",
    ".inf",
    "x" * 500 + " " + "y" * 500,
]


@pytest.fixture
def example(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(EXAMPLE, encoding="utf-8")
    return path


def load(text: str, tmp_path: Path, *overrides: str) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


def fault(path: Path | None, *overrides: str, **shortcuts: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, **shortcuts)
    return str(caught.value)


def test_values_mean_what_their_fields_say(example: Path) -> None:
    config = load_config(example)
    assert config.optimizer.learning_rate == 1e-4
    assert config.train.activation_checkpointing == "off"
    assert config.adapter is not None
    assert config.adapter.alpha == 32.0
    assert config.data.train is not None
    assert config.data.train[0].subset == "wikitext-2-raw-v1"


@pytest.mark.parametrize("text", AWKWARD)
def test_text_overrides_stay_text(text: str, example: Path) -> None:
    config = load_config(
        example, [f"data.train.system_prompt={text}", f"revision={text}", f"data.train.columns.input={text}"]
    )
    assert config.data.train is not None
    assert config.data.train[0].system_prompt == text
    assert config.revision == text
    assert config.data.train[0].columns == {"input": text}
    assert load_again(config, example.parent) == config


def test_random_text_survives_overrides_and_files(example: Path) -> None:
    draw = random.Random(0)
    alphabet = string.printable + "äß漢🎻\u00a0\ufeff\u2029" + "=:[]{}#&*!|>'\"%@`,?- \n" * 3
    alphabet = "".join(character for character in alphabet if character not in "\r\x0b\x0c") + "\r"
    for _ in range(100):
        text = "".join(draw.choice(alphabet) for _ in range(draw.randrange(20)))
        config = load_config(example, [f"data.train.system_prompt={text}", f"report.project={text}"])
        assert config.data.train is not None
        assert config.data.train[0].system_prompt == config.report.project == text
        again = load_again(config, example.parent)
        assert again == config


def load_again(config: RunConfig, directory: Path) -> RunConfig:
    path = directory / "config.yaml"
    path.write_bytes(dump_config(config).encode())
    return load_config(path)


OTHER_VALUES = {
    "method.rewards": "[c:d]",
    "method.weights": "[0.5]",
    "method.label_smoothing": "0.25",
    "adapter.init": "random",
    "model": "other/model",
    "data": "{train: [a.jsonl, {path: b.csv, weight: 0.5}]}",
    "data.train": "[{path: a.jsonl, columns: {input: question}, options: {least: 3}}]",
    "data.train.columns": "{input: question}",
    "data.train.options": "{words: [a, '1', 2, 3.5, null, true], deep: {x: 1e-4}}",
    "data.validation": "held out.jsonl",
    "data.validation.columns": "{input: question}",
    "data.validation.options": "{a: '1'}",
    "data.validation_fraction": "0.25",
    "method": "sft",
    "method.name": "sft",
    "adapter": "{kind: lora, rank: 3}",
    "adapter.kind": "lora",
    "adapter.target": "[q_proj, 'model.layers.[0-3].*']",
    "adapter.train_modules": "lm_head",
    "adapter.dropout": "0.125",
    "optimizer": "{name: sgd, momentum: 0.5}",
    "optimizer.name": "adamw",
    "optimizer.betas": "[0.5, 0.75]",
    "optimizer.beta2_decay": "-0.5",
    "schedule": "{name: linear, minimum: 0.5}",
    "schedule.name": "constant",
    "schedule.points": "[[0, 1], [10, 0.5]]",
    "train": "{steps: 3}",
    "train.precision": "fp32",
    "train.profile": "{start: 1, steps: 1}",
    "parallel": "{dp_shard: 2, tp: 2}",
    "moe": "{aux_loss: 0.01}",
    "checkpoint": "{every: 7}",
    "evaluation": "{every: 7, rows: 2}",
    "generation": "{top_k: 3}",
    "report": "{trackers: [wandb, trackio]}",
    "report.trackers": "[wandb, mlflow]",
    "output": "some/where else",
}

# What else a field needs, or cannot go with.
COMPANIONS = {
    "adapter": ["adapter.rank=2"],
    "data.validation.": ["data.validation.path=v.jsonl"],
    "evaluation.early_stopping": ["evaluation.every=5", "data.validation=v.jsonl"],
    "train.steps": ["train.epochs=null"],
    "train.epochs": ["train.steps=null"],
    "train.rows_per_step": ["train.tokens_per_step=null"],
}

# What a way of training cannot do without.
METHODS = {"grpo": ", rewards: [a:b]", "distill": ", teacher: a/b"}


def companions(path: str) -> list[str]:
    found = [override for start, overrides in COMPANIONS.items() if path.startswith(start) for override in overrides]
    for section, name, key in [
        ("optimizer", "stochastic_adamw", "state_dtype"),
        ("optimizer", "muon", "ns_steps"),
        ("optimizer", "muon", "adamw_learning_rate"),
        ("optimizer", "sgd", "momentum"),
        ("optimizer", "sgd", "nesterov"),
        ("optimizer", "adafactor", "beta2_decay"),
        ("optimizer", "adafactor", "clip_threshold"),
        ("schedule", "wsd", "decay"),
        ("schedule", "wsd", "shape"),
        ("schedule", "wsd", "minimum"),
        ("adapter", "prompt", "num_virtual_tokens"),
        ("adapter", "prompt", "init"),
        ("adapter", "prefix", "projection"),
        ("adapter", "prefix", "encoder_hidden_size"),
        ("adapter", "adaption_prompt", "adapter_len"),
        ("adapter", "adaption_prompt", "adapter_layers"),
    ]:
        if path == f"{section}.{key}":
            found = [f"{section}={{{'kind' if section == 'adapter' else 'name'}: {name}}}"]
            found += ["optimizer.momentum=0.5"] if key == "nesterov" else []
    if path.startswith("method.") and path != "method.name":
        owner = next(s for s in shape_of(RunConfig).child("method").sections if path[7:] in s.model_fields)
        name = shape_of(RunConfig).child("method").tags(owner)[0]
        needed = METHODS.get(name, "") + (", filter_groups: true" if path == "method.resample" else "")
        needed += ", top_k: 3" if path == "method.precompute" else ""
        found = [f"method={{name: {name}{needed}}}"]
    if path == "optimizer.in_backward":
        found = ["train.max_gradient_norm=null"]
    if path == "schedule.points":
        found = ["schedule={name: piecewise, points: [[0, 1]]}"]
    return found


def another_value(path: str) -> str:
    if path in OTHER_VALUES:
        return OTHER_VALUES[path]
    shape = shape_of(RunConfig)
    model: Any = RunConfig
    for key in path.split("."):
        owner = next(section for section in shape.sections if key in section.model_fields)
        model, shape = owner, shape.child(key, owner)
        if shape.kind == "list":
            shape = shape.items[0]
    current = model.model_fields[path.rpartition(".")[2]].get_default(call_default_factory=True)
    match shape.kind:
        case "boolean":
            return "no" if current else "yes"
        case "integer":
            return "7"
        case "number":
            return "0.5"
        case "choice":
            return next(choice for choice in reversed(shape.choices) if choice != current)
        case _:
            return "some: [text] = 1"


@pytest.mark.parametrize("path", sorted(set(known_paths(shape_of(RunConfig)))))
def test_every_field_goes_round(path: str, example: Path) -> None:
    """Each field can be overridden, differs then from before, and comes back equal from the written file."""
    preparation = companions(path)
    override = f"{path}={another_value(path)}"
    before = load_config(example, [*preparation, "seed=1"])
    config = load_config(example, [*preparation, override, *(["seed=1"] if path != "seed" else [])])
    fixed = path in ("method", "method.name", "adapter.kind", "optimizer.name", "schedule.name")
    assert fixed or config != before
    assert load_again(config, example.parent) == config


def test_null_empties_optional_fields_that_hold_no_text(example: Path) -> None:
    config = load_config(example, ["adapter=null", "train.max_gradient_norm=null", "train.precision=null"])
    assert (config.adapter, config.train.max_gradient_norm, config.train.precision) == (None, None, None)


def test_numbers_and_switches_as_people_write_them(example: Path) -> None:
    config = load_config(
        example, ["train.steps=1_000", "data.sequence_length=1e3", "optimizer.learning_rate=3E-5", "train.compile=on"]
    )
    assert (config.train.steps, config.data.sequence_length) == (1000, 1000)
    assert (config.optimizer.learning_rate, config.train.compile) == (3e-5, True)


def test_sections_on_the_way_are_made_and_variants_may_follow(example: Path) -> None:
    config = load_config(example, ["optimizer.momentum=0.5", "optimizer.name=sgd", "train.profile.steps=3"])
    assert config.optimizer.name == "sgd"
    assert config.optimizer.momentum == 0.5
    assert config.train.profile is not None
    assert config.train.profile.steps == 3


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("", ["method=dpo", "method.beta=0.3"]),
        ("method: dpo\n", ["method.beta=0.3"]),
        ("method: {name: kto, beta: 9}\n", ["method=dpo", "method.beta=0.3"]),
    ],
)
def test_a_bare_name_of_a_method_may_have_keys(text: str, overrides: list[str], tmp_path: Path) -> None:
    method = load(f"model: m\ndata: d\n{text}", tmp_path, *overrides).method
    assert method.name == "dpo"
    assert method.beta == 0.3


def test_items_of_lists_by_number(tmp_path: Path) -> None:
    text = "model: m\ndata: {train: [a.jsonl, {path: b.jsonl}]}\n"
    config = load(text, tmp_path, "data.train.0.weight=2", "data.train.1.format=chat", "data.train.2.path=c")
    assert config.data.train is not None
    assert [(s.path, s.weight, s.format) for s in config.data.train] == [
        ("a.jsonl", 2.0, None),
        ("b.jsonl", None, "chat"),
        ("c", None, None),
    ]
    message = fault(tmp_path / "run.yaml", "data.train.path=x")
    assert message == "command line: data.train.path: there are 2 items; say which, as data.train.0.path"


@pytest.mark.parametrize(
    "data", ["rows.jsonl", "[a, b]", "{train: rows.jsonl}", "{train: [a]}", "{train: {path: 123}}"]
)
def test_short_forms_of_data(data: str, tmp_path: Path) -> None:
    config = load(f"model: m\ndata: {data}\n", tmp_path, "data.sequence_length=8")
    assert config.data.train
    assert config.data.sequence_length == 8


def test_shortcuts_replace_what_the_file_says(example: Path) -> None:
    config = load_config(example, model="other", data="[odd] name #1.jsonl", output="~/out")
    assert config.model == "other"
    assert config.data.train is not None
    assert [source.path for source in config.data.train] == ["[odd] name #1.jsonl"]
    assert config.data.sequence_length == 1024
    assert config.output == Path.home() / "out"


def test_home_directory(tmp_path: Path) -> None:
    config = load("model: ~/model\ndata: ~/rows.jsonl\ntokenizer: a~b\n", tmp_path)
    assert config.model == str(Path.home() / "model")
    assert config.data.train is not None
    assert config.data.train[0].path == str(Path.home() / "rows.jsonl")
    assert config.tokenizer == "a~b"


def test_defaults_fill_what_a_command_does_not_need() -> None:
    assert load_config(None, model="m", defaults={"data": {}}).data.train is None


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["train.steps=many"], 'train.steps: "many" is not a whole number'),
        (["train.steps=1.5"], "train.steps: 1.5 is not a whole number"),
        (["optimizer.learning_rate=fast"], 'optimizer.learning_rate: "fast" is not a number'),
        (["train.compile=maybe"], 'train.compile: "maybe" is not true or false'),
        (["adapter.rank=0"], "adapter.rank: must be more than 0, not 0"),
        (["adapter.rnk=3"], "adapter.rnk: is not a known key; did you mean adapter.rank?"),
        (["learning_rate=1"], "learning_rate: is not a known key; did you mean optimizer.learning_rate?"),
        (["train.lr=1"], "train.lr: is not a known key; did you mean optimizer.learning_rate?"),
        (["data.train.pth=x"], "data.train.0.pth: is not a known key; did you mean data.train.path?"),
        (["qqqq=1"], "qqqq: is not a known key"),
        (["optimizer.momentum=1"], "optimizer.momentum: is not a key of adamw; it belongs to sgd and muon"),
        (["method=dpo", "method.beta=-1"], "method.beta: must be more than 0, not -1"),
        (
            ["method=dpo", "method.temperature=1"],
            "method.temperature: is not a key of dpo; it belongs to grpo and distill",
        ),
        (["method=[dpo]"], "method: a list is not a section of `key: value` lines"),
        (
            ["optimizer.name=adam"],
            'optimizer.name: "adam" is not adamw, stochastic_adamw, sgd, adafactor or muon; did you mean "adamw"?',
        ),
        (
            ["report.trackers=wanb"],
            'report.trackers.0: "wanb" is not tensorboard, wandb, mlflow or trackio; did you mean "wandb"?',
        ),
        (["optimizer.betas=[0.9]"], "optimizer.betas.1: is missing"),
        (["adapter.target=[]"], "adapter.target: needs at least one item, and has 0"),
        (["adapter=lora"], 'adapter: "lora" is not a section of `key: value` lines'),
        (["adapter.rank=[1]"], 'adapter.rank: "[1]" is not a whole number'),
        (["seed.deep=1"], "seed.deep: holds one value and has no keys of its own"),
        (["seed"], '"seed" is not an override; write key.path=value'),
        (["a..b=1"], '"a..b=1" is not an override; write key.path=value'),
        (
            ["train.precision=fp16"],
            "train.precision: fp16 is not offered, since its gradients overflow without loss scaling; use bf16",
        ),
        (["train.epochs=1"], "train: epochs and steps exclude each other; leave one of them out"),
        # what torch refuses, or what makes every weight NaN, while the first loss still looks well
        (["optimizer.betas=[0.9, 1.0]"], "optimizer.betas.1: must be less than 1, not 1"),
        (["optimizer={name: muon, ns_steps: 100}"], "optimizer.ns_steps: must be less than 100, not 100"),
        (["optimizer={name: adafactor, beta2_decay: 0.8}"], "optimizer.beta2_decay: must be at most 0, not 0.8"),
        (["optimizer={name: sgd, nesterov: true}"], "optimizer: nesterov needs a momentum"),
    ],
)
def test_faults_on_the_command_line(overrides: list[str], sentence: str, example: Path) -> None:
    message = fault(example, *overrides)
    assert message.endswith(sentence)
    assert message.startswith(("command line: ", f"{example}:8: "))


@pytest.mark.parametrize("key", ["model", "output", "data.train.0.path", "data.chat_template"])
def test_a_nul_in_a_path_is_refused(key: str, example: Path) -> None:
    """YAML can write one, and no system call takes it."""
    assert fault(example, f"{key}=a\0b").endswith(f"{key}: holds a NUL, which no path can")


def test_stopping_early_needs_rows_to_measure_on(example: Path) -> None:
    asked = "evaluation={every: 1, early_stopping: 2}"
    told = "evaluation.early_stopping needs rows to measure on; name them in data.validation"
    assert fault(example, asked) == f"{example}: {told}"
    for rows in ("data.validation=v.jsonl", "data.validation_fraction=0.1"):
        assert load_config(example, [asked, rows]).evaluation.early_stopping == 2


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("model: m\ndata: d\nmodel: n\n", ':3: the key "model" stands here again; it has a value in line 1 already'),
        ("model: m\ndata:\n\ttrain: x\n", ":3: a tab cannot indent YAML; use spaces"),
        ("model: [m\n", ":2: is not YAML: "),
        ("model: m\ndata: d\ntrain:\n  steps: many\n", ':4: train.steps: "many" is not a whole number'),
        ("model: m\ndata: d\nadaptor: {rank: 3}\n", ":3: adaptor: is not a known key; did you mean adapter?"),
        ("model: m\ndata: {train: [{path: a}, {weight: 2}]}\n", ":2: data.train.1.path: is missing"),
        ("model: m\n", ": data: is missing; give it as `data: ...` in the file or as --data"),
        ("model:\ndata: d\n", ":1: model: null is not text"),
        ("model: m\ndata: 5\ntrain: []\n", ":3: train: a list is not a section of `key: value` lines"),
        ("", ": is empty; it needs at least `model: ...` and `data: ...`"),
        ("# nothing\n", ": is empty; it needs at least `model: ...` and `data: ...`"),
        ("- a\n", ": is a list; write `key: value` lines, such as `model: ...`"),
        ("text\n", ": is a bare text; write `key: value` lines, such as `model: ...`"),
        ("model: !!python/name:os.system x\ndata: d\n", ":1: the tag !!python/name:os.system is not known here"),
        ("model: m\ndata: &d {train: *d}\n", ":2: an alias stands within what it is an alias of"),
        ("model: a\n---\nmodel: b\n", ":2: is not YAML: but found another document"),
        ("model: a\x01b\n", ":1: is not YAML: the character #x0001 is not allowed"),
    ],
)
def test_faults_in_a_file(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    message = fault(path)
    assert message.startswith(f"{path}{sentence}")
    assert "\n" not in message


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data: d\ntrain: {steps: x, epoch: 3}\nlr: 3\n", encoding="utf-8")
    assert fault(path, "adapter.rank=-1").splitlines() == [
        f"{path}:2: train.epoch: is not a known key; did you mean train.epochs?",
        f'{path}:2: train.steps: "x" is not a whole number',
        f"{path}:3: lr: is not a known key; did you mean optimizer.learning_rate?",
        f"{path}: model: is missing; give it as `model: ...` in the file or as --model",
        "command line: adapter.rank: must be more than 0, not -1",
    ]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert fault(tmp_path / "none.yaml") == f"{tmp_path / 'none.yaml'}: there is no such file"
    assert fault(tmp_path) == f"{tmp_path}: is a directory; name a YAML file"
    (tmp_path / "config.yaml").write_bytes(b"model: m\ndata: caf\xe9\n")
    assert fault(tmp_path) == f"{tmp_path}: is a directory; did you mean {tmp_path / 'config.yaml'}?"
    assert fault(tmp_path / "config.yaml") == f"{tmp_path / 'config.yaml'}:2: is not UTF-8 text; save it as UTF-8"


def test_a_byte_order_mark_and_windows_lines_are_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xef\xbb\xbfmodel: m\r\ndata: d\r\n")
    assert load_config(path).model == "m"


def test_merge_keys_and_boolean_words_are_plain_keys(tmp_path: Path) -> None:
    message = "".join(fault(write(tmp_path, "model: m\ndata: d\n<<: {seed: 1}\non: 1\n")))
    assert "<<: is not a known key" in message
    assert "on: is not a known key" in message


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.epochs=nan", "train.epochs: must be a finite number"),
        ("train.epochs=inf", "train.epochs: must be a finite number"),
        ("optimizer.learning_rate=nan", "optimizer.learning_rate: must be a finite number"),
        ("schedule.warmup=.inf", "schedule.warmup: must be a finite number"),
        (f"seed={2**63}", "seed: must be less than"),
        ("generation.temperature=1e-300", "must be 0 or at least 0.001; 0 takes the likeliest token"),
        ("generation.temperature=-1", "must be 0 or at least 0.001"),
        ("model=", "model: is empty"),
        ("tokenizer=", "tokenizer: is empty"),
        ("data.train.path=", "path: is empty"),
        ("data.chat_template=", "data.chat_template: is empty"),
        ("output=", "output: is empty; name a directory"),
        (f"adapter={'[' * 3000}", "nested too deeply"),
    ],
)
def test_values_that_no_run_could_have(override: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override], model="debug:llama", data="rows.jsonl")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
