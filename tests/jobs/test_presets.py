"""The catalogue of models: complete, and its layouts ones that the models admit."""

from __future__ import annotations

import math

import pytest

from luthier.config import ParallelConfig
from luthier.config.presets import GPUS_A_NODE, presets
from luthier.errors import ConfigError
from luthier.estimate.models import known
from luthier.estimate.presets import GPUS, layouts
from luthier.jobs.runtimes import builtin, find, preset_of
from luthier.parallel.layout import Layout

ASKED_FOR = [
    "gemma2-2b",
    "gemma-7b",
    "gemma2-9b",
    "gemma2-27b",
    "llama3.1-8b",
    "llama3.1-70b",
    "llama3.2-1b",
    "llama3.2-3b",
    "llama3.2-vision-11b",
    "llama3.2-vision-90b",
    "llama3.3-70b",
    "mistral-7b",
    "qwen2.5-0.5b",
    "qwen2.5-1.5b",
    "qwen2.5-3b",
    "qwen2.5-7b",
    "qwen2.5-14b",
    "qwen2.5-32b",
    "qwen2.5-72b",
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "qwen3-8b",
    "qwen3-14b",
    "qwen3-32b",
    "qwen3-30b-a3b",
    "smollm2-135m",
    "smollm2-360m",
    "smollm2-1.7b",
]
TRAINED = [name for name, preset in presets().items() if not preset.pictures]


def test_all_models_are_there():
    assert sorted(presets()) == sorted(ASKED_FOR)


@pytest.mark.parametrize("name", TRAINED)
def test_a_row_is_whole(name):
    preset = presets()[name]
    sizes = {full.partition("/")[2]: fields for full, fields in known().items()}
    assert preset.sizes in sizes
    assert preset.rows_per_step > 0
    assert 0 < preset.learning_rate["full"] < preset.learning_rate["lora"] < 0.01
    assert "/" in preset.model
    for method, table in preset.layouts.items():
        assert preset.gpus(method) in table
        for gpus, entry in table.items():
            degrees = {key: value for key, value in entry.items() if key != "activation_checkpointing"}
            assert Layout.resolve(ParallelConfig(**degrees), gpus).ranks == gpus
            assert sizes[preset.sizes]["num_attention_heads"] % degrees.get("tp", 1) == 0
            assert sizes[preset.sizes]["num_hidden_layers"] >= degrees.get("pp", 1)
            assert degrees.get("tp", 1) <= GPUS_A_NODE


def test_more_gpus_hold_what_fewer_do():
    for name in TRAINED:
        for table in presets()[name].layouts.values():
            assert [gpus for gpus in GPUS if gpus >= min(table)] == list(table)


def test_adapters_take_no_more_gpus_than_the_whole_model():
    for name in TRAINED:
        assert presets()[name].gpus("lora") <= presets()[name].gpus("full")


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma2-2b"])
def test_the_table_is_what_estimate_finds(name):
    preset = presets()[name]
    assert preset.layouts["lora"] == layouts(preset, "lora")


def test_runtimes_have_as_many_gpus_as_the_model_takes():
    runtimes = {runtime.name: runtime for runtime in builtin()}
    assert len(runtimes) == len(presets()) + 2
    for name in TRAINED:
        runtime = runtimes[f"luthier-{name}"]
        gpus = presets()[name].gpus("full")
        assert runtime.pretrained_model == presets()[name].model
        assert runtime.trainer.num_nodes * runtime.trainer.device_count == gpus
        assert runtime.trainer.num_nodes == math.ceil(gpus / GPUS_A_NODE)
        assert preset_of(runtime) is presets()[name]
    assert preset_of(runtimes["luthier"]) is None


def test_names_of_the_kep():
    runtimes = builtin()
    for name in presets():
        assert find(f"torchtune-{name}", runtimes) is find(f"luthier-{name}", runtimes)
    assert find("torchtune-llama3.2-1B", runtimes).name == "luthier-llama3.2-1b"
    with pytest.raises(ConfigError, match=r'there is no runtime "torchtune-gemma2-7b"'):
        find("torchtune-gemma2-7b", runtimes)
