"""Texts that grow side by side are those of plain Transformers, and no text is touched by another."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from luthier import tinker
from luthier.adapters import apply_lora, beside
from luthier.config import LoraConfig
from luthier.engine.build import build_network
from luthier.errors import ConfigError, DataError, NonFiniteError
from luthier.hf.debug.tiny import debug_config, debug_tokenizer
from luthier.hf.decoding.ways import way_of
from luthier.hf.load import load_model
from luthier.hf.source import resolve
from luthier.sampling.engine import SamplingEngine
from luthier.sampling.request import SamplingRequest
from tests.oracles.plain import plain_model, save_strong

RAGGED = [[5, 6, 7], list(range(20, 61)), [9], list(range(100, 119))]
"""Shorter and longer than the windows of 16 places that debug models have."""
NEW = 24


def strong(kind: str, directory: Path) -> Path:
    return save_strong(debug_config(kind), directory, scale=1.5)


def greedy(prompt: Sequence[int], **how: Any) -> SamplingRequest:
    return SamplingRequest(prompt, NEW, temperature=0, stop=[], **how)


def expected_greedy(plain: Any, prompt: Sequence[int]) -> list[int]:
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    ids = torch.tensor([list(prompt)])
    return plain.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)[
        0, len(prompt) :
    ].tolist()


def full_logprobs(plain: Any, tokens: Sequence[int]) -> torch.Tensor:
    """[T - 1, vocabulary] of a whole text, by the model's own forward."""
    with torch.no_grad():
        return plain(torch.tensor([list(tokens)]), use_cache=False).logits[0, :-1].float().log_softmax(-1)


def test_an_architecture_that_keeps_more_than_keys_runs_each_text_alone() -> None:
    ways = {kind: way_of(load_model(resolve(f"debug:{kind}"))) for kind in ("llama", "mixtral", "mamba", "falcon")}
    assert ways == {"llama": "lean", "mixtral": "slots", "mamba": "alone", "falcon": "alone"}
    stretched = debug_config("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    assert way_of(load_model(resolve("debug:llama"), config=stretched)) == "whole"


MIXED = [
    SamplingRequest(RAGGED[0], 20, seed=3, stop=[], topk_logprobs=3),
    SamplingRequest(RAGGED[1], 9, seed=4, stop=[], temperature=0.7, top_k=20),
    SamplingRequest(RAGGED[2], 30, seed=5, stop=[], temperature=1.4, top_p=0.8, topk_logprobs=2),
    SamplingRequest(RAGGED[3], 14, seed=6, stop=[], temperature=0),
    SamplingRequest(list(range(60, 121)), 12, seed=7, stop=[], prompt_logprobs=True, topk_prompt_logprobs=2),
    SamplingRequest([7, 8], 1, seed=8, stop=[]),
    SamplingRequest([7, 8], 0, seed=8, stop=[], prompt_logprobs=True),
]


def adapted(kind: str, precision: Any) -> Any:
    """A model with adapters that say something."""
    adapter = LoraConfig(rank=4, alpha=8, target=["all-linear"])
    model = build_network(resolve(f"debug:{kind}"), adapter=adapter, precision=precision).model
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            elif parameter.ndim >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 1.5 / parameter.shape[-1] ** 0.5)
    return model


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("kind", "precision"), [("llama", "fp32"), ("gemma2", "bf16"), ("mixtral", "fp32")])
def test_a_text_does_not_depend_on_the_others(kind: str, precision: str) -> None:
    model = adapted(kind, precision)
    alone = [SamplingEngine(model, slots=9).sample([request])[0] for request in MIXED]
    engine = SamplingEngine(model, slots=9)
    assert engine.sample(MIXED) == alone
    assert engine.sample(MIXED[::-1]) == alone[::-1]
    numbers = []
    for request in MIXED * 2:  # more than there are slots, each two steps after the other
        numbers.append(engine.submit(request))
        engine.step()
        engine.step()
    while engine.busy:
        engine.step()
    assert [engine.result(number) for number in numbers] == alone * 2


@pytest.mark.usefixtures("one_thread")
def test_a_group_reads_its_prompt_once_and_equals_its_samples() -> None:
    model = load_model(resolve("debug:llama"), dtype="fp32")
    request = SamplingRequest(RAGGED[1], 8, seed=11, stop=[])
    alone = [SamplingEngine(model, slots=4).sample([one])[0] for one in request.group(6)]
    read: list[int] = []
    handle = model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: read.append(output.shape[1])
    )
    engine = SamplingEngine(model, slots=4)
    assert engine.sample(request.group(6)) == alone
    handle.remove()
    assert sum(length >= len(RAGGED[1]) for length in read) == 1
    assert len({tuple(result.tokens) for result in alone}) == 6


