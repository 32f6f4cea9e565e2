"""The numbers contract: loss, gradients and log-probabilities are those of plain Transformers, each document alone."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch

from luthier.batch import Batch, Sample
from luthier.config import LoraConfig
from luthier.config.sections import SGDConfig
from luthier.engine.build import DTYPES, build_state
from luthier.engine.evaluate import evaluate
from luthier.engine.logprobs import Head
from luthier.engine.state import TrainState
from luthier.engine.step import forward_backward
from luthier.errors import ConfigError, DataError, ModelError
from luthier.hf.debug.tiny import debug_config
from luthier.hf.source import resolve
from luthier.parallel import checkpointing
from tests.oracles.plain import gradient_error, gradient_errors, plain_model, save_strong, weighted_sum
from tests.oracles.rows import documents

TYPES = ["llama", "qwen2", "qwen3", "gemma2", "cohere2", "granite", "gpt2", "phi", "mixtral"]
FLOAT64_BOUND = {"gemma2": 1e-6, "cohere2": 1e-6, "mixtral": 1e-6}  # these cast to fp32 inside
LENGTHS = [23, 1, 40, 7, 12]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: save_strong(debug_config(kind), root / kind) for kind in TYPES}


def ready(path: Path | str, precision: str, adapter: LoraConfig | None = None) -> TrainState:
    return build_state(
        resolve(str(path)),
        adapter=adapter,
        optimizer=SGDConfig(name="sgd"),
        precision=precision,  # type: ignore[arg-type]
        device=torch.device("cpu"),
    )


def run(state: TrainState, batches: list[Batch], factor: float) -> tuple[float, dict[str, torch.Tensor]]:
    state.optimizer.zero_grad()
    loss = sum(float(forward_backward(state, batch.scaled(factor)).loss) for batch in batches)
    return loss, {name: p.grad.clone() for name, p in state.trainable.items() if p.grad is not None}


def layouts(samples: list[Sample]) -> dict[str, list[Batch]]:
    return {
        "packed": [Batch.pack(samples)],
        "alone": [Batch.pack([sample]) for sample in samples],
        "accumulated": [Batch.pack(samples[:2]), Batch.pack(samples[2:])],
    }


@pytest.mark.parametrize("kind", TYPES)
def test_float64_equals_plain_transformers(models: dict[str, Path], kind: str) -> None:
    samples = documents(lengths=LENGTHS)
    factor = 1 / sum(float(s.weights.sum()) for s in samples)
    reference = weighted_sum(plain_model(models[kind], torch.float64), samples, factor)
    bound = FLOAT64_BOUND.get(kind, 1e-10)
    state = ready(models[kind], "fp64")
    for name, batches in layouts(samples).items():
        loss, gradients = run(state, batches, factor)
        assert loss == pytest.approx(reference.loss, rel=1e-7 if bound > 1e-10 else 1e-12), name
        assert gradient_error(gradients, reference.gradients) < bound, name
    for chunk in (1, 3, 10_000):
        state.head = Head(state.model, chunk)
        _, gradients = run(state, layouts(samples)["packed"], factor)
        assert gradient_error(gradients, reference.gradients) < bound, chunk


@pytest.mark.parametrize("kind", TYPES)
def test_fp32_is_within_two_in_a_million_of_float64(kind: str, tmp_path: Path) -> None:
    samples = documents(lengths=LENGTHS)
    factor = 1 / sum(float(s.weights.sum()) for s in samples)
    state = ready(f"debug:{kind}", "fp32")
    state.model.save_pretrained(tmp_path)
    reference = weighted_sum(plain_model(tmp_path, torch.float64), samples, factor)
    for name, batches in layouts(samples).items():
        _, gradients = run(state, batches, factor)
        assert gradient_error(gradients, reference.gradients) < 2e-6, name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", TYPES)
def test_strong_weights_are_as_near_to_float64_as_plain_transformers(
    models: dict[str, Path], kind: str, precision: str
) -> None:
    samples = documents(lengths=LENGTHS)
    factor = 1 / sum(float(s.weights.sum()) for s in samples)
    reference = weighted_sum(plain_model(models[kind], torch.float64), samples, factor).gradients
    plain = weighted_sum(plain_model(models[kind], DTYPES[precision]), samples, factor).gradients
    # The mean over tensors: with these weights the worst single entry of two right answers differs by chance.
    allowed = 1.5 * fmean(gradient_errors(plain, reference).values())
    state = ready(models[kind], precision)
    for name, batches in layouts(samples).items():
        _, gradients = run(state, batches, factor)
        assert fmean(gradient_errors(gradients, reference).values()) <= allowed, name


@pytest.mark.parametrize("kind", TYPES)
def test_the_loss_of_ones_own_gets_the_same_logprobs_and_gradients(models: dict[str, Path], kind: str) -> None:
    samples = documents(lengths=LENGTHS)
    reference = weighted_sum(plain_model(models[kind], torch.float64), samples)
    state = ready(models[kind], "fp64")
    batch = Batch.pack(samples)
    expected = torch.cat(reference.logprobs)
    chosen = batch.weights[0] != 0

    def cross_entropy_again(logprobs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return -(logprobs * batch.weights[0]).sum()

    output = forward_backward(state, batch, cross_entropy_again)
    bound = FLOAT64_BOUND.get(kind, 1e-10)
    assert (output.logprobs[chosen] - expected[chosen]).abs().max() < bound
    gradients = {name: p.grad for name, p in state.trainable.items() if p.grad is not None}
    assert gradient_error(gradients, reference.gradients) < bound


def test_a_microbatch_without_trained_tokens_adds_nothing(models: dict[str, Path]) -> None:
    state = ready(models["qwen3"], "fp64")
    batch = Batch.pack(documents(lengths=LENGTHS))
    forward_backward(state, batch)
    before = {name: p.grad.clone() for name, p in state.trainable.items()}
    output = forward_backward(state, batch.scaled(0.0))
    assert float(output.loss) == 0.0
    assert all(torch.equal(p.grad, before[name]) for name, p in state.trainable.items())


def test_documents_that_a_model_would_mix_are_refused(models: dict[str, Path]) -> None:
    state = ready(models["qwen3"], "fp64")
    state.packing_fault = "its documents see one another in a packed row"
    with pytest.raises(ModelError, match="5 documents in one batch"):
        forward_backward(state, Batch.pack(documents(lengths=LENGTHS)))
    forward_backward(state, Batch.pack(documents(lengths=LENGTHS)[:1]))


@pytest.mark.parametrize(
    ("kind", "ids", "told"),
    [
        ("llama", [5, 6, 100_000], "row 1: token 100000 is not among the model's"),
        ("llama", [5, -100, 6], "row 1: token -100 is not among"),
        ("gpt2", [5] * 1026, "row 1: the row is longer than the 1,024 positions"),
        ("opt", [5] * 2050, "row 1: the row is longer than the 2,048 positions"),
    ],
)
def test_what_a_model_cannot_read_is_named(kind: str, ids: list[int], told: str) -> None:
    state = ready(f"debug:{kind}", "fp32")
    samples = [Sample.from_ids(row, [1.0] * len(row), f"row {n}") for n, row in enumerate([[1, 2, 3], ids])]
    batches = [Batch.pack(samples)] if not state.packing_fault else [Batch.pack([sample]) for sample in samples]
    with pytest.raises(DataError, match=told):
        run(state, batches, 1.0)
    with pytest.raises(DataError, match=told):
        evaluate(state, batches)
    # The longest that fits does fit.
    if len(ids) > 3:
        forward_backward(state, Batch.pack([Sample.from_ids(ids[:-1], [1.0] * (len(ids) - 1))]))


def test_a_row_that_transformers_would_not_read_back_is_not_trained() -> None:
    with pytest.raises(ConfigError, match="sets the embedding of the padding token 1 to 0 whenever it reads Youtu"):
        ready("debug:youtu", "fp32")
    assert ready("debug:youtu", "fp32", LoraConfig(rank=4)).trainable


def test_targets_that_are_not_trained_on_may_be_anything(models: dict[str, Path]) -> None:
    state = ready(models["qwen3"], "fp64")
    sample = documents(lengths=LENGTHS)[0]
    masked = replace(sample, targets=np.where(sample.weights == 0, -100, sample.targets))
    expected, _ = run(state, [Batch.pack([sample])], 1.0)
    assert run(state, [Batch.pack([masked])], 1.0)[0] == expected


@pytest.mark.parametrize("policy", ["full", "selective", "offloaded"])
def test_activation_checkpointing_changes_no_gradient(models: dict[str, Path], policy: str) -> None:
    samples = documents(lengths=LENGTHS)
    for kind in ("qwen3", "gemma2"):
        _, expected = run(ready(models[kind], "fp64"), layouts(samples)["packed"], 1.0)
        state = build_state(
            resolve(str(models[kind])),
            adapter=None,
            optimizer=SGDConfig(name="sgd"),
            precision="fp64",
            device=torch.device("cpu"),
            activation_checkpointing=policy,  # type: ignore[arg-type]
        )
        _, gradients = run(state, layouts(samples)["packed"], 1.0)
        assert gradient_error(gradients, expected) < 1e-12


def test_offloading_moves_the_inputs_of_layers_and_nothing_else(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[torch.Size] = []

    class Watched(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool) -> None:
            super().__init__(lambda tensor: (moved.append(tensor.shape), tensor)[1], lambda tensor: tensor)

    monkeypatch.setattr(checkpointing, "save_on_cpu", Watched)
    state = build_state(
        resolve(str(models["qwen3"])),
        adapter=None,
        optimizer=SGDConfig(name="sgd"),
        precision="fp64",
        device=torch.device("cpu"),
        activation_checkpointing="offloaded",
    )
    run(state, layouts(documents(lengths=LENGTHS))["packed"], 1.0)
    inputs = [shape for shape in moved if len(shape) == 3]
    assert inputs == [(1, sum(LENGTHS), 64)] * 2
    assert sum(shape.numel() for shape in moved if len(shape) != 3) < 2 * sum(LENGTHS) * 64


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_an_adapter_changes_no_bit_before_its_first_step(models: dict[str, Path], kind: str, precision: str) -> None:
    samples = documents(lengths=LENGTHS)
    base = ready(models[kind], precision)
    adapted = ready(models[kind], precision, LoraConfig(rank=4, target=["all-linear"]))
    batch = Batch.pack(samples)
    assert torch.equal(forward_backward(adapted, batch).logprobs, forward_backward(base, batch).logprobs)
