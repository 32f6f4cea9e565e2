"""A layout that training refuses is refused by an estimate with the same words, and a search does not tell it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from luthier.cli.main import main
from luthier.config import LoraConfig, RunConfig
from luthier.errors import ConfigError, ModelError, UserError
from luthier.estimate import estimate, find_layouts
from luthier.estimate.prepare import prepare, refusals
from luthier.hf.anatomy import describe
from luthier.hf.load import load_model
from luthier.hf.source import resolve
from luthier.parallel import rules
from luthier.parallel.layout import Layout
from tests.estimate.layouts import save_config
from tests.parallel.cases import ready
from tests.world import World


def run(model: str, **fields: Any) -> RunConfig:
    data = {"sequence_length": 64} | fields.pop("data", {})
    train = {"precision": "fp32", "device": "cpu"} | fields.pop("train", {})
    return RunConfig.model_validate({"model": model, "data": data, "train": train, **fields})


def told(config: RunConfig, gpus: int = 4) -> set[str]:
    """The layouts that a search tells."""
    return {entry["layout"] for entry in find_layouts(config, gpus, "h200", keep=100)["layouts"]}


@pytest.mark.parametrize(
    ("model", "adapter"),
    [
        ("llama", None),
        ("mixtral", None),
        ("llama", {"kind": "prompt", "num_virtual_tokens": 3}),
        ("llama", {"kind": "prefix", "num_virtual_tokens": 3}),
        ("llama", {"kind": "prefix", "num_virtual_tokens": 3, "projection": True}),
        ("llama", {"kind": "adaption_prompt", "adapter_len": 3}),
        ("llama", {"kind": "lora", "new_tokens": ["<a>"]}),
        ("gemma2", {"kind": "lora", "target": ["embed"]}),
        ("llava", None),
        ("mllama", None),
    ],
    ids=str,
)
def test_a_search_asks_what_a_run_asks(model: str, adapter: dict[str, Any] | None) -> None:
    config = run(f"debug:{model}", adapter=adapter)
    whole = prepare(config, cpu=True).model
    asked = refusals(prepare(config, cpu=True), config)
    for name in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep"):
        for degree in (2, 4):
            layout = Layout(**{name: degree} | ({"dp_shard": degree} if name == "ep" else {}))
            why = asked(name, degree)
            if why is None:
                rules.check(whole, layout)
                continue
            with pytest.raises(ConfigError) as caught:
                rules.check(whole, layout)
            assert why in caught.value.what or "layers" in why


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "holds quantised weights, which cannot be trained"),
        ({"hidden_size": -64, "head_dim": 16}, "negative dimension -64"),
        ({"hidden_act": "swish9"}, "there is no 'swish9'"),
        ({"num_hidden_layers": 0}, "holds no layers; choose another model"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_model_that_no_run_can_train_has_no_estimate(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    whole = {"model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64}
    whole |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(whole | fields))
    with pytest.raises(ModelError, match=words) as estimated:
        estimate(run(str(tmp_path)))
    with pytest.raises(ModelError) as trained:
        load_model(resolve(str(tmp_path)), from_scratch=True, prepare=lambda model: describe(model) and None)
    assert str(trained.value) == str(estimated.value)


def test_no_layout_that_an_adapter_refuses_is_told() -> None:
    learned = told(run("debug:llama", adapter={"kind": "prompt", "num_virtual_tokens": 3}))
    assert "dp_shard 4" in learned
    assert not any(name in layout for layout in learned for name in ("cp", "pp"))
    assert any("pp" in layout for layout in told(run("debug:llama")))


def test_models_that_see_are_told_data_parallel_layouts_alone() -> None:
    assert told(run("debug:llava")) == {"dp_shard 4", "dp_replicate 4"}
    with pytest.raises(ConfigError, match=r"no layout of 4 ranks can be: .* passes its layers over that see"):
        told(run("debug:mllama"))
    with pytest.raises(ConfigError, match="cannot run on several ranks"):
        estimate(run("debug:mllama"), gpus=4)
    assert told(run("debug:mllama"), gpus=1) == {"one process"}


def test_stages_that_a_schedule_wants_are_counted() -> None:
    several = run("debug:llama", parallel={"pipeline_schedule": "interleaved_1f1b"})
    assert not any("pp" in layout for layout in told(several))
    with pytest.raises(ConfigError, match="2 layers for 4 stages"):
        estimate(several, layout="pp 2")


@pytest.mark.parametrize(
    ("layout", "optimizer", "remedy"),
    [
        (Layout(tp=3), {"name": "adamw"}, "dp_shard 3 would work"),
        (Layout(dp_replicate=2, tp=3), {"name": "adamw"}, "dp_replicate 2 x dp_shard 3 would work"),
        (Layout(tp=6), {"name": "muon"}, "pp 6 would work"),
        (Layout(dp_replicate=2, tp=3), {"name": "muon"}, "pp 6 would work"),
        (Layout(pp=7), {"name": "adamw"}, "dp_shard 7 would work"),
        (
            Layout(tp=7),
            {"name": "muon"},
            "no layout of 7 ranks would work, since muon needs whole matrices, and "
            "model.layers.0.self_attn.q_proj.weight is sharded; use adamw or stochastic_adamw",
        ),
        (
            Layout(pp=7),
            {"name": "adamw", "state_dtype": "int8"},
            "no layout of 7 ranks would work, since 8-bit moments have blocks that other layouts do not, and "
            "model.embed_tokens.weight is sharded; use fp32 or bf16, or one process",
        ),
    ],
    ids=str,
)
def test_what_would_work_works_with_the_optimizer_too(
    tmp_path: Path, layout: Layout, optimizer: dict[str, Any], remedy: str
) -> None:
    config = run(str(save_config(tmp_path, "llama", **SIZES | {"num_hidden_layers": 6})), optimizer=optimizer)
    with pytest.raises(ConfigError, match="cannot run on") as caught:
        rules.check(prepare(config, cpu=True).model, layout, 1, config.optimizer)
    assert caught.value.remedy == remedy


def test_fewer_stages_are_named_where_the_optimizer_takes_the_rest(tmp_path: Path) -> None:
    config = run(str(save_config(tmp_path, "llama", **SIZES | {"num_hidden_layers": 4})), optimizer={"name": "muon"})
    model = prepare(config, cpu=True).model
    for layout, remedy in (
        (Layout(pp=2), "2 of them would work"),
        (Layout(dp_shard=2, pp=2), "no layout of 4 ranks would work, since muon needs whole matrices"),
    ):
        with pytest.raises(ConfigError, match="it has 4 layers for 6 stages") as caught:
            rules.check(model, layout, 3, config.optimizer)
        assert str(caught.value.remedy).startswith(remedy)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "int8": {"name": "adamw", "state_dtype": "int8"},
    "adafactor": {"name": "adafactor"},
    "muon": {"name": "muon"},
}
SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "pad_token_id": None}
ADAPTERS: dict[str, dict[str, Any] | None] = {
    "full": None,
    "small": {"rank": 4},
    "apart": {"rank": 64, "dtype": "fp32"},
    "mlp": {"rank": 64, "target": ["mlp"]},
}


def refused(path: str, layout: dict[str, int], adapter: dict[str, Any] | None, optimizer: dict[str, Any]) -> list[str]:
    """On every rank: what a run is told, and what the optimizer itself would say of what it is handed."""
    said = []
    how = {"adapter": LoraConfig(**adapter) if adapter else None, "from_scratch": True, "precision": "bf16"}
    asked = run(path, optimizer=optimizer).optimizer
    for asks in (rules.needs_whole, lambda *_: None):
        with patch.object(rules, "needs_whole", asks):
            try:
                ready(path, layout, optimizer=asked, **how)
            except UserError as error:
                said.append(error.what.partition(", and ")[0])
            else:
                said.append("")
    return said


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("degree", ["dp_shard", "dp_replicate", "cp", "tp", "pp"])
def test_what_an_optimizer_takes_whole_is_refused_where_it_is_sharded(
    world: Callable[[int], World], tmp_path: Path, degree: str, adapter: str
) -> None:
    path = str(save_config(tmp_path, "llama", **SIZES))
    for name, optimizer in OPTIMIZERS.items():
        config = run(path, adapter=ADAPTERS[adapter], optimizer=optimizer, train={"precision": "bf16"})
        why = refusals(prepare(config, cpu=True), config)(degree, 2) or ""
        for said in world(2).run(refused, path, {degree: 2}, ADAPTERS[adapter], optimizer):
            assert said == [why.partition(", and ")[0]] * 2, name


def test_an_estimate_refuses_what_the_optimizer_refuses() -> None:
    eight = run("debug:llama", optimizer=OPTIMIZERS["int8"])
    estimate(eight)
    with pytest.raises(UserError, match="8-bit moments have blocks that other layouts do not") as caught:
        estimate(eight, layout="dp_shard 2")
    assert caught.value.where == "optimizer.state_dtype"
    assert told(eight, 2) == {"pp 2"}
    early = run("debug:llama", optimizer={"in_backward": True}, train={"max_gradient_norm": None})
    with pytest.raises(ConfigError, match="gradients under tp are put together after the backward pass"):
        estimate(early, layout="tp 2")
    assert told(early) == {"dp_shard 4", "dp_replicate 4"}
    known = find_layouts(early.model_copy(update={"model": "Qwen3-0.6B"}), 2)
    assert {entry["layout"] for entry in known["layouts"]} == {"dp_shard 2", "dp_replicate 2"}


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ({"name": "grpo", "rewards": ["a.py:b"]}, "grpo samples with a whole copy of the model on each data rank"),
        ({"name": "reward"}, "a reward model has no parallel.tp"),
    ],
    ids=str,
)
def test_a_method_refuses_in_an_estimate_what_it_refuses_in_a_run(
    method: dict[str, Any], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    config = run("debug:llama", method=method)
    with pytest.raises(ConfigError, match=said) as caught:
        estimate(config, layout="tp 2")
    assert told(config) == {"dp_shard 4", "dp_replicate 4"}
    asked = ["--model", "debug:llama", "data={}", f"method={json.dumps(method)}", "parallel.tp=2", "--json"]
    assert main(["train", *asked]) == 2
    assert caught.value.what in json.loads(capfd.readouterr().out)["error"]["message"]


def test_what_loftq_factorises_stays_whole(capfd: pytest.CaptureFixture[str]) -> None:
    config = run("debug:llama", adapter={"quantize": "nf4", "init": "loftq"})
    for name in ("tp", "dp_shard", "cp"):
        with pytest.raises(ConfigError, match=r"loftq factorises whole weights, and of model\.layers\.0") as caught:
            estimate(config, layout=f"{name} 2")
        assert (caught.value.where, caught.value.remedy) == (
            "adapter.init",
            "use dp_replicate or pp, or leave init out",
        )
    assert told(config, 2) == {"dp_replicate 2", "pp 2"}
    for name in ("dp_replicate", "pp"):
        assert estimate(config, layout=f"{name} 2")["ranks"] == 2
    asked = ["--model", "debug:llama", "data={}", "adapter.quantize=nf4", "adapter.init=loftq", "parallel.tp=2"]
    assert main(["estimate", *asked, "--json"]) == 2
    assert "loftq factorises whole weights" in json.loads(capfd.readouterr().out)["error"]["message"]


def loftq_refused(path: str, layout: dict[str, int]) -> str:
    """On every rank: what a run is told."""
    try:
        ready(path, layout, adapter=LoraConfig(quantize="nf4", init="loftq"), from_scratch=True, precision="bf16")
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("degree", ["dp_shard", "dp_replicate", "cp", "tp", "pp"])
def test_loftq_is_refused_in_a_run_as_in_an_estimate(
    world: Callable[[int], World], tmp_path: Path, degree: str
) -> None:
    path = str(save_config(tmp_path, "llama", **SIZES))
    said = ""
    try:
        estimate(run(path, adapter={"quantize": "nf4", "init": "loftq"}), layout=f"{degree} 2")
    except ConfigError as error:
        said = str(error)
    assert bool(said) == (degree in ("dp_shard", "cp", "tp"))
    assert world(2).run(loftq_refused, path, {degree: 2}) == [said] * 2


def test_layouts_for_rows_with_images() -> None:
    source = [{"path": "rows.jsonl", "image_column": "image"}]
    config = run("debug:gemma3", data={"train": source})
    with pytest.raises(ConfigError, match="rows with images cannot run on tp 2: what sees has no plan for it"):
        estimate(config, layout="tp 2")
    assert told(config, 2) == {"dp_shard 2", "dp_replicate 2"}
