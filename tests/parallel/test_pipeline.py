"""Pipelines of 2 and 4 ranks: the numbers of plain Transformers and PEFT, and of gradient accumulation bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from luthier.batch import Batch
from luthier.config import LoraConfig
from luthier.config.sections import AdamWConfig, SGDConfig
from luthier.engine.build import build_state
from luthier.engine.step import forward_backward_all, optim_step
from luthier.hf import load
from luthier.hf.debug.tiny import debug_config
from luthier.hf.source import resolve
from luthier.parallel.programs import PROGRAMS
from tests.adapters.models import PEFT_WARNINGS
from tests.oracles.plain import Reference, gradient_error, plain_model, save_strong, weighted_sum
from tests.oracles.rows import documents
from tests.parallel.cases import adapted_reference, measure, microbatches, ready, reference, strengthen

pytestmark = list(PEFT_WARNINGS)

TYPES = {
    "qwen3": 1e-10,
    "llama": 1e-10,
    "gemma2": 1e-6,
    "gemma3_text": 1e-6,
    "cohere2": 1e-6,
    "mistral": 1e-10,
    "granite": 1e-10,
    "gpt2": 1e-10,
    "falcon": 1e-10,
    "mixtral": 1e-6,
}
"""Bounds in float64; some types cast to fp32 inside."""
TIES = {"llama": {"tie_word_embeddings": True}, "qwen3": {"tie_word_embeddings": False}}
ADAPTED = {
    "qwen3": ["q_proj", "v_proj", "down_proj"],
    "llama": ["q_proj", "o_proj", "lm_head"],
    "gemma3_text": ["k_proj", "up_proj"],
    "gpt2": ["c_attn", "attn.c_proj"],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: save_strong(debug_config(kind, layers=4, **TIES.get(kind, {})), root / kind) for kind in TYPES}


def check(results: list[dict[str, Any]], expected: Reference, bound: float) -> None:
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.gradients.values()))
    together: dict[str, torch.Tensor] = {}
    for result in results:
        assert not result["missing"]
        assert result["loss"] == pytest.approx(expected.loss, rel=1e-10)
        assert result["validation"] == pytest.approx(expected.loss, rel=1e-10)
        assert result["norm"] == pytest.approx(norm, rel=bound)
        for name, gradient in result["gradients"].items():
            assert torch.equal(gradient, together.setdefault(name, gradient)), name
    assert gradient_error(together, expected.gradients) < bound


@pytest.mark.parametrize("kind", TYPES)
def test_two_stages(world: Any, models: dict[str, Path], kind: str) -> None:
    check(world(2).run(measure, models[kind], {"pp": 2}, documents()), reference(models[kind]), TYPES[kind])


# On two stages every type is tried; four have a middle, of which two kinds of embedding are enough.
@pytest.mark.parametrize(
    "kind", ["qwen3", "gpt2", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("llama", "gemma3_text"))]
)
def test_four_stages(world: Any, models: dict[str, Path], kind: str) -> None:
    check(world(4).run(measure, models[kind], {"pp": 4}, documents()), reference(models[kind]), TYPES[kind])


SCHEDULES = [(name, kind) for name in PROGRAMS for kind in ("qwen3", "llama") if name != "1f1b"]


@pytest.mark.parametrize(("schedule", "kind"), [*SCHEDULES, ("zero_bubble", "mixtral"), ("dualpipe_v", "falcon")])
def test_schedules(world: Any, models: dict[str, Path], schedule: str, kind: str) -> None:
    results = world(2).run(measure, models[kind], {"pp": 2}, documents(), pipeline_schedule=schedule)
    check(results, reference(models[kind]), TYPES[kind])


@pytest.mark.parametrize(
    ("more", "schedule", "kind"),
    [
        ({"dp_shard": 2}, "1f1b", "llama"),
        ({"dp_shard": 2}, "interleaved_1f1b", "qwen3"),
        ({"dp_shard": 2}, "dualpipe_v", "llama"),
        ({"dp_replicate": 2}, "zero_bubble", "qwen3"),
        ({"tp": 2}, "zero_bubble_v", "qwen3"),
        ({"cp": 2}, "1f1b", "gemma3_text"),
    ],
)
def test_with_other_layouts(
    world: Any, models: dict[str, Path], more: dict[str, int], schedule: str, kind: str
) -> None:
    results = world(4).run(measure, models[kind], {"pp": 2, **more}, documents(), pipeline_schedule=schedule)
    check(results, reference(models[kind]), TYPES[kind])


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_recomputation_changes_no_number(world: Any, models: dict[str, Path], schedule: str) -> None:
    results = world(2).run(
        measure, models["qwen3"], {"pp": 2}, documents(), pipeline_schedule=schedule, activation_checkpointing="full"
    )
    check(results, reference(models["qwen3"]), 1e-10)


@pytest.mark.parametrize(("kind", "schedule"), [*((kind, "1f1b") for kind in ADAPTED), ("qwen3", "zero_bubble")])
def test_adapters_equal_peft(world: Any, models: dict[str, Path], kind: str, schedule: str) -> None:
    lora = LoraConfig(rank=4, target=ADAPTED[kind])
    results = world(2).run(measure, models[kind], {"pp": 2}, documents(), lora=lora, pipeline_schedule=schedule)
    expected = adapted_reference(models[kind], ADAPTED[kind], fan_in_fan_out=kind == "gpt2")
    check(results, expected, TYPES[kind])


def both(path: Path, schedule: str, count: int, lora: LoraConfig | None = None) -> dict[str, tuple[Any, Any]]:
    """Gradients in fp32 of a pipeline and of accumulation in this process."""
    samples = documents(lengths=[24, 40, 7, 33, 64, 1, 50, 9][: 2 * count])
    piped = ready(path, {"pp": 2}, precision="fp32", adapter=lora, pipeline_schedule=schedule)
    alone = build_state(
        resolve(str(path)),
        adapter=lora,
        optimizer=SGDConfig(name="sgd"),
        precision="fp32",
        device=torch.device("cpu"),
    )
    batches = [Batch.pack(samples[2 * number : 2 * number + 2]).scaled(1 / 64) for number in range(count)]
    found = []
    for state in (piped, alone):
        if lora is not None:
            strengthen(state)
        outputs = forward_backward_all(state, batches)
        if state.pipeline is not None:
            state.pipeline.settle()
        found.append({name: p.grad for name, p in state.trainable.items()})
        found[-1]["loss"] = torch.stack([output.loss for output in outputs])
        found[-1]["logprobs"] = torch.cat([output.logprobs for output in outputs])
    return {name: (value, found[1][name]) for name, value in found[0].items()}


@pytest.mark.parametrize("schedule", PROGRAMS)
def test_the_bits_are_those_of_accumulation(world: Any, models: dict[str, Path], schedule: str) -> None:
    for lora in (None, LoraConfig(rank=4, target=["attn", "mlp"])):
        for compared in world(2).run(both, models["qwen3"], schedule, 4, lora):
            assert all(torch.equal(ours, theirs) for ours, theirs in compared.values())


def test_a_tied_embedding_adds_its_two_sums_in_another_order(world: Any, models: dict[str, Path]) -> None:
    different = set()
    for compared in world(2).run(both, models["llama"], "1f1b", 4):
        for name, (ours, theirs) in compared.items():
            if not torch.equal(ours, theirs):
                different.add(name)
                assert float((ours - theirs).abs().max()) <= 1e-6 * float(theirs.abs().max())
    assert different <= {"model.embed_tokens.weight"}


def few_and_uneven(path: Path, lengths: list[int], schedule: str) -> Any:
    state = ready(path, {"pp": 2}, pipeline_schedule=schedule)
    samples = documents(lengths=lengths)
    batches = [Batch.pack([sample]) for sample in samples]
    squares = forward_backward_all(
        state, batches, lambda logprobs, batch: (logprobs * logprobs * batch.weights[0, : len(logprobs)]).sum()
    )
    assert [len(output.logprobs) for output in squares] == lengths
    return [float(output.loss) for output in squares], {n: p.grad for n, p in state.trainable.items()}


@pytest.mark.parametrize(
    ("lengths", "schedule"), [([9], "1f1b"), ([9, 4, 30], "interleaved_1f1b"), ([5], "dualpipe_v")]
)
def test_few_microbatches_of_any_length_with_a_loss_of_ones_own(
    world: Any, models: dict[str, Path], lengths: list[int], schedule: str
) -> None:
    model = plain_model(models["qwen3"], torch.float64)
    losses = []
    for sample in documents(lengths=lengths):
        logits = model(input_ids=torch.from_numpy(sample.tokens)[None], use_cache=False).logits[0]
        weights = torch.from_numpy(sample.weights).double()
        logprobs = logits.log_softmax(-1).gather(1, torch.from_numpy(sample.targets)[:, None])[:, 0]
        loss = (logprobs.square() * weights).sum()
        loss.backward()
        losses.append(float(loss.detach()))
    together = {}
    for found, gradients in world(2).run(few_and_uneven, models["qwen3"], lengths, schedule):
        assert found == pytest.approx(losses, rel=1e-10)
        together |= gradients
    assert gradient_error(together, {n: p.grad for n, p in model.named_parameters()}) < 1e-10


def rows_alone(path: Path) -> Any:
    state = ready(path, {"pp": 2})
    samples = documents(lengths=[12, 5, 20])
    batches = [Batch.pack([sample]).scaled(0.1) for sample in samples]
    outputs = forward_backward_all(state, batches)
    return float(torch.stack([output.loss for output in outputs]).sum()), {
        n: p.grad for n, p in state.trainable.items()
    }


@pytest.mark.parametrize("kind", ["deepseek_v32", "deepseek_v4"])
def test_rows_alone_where_documents_cannot_be_packed(world: Any, tmp_path: Path, kind: str) -> None:
    """Keys chosen by an index, and several streams of hidden states."""
    path = save_strong(debug_config(kind, layers=4), tmp_path / kind)
    expected = weighted_sum(plain_model(path, torch.float64), documents(lengths=[12, 5, 20]), 0.1)
    together = {}
    for loss, gradients in world(2).run(rows_alone, path):
        assert loss == pytest.approx(expected.loss, rel=1e-6)
        together |= gradients
    got = {name: gradient for name, gradient in together.items() if gradient is not None}  # an index has none
    assert gradient_error(got, expected.gradients) < 1e-6


def one_step(path: Path, lora: LoraConfig) -> Any:
    """Gradients of this rank's stage, all of what trains there, and how many steps were skipped."""
    state = ready(path, {"pp": 2}, adapter=lora)
    strengthen(state)
    outputs = forward_backward_all(state, microbatches(documents(), 0, 1))
    gradients = {name: p.grad for name, p in state.trainable.items()}
    update = optim_step(state, loss=float(torch.stack([output.loss for output in outputs]).sum()))
    return gradients, update.gradient_norm, state.counters.skipped_steps


