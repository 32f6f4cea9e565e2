"""Completions are those of plain Transformers, end on every stop token, and repeat under a seed."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from luthier.config import GenerationConfig as How
from luthier.hf.load import load_model
from luthier.hf.source import resolve
from luthier.sampling.generate import generate_ids

PROMPT = [5, 6, 7, 8, 9]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_greedy_equals_transformers(kind: str, tmp_path: Path) -> None:
    model = load_model(resolve(f"debug:{kind}"), dtype="fp32")
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    settings = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = plain.generate(torch.tensor([PROMPT]), generation_config=settings)[0, len(PROMPT) :].tolist()
    seen = generate_ids(model, PROMPT, How(max_new_tokens=12), stop_token_ids=[])
    assert seen == expected
    stop = expected[4]
    before_stop = expected[: expected.index(stop)]
    assert generate_ids(model, PROMPT, How(max_new_tokens=12), stop_token_ids=[400, stop]) == before_stop


def test_a_seed_repeats_and_leaves_other_randomness_alone() -> None:
    model = load_model(resolve("debug:llama"), dtype="fp32").train()
    how = How(max_new_tokens=10, temperature=1.3, top_p=0.9, top_k=50)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    one = generate_ids(model, PROMPT, how, stop_token_ids=[], seed=1)
    assert torch.equal(torch.rand(1), expected)
    assert generate_ids(model, PROMPT, how, stop_token_ids=[], seed=1) == one
    assert generate_ids(model, PROMPT, how, stop_token_ids=[], seed=2) != one
    assert model.training