def test_adapters_in_place_are_seen_and_so_is_each_change_of_them() -> None:
    model = adapted("llama", "fp32")
    engine = SamplingEngine(model, slots=4)
    request = greedy(RAGGED[1])

    def check() -> list[int]:
        result = engine.sample([request])[0]
        logprobs = full_logprobs(model, [*request.prompt, *result.tokens])[-NEW:]
        assert logprobs.argmax(-1).tolist() == result.tokens
        torch.testing.assert_close(torch.tensor(result.logprobs), logprobs.amax(-1), rtol=1e-5, atol=1e-5)
        return result.tokens

    first = check()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                parameter.neg_()
    assert check() != first
    for parameter in model.parameters():
        parameter.data = parameter.data.flip(0)
    check()


def test_the_model_is_left_as_it_was() -> None:
    model = adapted("llama", "fp32").train()
    model.lm_head.eval()
    ids = torch.tensor([RAGGED[3]])

    def state() -> tuple[Any, ...]:
        model.zero_grad(set_to_none=True)
        model(ids, labels=ids, use_cache=False).loss.backward()
        return (
            [p.grad.clone() if p.grad is not None else None for p in model.parameters()],
            [p.requires_grad for p in model.parameters()],
            [m.training for m in model.modules()],
            model.config._attn_implementation,
            list(model.state_dict()),
        )

    before = state()
    torch.manual_seed(5)
    random = torch.rand(3)
    torch.manual_seed(5)
    engine = SamplingEngine(model, slots=4)
    engine.sample(MIXED)
    assert torch.equal(torch.rand(3), random)
    after = state()
    assert after[1:] == before[1:]
    for one, other in zip(before[0], after[0], strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def beside_with(model: Any, seed: int, **how: Any) -> Any:
    """A model over the same base with adapters of its own that say something."""
    other = beside(model)
    apply_lora(other, LoraConfig(**how))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if ".lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            elif ".lora_magnitude_vector" in name:
                parameter.mul_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return other


SHAPES = [
    {"rank": 4, "alpha": 8, "target": ["all-linear"]},
    {"rank": 3, "alpha": 9, "target": ["attn"]},
    {"rank": 8, "alpha": 8, "target": ["mlp", "unembed"]},
]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("kind", "precision", "dora"),
    [("llama", "fp32", ""), ("gemma2", "bf16", ""), ("mixtral", "fp32", ""), ("llama", "fp32", "a0 a2"),
     ("qwen2", "bf16", "a1"), ("mixtral", "fp32", "a1")],
)  # fmt: skip
def test_adapters_side_by_side_are_each_alone(kind: str, precision: str, dora: str) -> None:
    base = load_model(resolve(f"debug:{kind}"), dtype=precision).requires_grad_(False)
    shapes = {f"a{number}": how for number, how in enumerate(SHAPES)}
    models = {a: beside_with(base, n, **how, dora=a in dora) for n, (a, how) in enumerate(shapes.items())}
    owners = [None, *models]
    requests = [replace(request, adapter=owners[number % 4]) for number, request in enumerate(MIXED * 2)]
    alone = []
    for request in requests:
        model = base if request.adapter is None else models[request.adapter]
        alone += SamplingEngine(model, slots=9).sample([replace(request, adapter=None)])
    engine = SamplingEngine(base, slots=9)
    for name in ("a0", "a1"):
        engine.add(name, models[name])
    numbers = []
    for request in sorted(requests, key=lambda request: request.adapter == "a2"):
        if request.adapter == "a2" and "a2" not in engine.adapters:
            engine.add("a2", models["a2"])
            engine.remove("a1")  # what grows and waits goes on
        numbers.append(engine.submit(request))
        engine.step()
    while engine.busy:
        engine.step()
    order = sorted(range(len(requests)), key=lambda number: requests[number].adapter == "a2")
    assert [engine.result(number) for number in numbers] == [alone[number] for number in order]
    greedy_one = greedy(RAGGED[1], adapter="a2")
    result = engine.sample([greedy_one])[0]
    logprobs = full_logprobs(models["a2"], [*RAGGED[1], *result.tokens])[-NEW:]
    if precision == "fp32":
        torch.testing.assert_close(torch.tensor(result.logprobs), logprobs.amax(-1), rtol=1e-5, atol=1e-5)


