"""Where compiled loops cannot be had, or are not for a model, PyTorch's operations sample, and a log says so."""

import importlib
import logging
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from luthier.hf.decoding import loops
from luthier.hf.decoding.lean import LeanRows
from luthier.hf.decoding.slots import SlotRows
from luthier.hf.decoding.ways import rows_of
from luthier.hf.load import load_model
from luthier.hf.source import resolve
from luthier.sampling.engine import SamplingEngine
from tests.sampling.test_engine import NEW, expected_greedy, greedy

PROMPT = [3, 14, 15, 9, 26]


def sampled(model: Any) -> list[int]:
    return SamplingEngine(model, slots=4).sample([greedy(PROMPT)])[0].tokens


@pytest.mark.usefixtures("one_thread")
def test_without_numba(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    own = importlib.import_module

    def blocked(name: str, *rest: Any) -> Any:
        if name.startswith("numba"):
            raise ImportError("Numba needs NumPy 2.5 or less")
        return own(name, *rest)

    model = load_model(resolve("debug:llama"), dtype="fp32")
    loops.loops_work.cache_clear()
    monkeypatch.setattr(loops.importlib, "import_module", blocked)
    with caplog.at_level(logging.WARNING, "luthier"):
        assert sampled(model) == expected_greedy(model, PROMPT)
    assert "Numba needs NumPy 2.5 or less" in caplog.text
    loops.loops_work.cache_clear()


@pytest.mark.usefixtures("one_thread")
def test_a_model_may_become_bf16_or_be_run_by_autocast() -> None:
    model = load_model(resolve("debug:llama"), dtype="fp32")
    engine = SamplingEngine(model, slots=4)
    first = engine.sample([greedy(PROMPT)])[0].tokens
    with torch.autocast("cpu", torch.bfloat16):
        assert len(engine.sample([greedy(PROMPT)])[0].tokens) == NEW
    assert engine.sample([greedy(PROMPT)])[0].tokens == first
    model.bfloat16()
    assert len(engine.sample([greedy(PROMPT)])[0].tokens) == NEW


def test_layers_of_several_sizes_go_by_the_models_own_modules() -> None:
    config = LlamaConfig(
        vocab_size=131, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config).eval()
    assert isinstance(rows_of(model), LeanRows)
    attention = model.model.layers[1].self_attn
    attention.q_proj = torch.nn.Linear(32, 16, bias=False)
    attention.k_proj, attention.v_proj = torch.nn.Linear(32, 8, bias=False), torch.nn.Linear(32, 8, bias=False)
    attention.o_proj = torch.nn.Linear(16, 32, bias=False)
    assert isinstance(rows_of(model), SlotRows)
    assert not isinstance(rows_of(model), LeanRows)
    assert sampled(model) == expected_greedy(model, PROMPT)


IMPORTED = """
import sys
from luthier.hf.load import load_model
from luthier.hf.source import resolve
from luthier.sampling.engine import SamplingEngine
from luthier.sampling.request import SamplingRequest
SamplingEngine(load_model(resolve("debug:llama"), dtype="bf16")).sample([SamplingRequest([3, 4], 2, stop=[])])
assert "numba" not in sys.modules
"""


def test_bf16_does_without() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