@pytest.mark.parametrize(("layer", "stage"), [(0, 0), (3, 1)])
def test_a_stage_may_have_nothing_that_trains(world: Any, models: dict[str, Path], layer: int, stage: int) -> None:
    target = f"layers.{layer}.self_attn.q_proj"
    results = world(2).run(one_step, models["qwen3"], LoraConfig(rank=4, target=[target]))
    expected = adapted_reference(models["qwen3"], [target])
    assert gradient_error(results[stage][0], expected.gradients) < 1e-10
    assert results[1 - stage][0] == {}
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.gradients.values()))
    assert [found for _, *found in results] == [[pytest.approx(norm, rel=1e-10), 0]] * 2


def steps(path: Path, layout: dict[str, int]) -> Any:
    """Weights after some steps, names of copies, and what was read of the checkpoint."""
    read: set[str] = set()
    original = load.open_weights

    class Watched:
        def __init__(self, name: str, inner: Any) -> None:
            self.name, self.inner = name, inner

        def __getitem__(self, index: Any) -> Any:
            read.add(self.name)
            return self.inner[index]

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    from contextlib import contextmanager

    @contextmanager
    def watched(directory: Path) -> Any:
        with original(directory) as weights:
            yield {name: Watched(name, value) for name, value in weights.items()}

    with mock.patch.object(load, "open_weights", watched):
        state = ready(path, layout, precision="fp32", optimizer=AdamWConfig(learning_rate=0.01))
    assert state.mesh is not None
    assert state.pipeline is not None
    for seed in range(3):
        batches = microbatches(documents(seed), 0, 1)
        outputs = forward_backward_all(state, batches)
        optim_step(state, loss=float(torch.stack([output.loss for output in outputs]).sum()))
    weights = {name: p.detach() for name, p in state.model.named_parameters(remove_duplicate=False)}
    return weights, state.pipeline.copies, read


def test_stages_read_their_own_weights_and_copies_stay_equal(world: Any, models: dict[str, Path]) -> None:
    (first, own, read_first), (last, copies, read_last) = world(2).run(steps, models["llama"], {"pp": 2})
    embedding = "model.embed_tokens.weight"
    assert (own, copies) == (frozenset(), {embedding})
    assert torch.equal(first[embedding], last[embedding])
    assert torch.equal(last[embedding], last["lm_head.weight"])
    assert read_first & read_last == {embedding}
    assert read_first | read_last == (first.keys() | last.keys()) - {"lm_head.weight"}