def test_adapters_come_and_go_by_name() -> None:
    base = load_model(resolve("debug:llama"), dtype="fp32").requires_grad_(False)
    engine = SamplingEngine(base, slots=4)
    adapter = beside_with(base, 0, **SHAPES[0])
    engine.add("first", adapter)
    with pytest.raises(ConfigError, match="there is an adapter 'first' already"):
        engine.add("first", adapter)
    with pytest.raises(ConfigError, match=r"no adapter 'fist'.*did you mean 'first'"):
        engine.submit(greedy(RAGGED[0], adapter="fist"))
    with pytest.raises(ConfigError, match="no adapter 'second'"):
        engine.remove("second")
    tokens = engine.sample([greedy(RAGGED[0], adapter="first")])[0].tokens
    assert tokens != engine.sample([greedy(RAGGED[0])])[0].tokens
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            if ".lora_B" in name:
                parameter.fill_(float("nan"))
    good, bad = engine.submit(greedy(RAGGED[1])), engine.submit(greedy(RAGGED[0], adapter="first"))
    while engine.busy:
        engine.step()
    with pytest.raises(NonFiniteError):
        engine.result(bad)
    assert len(engine.result(good).tokens) == NEW
    engine.remove("first")
    assert engine.adapters == []


@pytest.mark.parametrize("kind", ["gpt_neox", "gpt2"])
def test_adapters_of_queries_keys_and_values_in_one_matrix(kind: str) -> None:
    model = load_model(resolve(f"debug:{kind}"), dtype="fp32")
    tinker.apply_lora(model, tinker.LoraConfig(rank=2, train_mlp=False, train_unembed=False))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:  # also where a mask holds it at 0
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    results = SamplingEngine(model, slots=4).sample([greedy(prompt) for prompt in RAGGED])
    for prompt, result in zip(RAGGED, results, strict=True):
        logprobs = full_logprobs(model, [*prompt, *result.tokens])[-NEW:]
        assert logprobs.argmax(-1).tolist() == result.tokens
        torch.testing.assert_close(torch.tensor(result.logprobs), logprobs.amax(-1), rtol=1e-5, atol=1e-5)


def test_frequencies_that_follow_the_length_are_those_of_each_token() -> None:
    stretched = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    config = debug_config("llama", rope_parameters=stretched, max_position_embeddings=16)
    model = load_model(resolve("debug:llama"), config=config, dtype="fp32")
    result = SamplingEngine(model, slots=4).sample([greedy(RAGGED[0])])[0]
    for count in range(NEW):
        text = torch.tensor([[*RAGGED[0], *result.tokens[:count]]])
        with torch.no_grad():
            logprobs = model(text, use_cache=False).logits[0, -1].log_softmax(-1)
        assert int(logprobs.argmax()) == result.tokens[count]
        assert float(logprobs.max()) == pytest.approx(result.logprobs[count], abs=1e-5)


def test_stops() -> None:
    model, tokenizer = load_model(resolve("debug:llama"), dtype="fp32"), debug_tokenizer()
    engine = SamplingEngine(model, tokenizer=tokenizer, stop_token_ids=[1], slots=4)
    free = SamplingRequest(RAGGED[0], 40, seed=1, stop=[])
    tokens = engine.sample([free])[0].tokens
    assert len(tokens) == 40
    pieces = [tokenizer.decode(tokens[:count]) for count in range(41)]

    def plain(count: int) -> bool:
        before, after = pieces[count - 1], pieces[count]
        return after.startswith(before) and after > before and after[len(before) :].isascii()

    border = next(n for n in range(8, 40) if plain(n - 1) and plain(n) and plain(n + 1))
    across = pieces[border + 1][len(pieces[border - 1]) - 1 : len(pieces[border]) + 1]  # of three tokens
    ended = next(count for count in range(41) if across in pieces[count])
    by_string = engine.sample([replace(free, stop=["nowhere in it", across])])[0]
    assert (by_string.tokens, by_string.stop_reason) == (tokens[:ended], "stop")
    assert engine.sample([replace(free, stop=across)])[0] == by_string
    by_id = engine.sample([replace(free, stop=[tokens[5]])])[0]
    assert (by_id.tokens, by_id.stop_reason) == (tokens[: tokens.index(tokens[5]) + 1], "stop")
    own = SamplingEngine(model, stop_token_ids=[tokens[5]], slots=4)
    assert own.sample([replace(free, stop=None)])[0] == by_id
    assert own.sample([free])[0].tokens == tokens
    with pytest.raises(ConfigError, match="stop strings need a tokenizer"):
        own.submit(replace(free, stop="x"))


