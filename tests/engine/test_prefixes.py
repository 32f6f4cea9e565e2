"""Prompts that two answers share, run once: the same log-probabilities and gradients as run with each."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from luthier.batch import Batch, Sample
from luthier.config.sections import SGDConfig
from luthier.engine.build import build_state
from luthier.engine.evaluate import logprobs_of
from luthier.engine.prefixes import prefix_fault, share
from luthier.engine.state import TrainState
from luthier.engine.step import forward_backward_all
from luthier.hf.debug.tiny import debug_config
from luthier.hf.rows.documents import Documents, documents_of
from luthier.hf.source import resolve
from luthier.losses.preference import document_sums
from tests.oracles.plain import gradient_error, save_strong

SHAPES = [(11, (5, 7)), (40, (3, 30)), (1, (4, 4)), (33, (64, 1))]
"""Tokens of a prompt, and of its two answers."""


def pairs(shapes: Any = SHAPES, vocabulary: int = 400) -> list[Sample]:
    """Rows of two answers; one more row is a document alone."""
    draw = np.random.default_rng(0)
    rows = []
    for prompt, answers in shapes:
        begin = draw.integers(4, vocabulary, prompt)
        documents = []
        for length in answers:
            ids = np.concatenate([begin, draw.integers(4, vocabulary, length)])
            documents.append(Sample.from_ids(ids, [0.0] * prompt + [1.0] * length))
        rows.append(Sample.join(documents))
    rows.append(Sample.from_ids(draw.integers(4, vocabulary, 9), np.ones(9)))
    return rows


def state_of(path: Path | str, precision: str = "fp64", **more: Any) -> TrainState:
    return build_state(
        resolve(str(path)),
        adapter=None,
        optimizer=SGDConfig(name="sgd", learning_rate=0.1),
        precision=precision,  # type: ignore[arg-type]
        device=torch.device("cpu"),
        **more,
    )


def gradients_of(state: TrainState, batches: list[Batch], shared: bool) -> tuple[float, dict[str, torch.Tensor]]:
    def loss(logprobs: torch.Tensor, batch: Batch) -> torch.Tensor:
        sums = document_sums(logprobs, batch.weights[0], batch.cu_seqlens)
        return sums.square().sum() * 1e-3

    for parameter in state.trainable.values():
        parameter.grad = None
    outputs = forward_backward_all(state, batches, loss, share_prefixes=shared)
    gradients = {name: p.grad.clone() for name, p in state.trainable.items() if p.grad is not None}
    return float(sum(output.loss for output in outputs)), gradients


KINDS = ["llama", "qwen3", "gemma2", "mistral", "gpt_neox", "olmo2", "mixtral", "phi3", "gpt2", "gemma3_text"]


def config_of(kind: str) -> Any:
    config = debug_config(kind, layers=4)
    for name in ("sliding_window",):
        if getattr(config, name, None) is not None:
            setattr(config, name, 8)  # shorter than prompts, so that a window by rows of the batch would show
    return config


def in_double(state: TrainState) -> None:
    """Let RMS norms work in float64, where Transformers' own round to fp32 and make a last bit 1e-7."""
    for module in state.model.modules():
        if type(module).__name__.endswith("RMSNorm") and not type(module).__name__.startswith("Gemma"):
            module.forward = partial(_norm, module)


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    normed: torch.Tensor = module.weight * (x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt())
    return normed


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_prompts_run_with_each_answer(kind: str, tmp_path: Path) -> None:
    state = state_of(save_strong(config_of(kind), tmp_path))
    assert prefix_fault(state) == ""
    in_double(state)
    batches = [Batch.pack(pairs()), Batch.pack(pairs()[1:3])]
    shared = share(batches[0])
    assert shared is not None
    assert shared.row.tokens == batches[0].tokens - sum(prompt for prompt, _ in SHAPES) + 1  # one token stays to each
    expected = gradients_of(state, batches, shared=False)
    found = gradients_of(state, batches, shared=True)
    tolerance = 1e-6 if kind.startswith(("gemma", "cohere", "mixtral")) else 1e-10  # theirs round to fp32 inside
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    assert gradient_error(found[1], expected[1]) < tolerance


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_blocked_attention_goes_on_from_a_shared_prompt(kind: str, precision: str, tmp_path: Path) -> None:
    path = save_strong(config_of(kind), tmp_path, scale=0.5)
    state = state_of(path, precision)
    batches = [Batch.pack(pairs())]
    expected, found = gradients_of(state, batches, shared=False), gradients_of(state, batches, shared=True)
    exact = gradients_of(state_of(path), batches, shared=False)
    worst = gradient_error(expected[1], exact[1])
    assert gradient_error(found[1], exact[1]) < max(2 * worst, 1e-5)


def test_recomputed_layers_know_their_prompts(tmp_path: Path) -> None:
    path = save_strong(config_of("llama"), tmp_path)
    batches = [Batch.pack(pairs())]
    plain = state_of(path)
    in_double(plain)
    expected = gradients_of(plain, batches, shared=False)
    for precision in ("fp64", "fp32"):
        state = state_of(path, precision, activation_checkpointing="full")
        in_double(state)
        found = gradients_of(state, batches, shared=True)
        assert gradient_error(found[1], expected[1]) < (1e-10 if precision == "fp64" else 1e-4)


def test_log_probabilities_without_gradients(tmp_path: Path) -> None:
    state = state_of(save_strong(config_of("llama"), tmp_path))
    batch = Batch.pack(pairs())
    [alone], [together] = logprobs_of(state, [batch]), logprobs_of(state, [batch], share_prefixes=True)
    assert torch.allclose(alone, together, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("mamba", "cannot hold several documents|through which"), ("jamba", "through which|several documents")],
)
def test_what_cannot_share_is_named(kind: str, words: str) -> None:
    fault = prefix_fault(state_of(f"debug:{kind}", "fp32"))
    assert re.search(words, fault), fault


def test_the_channel_holds_the_tree() -> None:
    documents = Documents.of([0, 3, 5, 9], [-1, 0, 0])
    channel = documents.channel("cpu")
    lost = documents_of(channel.clone())
    assert lost is not None
    assert (lost.bounds, lost.parents) == (documents.bounds, documents.parents)
    assert documents.positions("cpu").tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6]
    assert documents.longest == 7
    assert documents.meets("cpu")[5].tolist() == [True] * 3 + [False] * 2 + [True] * 4
    with pytest.raises(ValueError, match="goes on from"):
        Documents.of([0, 3, 5, 9], [-1, 0, 1])


def test_nothing_to_share() -> None:
    alone = Sample.from_ids(np.arange(9), np.ones(9))
    assert share(Batch.pack([alone])) is None
    apart = Sample.join([Sample.from_ids(np.arange(n, n + 4), np.ones(4)) for n in (1, 9)])
    assert share(Batch.pack([apart])) is None
    same = Batch.pack([Sample.join([alone, alone])])
    shared = share(same)
    assert shared is not None
    assert shared.row.tokens == same.tokens - 7  # each keeps its last token
