"""The numbers contract on a real pretrained model: no further from float64 than 1.5x what plain Transformers is."""

import copy
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from luthier.batch import Batch, Sample
from luthier.config import LoraConfig
from luthier.config.sections import SGDConfig
from luthier.data.mask import Masker
from luthier.engine.build import DTYPES, build_state
from luthier.engine.state import TrainState
from luthier.engine.step import forward_backward
from luthier.hf.gguf_quick import quick_gguf
from luthier.hf.render import Encoder
from luthier.hf.source import resolve
from luthier.hf.tokenizer import load_tokenizer
from luthier.verify.reference import widening
from tests.oracles.plain import Reference, gradient_errors, plain_model, weighted_sum

ROWS = 2
ROW_FILE = Path(__file__).parents[2] / "src" / "luthier" / "demo" / "heldout.jsonl"


@pytest.fixture(scope="module")
def samples(smollm2: str) -> list[Sample]:
    masker = Masker(Encoder(load_tokenizer(resolve(smollm2))))
    found = []
    for line in ROW_FILE.read_text(encoding="utf-8").splitlines()[:ROWS]:
        messages = json.loads(line)["messages"]
        masked = masker(messages, None, [1.0] * len(messages))
        found.append(Sample.from_ids(masked.ids, masked.weights))
    return found


@pytest.fixture(scope="module")
def directory(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights as plain Transformers reads them, in fp32, so that every precision starts from the same numbers."""
    source = resolve(smollm2)
    path = tmp_path_factory.mktemp("smollm2")
    with quick_gguf(source.gguf_file):
        from_gguf = plain_model(source.location, torch.float32, gguf_file=source.gguf_file)
    config = copy.deepcopy(from_gguf.config)
    del config.quantization_config  # Transformers does not save what it read from GGUF blocks
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(from_gguf.state_dict())
    plain.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def reference(directory: Path, samples: list[Sample]) -> Reference:
    """In float64 throughout, the norms too, which round to fp32 otherwise: of the millions of numbers of a real model
    one or another lies between two of fp32, and which one it falls to depends on the processor."""
    with widening():
        return weighted_sum(plain_model(directory, torch.float64), samples, 1 / total(samples))


def total(samples: list[Sample]) -> float:
    return sum(float(sample.weights.sum()) for sample in samples)


def ready(model: str | Path, precision: str, adapter: LoraConfig | None = None) -> TrainState:
    return build_state(
        resolve(str(model)),
        adapter=adapter,
        optimizer=SGDConfig(name="sgd"),
        precision=precision,  # type: ignore[arg-type]
        device=torch.device("cpu"),
    )


def gradients(state: TrainState, batches: list[Batch], factor: float) -> dict[str, torch.Tensor]:
    for batch in batches:
        forward_backward(state, batch.scaled(factor))
    return {name: p.grad for name, p in state.trainable.items() if p.grad is not None}


def test_float64(directory: Path, samples: list[Sample], reference: Reference) -> None:
    with widening():
        ours = gradients(ready(directory, "fp64"), [Batch.pack(samples)], 1 / total(samples))
    assert max(gradient_errors(ours, reference.gradients).values()) < 1e-10


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_further_from_float64_than_plain_transformers(
    directory: Path, samples: list[Sample], reference: Reference, precision: str
) -> None:
    plain = weighted_sum(plain_model(directory, DTYPES[precision]), samples, 1 / total(samples))
    allowed = 1.5 * max(gradient_errors(plain.gradients, reference.gradients).values())
    for batches in ([Batch.pack(samples)], [Batch.pack([sample]) for sample in samples]):
        ours = gradients(ready(directory, precision), batches, 1 / total(samples))
        assert max(gradient_errors(ours, reference.gradients).values()) <= allowed


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_adapter_changes_no_bit_before_its_first_step(
    directory: Path, samples: list[Sample], precision: str
) -> None:
    batch = Batch.pack(samples)
    base = forward_backward(ready(directory, precision), batch).logprobs
    adapted = ready(directory, precision, LoraConfig(rank=16))
    assert torch.equal(forward_backward(adapted, batch).logprobs, base)
    # Outside a packed batch the model's plain forward is that of plain Transformers, adapters or not.
    plain = plain_model(directory, DTYPES[precision])
    with torch.no_grad():
        ids = batch.input_ids[:, : len(samples[0])]
        assert torch.equal(adapted.model.eval()(ids).logits, plain(ids).logits)