def test_texts_can_be_watched_and_given_up() -> None:
    engine = SamplingEngine(load_model(resolve("debug:llama"), dtype="fp32"), slots=4)
    whole = engine.sample([MIXED[0]])[0]
    assert list(engine.stream(MIXED[0])) == whole.tokens
    other = engine.submit(MIXED[2])
    stream = engine.stream(MIXED[0])
    assert [next(stream), next(stream)] == whole.tokens[:2]
    stream.close()
    engine.cancel(other)
    assert not engine.busy


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("max_tokens", 1.5, "1.5 is no whole number"),
        ("max_tokens", "3", "'3' is no whole number"),
        ("top_k", True, "True is no whole number"),
        ("topk_logprobs", 1.5, "1.5 is no whole number"),
        ("seed", "a", "'a' is no whole number"),
        ("temperature", None, "None is no number"),
        ("top_p", "0.9", "'0.9' is no number"),
        ("stop", 5, "5 is no list; give a list of token ids or strings"),
        ("stop", b"end", "b'end' is no list"),
        ("stop", [1.5], "1.5 is neither a token id nor a string"),
        ("stop", [None], "None is neither a token id nor a string"),
        ("stop", [True], "True is neither a token id nor a string"),
        ("stop", [[1, 2]], r"\[1, 2\] is neither a token id nor a string"),
        ("stop", ["\ud83d"], ".* holds half a character"),
    ],
)
def test_requests_of_another_type_are_named(field: str, value: object, told: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}: {told}"):
        replace(MIXED[0], **{field: value})


def test_stops_of_arrays_and_tensors_are_stops() -> None:
    for given in ([np.int64(5), np.int32(7)], np.array([5, 7]), torch.tensor([5, 7])):
        assert replace(MIXED[0], stop=given).stop_ids == {5, 7}


def test_what_cannot_be_sampled_is_refused() -> None:
    model = load_model(resolve("debug:gpt2"), config=debug_config("gpt2", n_positions=32), dtype="fp32")
    engine = SamplingEngine(model, slots=4)
    result = engine.sample([SamplingRequest(range(2, 22), 50, seed=0, stop=[])])[0]
    assert (len(result.tokens), result.stop_reason) == (13, "length")
    with pytest.raises(DataError, match="longer than the 32 positions"):
        engine.submit(SamplingRequest([5] * 33, 1))
    with pytest.raises(DataError, match="token 9999 is not among"):
        engine.submit(SamplingRequest([5, 9999], 1))
    with pytest.raises(ConfigError, match="prompt"):
        SamplingRequest([], 1)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError):
        engine.sample([MIXED[0]])
    assert not engine.busy


KINDS = ["llama", "qwen3", "gemma2", "gemma3_text", "cohere2", "gpt2", "falcon", "mixtral", "olmoe", "gpt_oss", "phi"]
KINDS += ["granite", "qwen3_next", "mamba", "phi3"]


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_so_they_are_with_more_threads(kind: str, tmp_path: Path) -> None:
    test_greedy_tokens_and_logprobs_are_those_of_plain_transformers(kind, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_and_logprobs_are_those_of_plain_transformers(kind: str, tmp_path: Path) -> None:
    path = strong(kind, tmp_path)
    plain = plain_model(path, torch.float32)
    engine = SamplingEngine(load_model(resolve(str(path)), dtype="fp32"), slots=4)
    for prompt, result in zip(RAGGED, engine.sample([greedy(p, prompt_logprobs=True) for p in RAGGED]), strict=True):
        assert result.tokens == expected_greedy(plain, prompt)
        logprobs = full_logprobs(plain, [*prompt, *result.tokens])
        own = logprobs.gather(-1, torch.tensor([*prompt, *result.tokens])[1:, None])[:, 0]
        assert result.stop_reason == "length"
        assert result.prompt_logprobs is not None
        assert result.prompt_logprobs[0] is None
        given = torch.tensor([*result.prompt_logprobs[1:], *result.logprobs])
        torch.testing.assert_close(given, own, rtol=1e-5, atol=1e-5)
