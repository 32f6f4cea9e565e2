"""A layout that training refuses is refused by an estimate with the same words, and a search does not tell it."""

from __future__ import annotations

from typing import Any

import pytest

from luthier.config import RunConfig
from luthier.errors import ConfigError
from luthier.estimate import estimate, find_layouts
from luthier.estimate.prepare import prepare, refusals
from luthier.parallel import rules
from luthier.parallel.layout import Layout


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
    asked = refusals(prepare(config, cpu=True))
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
