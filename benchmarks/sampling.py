"""Sampling by slots against Transformers' `generate`, and a group's prompt read once against each sample's own.

    python benchmarks/sampling.py [--precision fp32 bf16] [--texts 32] [--new 128] [--rounds 3]

One model object for both, unmodified Transformers, random weights of SmolLM2-135M's shape (or --config DIRECTORY).
Prompts are ragged, 17 to 96 tokens; `generate` gets them as one left-padded batch. Figures are tokens per CPU-second,
prefill included, in turns within one process so that a shared machine is fair to both; then the CPU-seconds in which a
group of 8 samples has read its prompt and sampled a token each, against eight prompts one by one. Bounds: 1.8 times
`generate` in fp32, 1.2 in bf16; a group's prompt at most 0.6 of eight.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, LlamaConfig

from luthier.sampling.engine import SamplingEngine
from luthier.sampling.request import SamplingRequest

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BOUNDS = {"fp32": 1.8, "bf16": 1.2}
GROUP, GROUP_BOUND = 8, 0.6


def smollm2() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )


def cpu_seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def by_generate(model: Any, prompts: list[list[int]], new: int) -> None:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        assert model.generate(ids, attention_mask=mask, generation_config=settings).shape[1] == longest + new


def by_slots(engine: SamplingEngine, requests: list[SamplingRequest]) -> None:
    assert all(
        len(result.tokens) == request.max_tokens
        for result, request in zip(engine.sample(requests), requests, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="directory of a config.json, instead of SmolLM2-135M's shape")
    parser.add_argument("--precision", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the group's prompt")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    config = AutoConfig.from_pretrained(given.config) if given.config else smollm2()
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(17, 96, given.texts).long().tolist()
    vocabulary = config.vocab_size
    prompts = [torch.randint(2, vocabulary, (length,), generator=generator).tolist() for length in lengths]
    long = torch.randint(2, vocabulary, (given.prompt,), generator=generator).tolist()
    for precision in given.precision:
        measure(precision, config, given, prompts, long)


def measure(precision: str, config: Any, given: argparse.Namespace, prompts: list[list[int]], long: list[int]) -> None:
    """Print both figures of a precision."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[precision]).eval()
    engine = SamplingEngine(model, slots=given.texts)
    requests = [SamplingRequest(prompt, given.new, temperature=0, stop=[]) for prompt in prompts]
    seconds: dict[str, list[float]] = {"generate": [], "slots": []}
    by_slots(engine, [SamplingRequest(prompts[0], 2, temperature=0, stop=[])])  # finds out its sizes
    for _ in range(given.rounds):
        seconds["generate"].append(cpu_seconds(lambda: by_generate(model, prompts, given.new)))
        seconds["slots"].append(cpu_seconds(lambda: by_slots(engine, requests)))
    tokens = given.texts * given.new
    rates = {name: tokens / statistics.median(found) for name, found in seconds.items()}
    factor = rates["slots"] / rates["generate"]
    told = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
    print(f"{precision}: tokens per CPU-second: {told}; factor {factor:.2f}, bound {BOUNDS[precision]}", flush=True)
    sample = SamplingRequest(long, 1, seed=0, stop=[])
    group = cpu_seconds(lambda: by_slots(engine, sample.group(GROUP)))
    singles = cpu_seconds(lambda: [by_slots(engine, [one]) for one in sample.group(GROUP)])
    print(f"{precision}: a prompt for {GROUP}: {group / singles:.2f} of {GROUP}, bound {GROUP_BOUND}", flush=True)


if __name__ == "__main__":
    main()
