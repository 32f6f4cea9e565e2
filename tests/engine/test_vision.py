"""Models that see: one step from a file of rows with images equals Transformers' own, in every family."""

from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from luthier.batch import Batch
from luthier.config import DataConfig, LoraConfig
from luthier.config.sections import SGDConfig, SourceConfig
from luthier.data.loader import Rows, build_rows, pack
from luthier.engine.build import build_state
from luthier.engine.evaluate import evaluate
from luthier.engine.pictures import picture_fault
from luthier.engine.state import TrainState
from luthier.engine.step import forward_backward_all
from luthier.errors import ModelError
from luthier.hf.source import resolve
from luthier.hf.tokenizer import load_tokenizer
from luthier.hf.vision.processor import open_eyes
from luthier.verify.reference import widening
from tests.oracles.plain import gradient_errors
from tests.oracles.seeing import save_seeing, step, write_rows

FAMILIES = ("gemma3", "idefics3", "llava", "mllama", "qwen2_5_vl", "smolvlm")
PACKED = {"idefics3", "llava", "qwen2_5_vl", "smolvlm"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("seeing")
    return {kind: save_seeing(kind, root / kind) for kind in FAMILIES}


def ready(path: Path, adapter: LoraConfig | None = None) -> tuple[TrainState, Any]:
    source = resolve(str(path))
    device = torch.device("cpu")
    state = build_state(source, adapter=adapter, optimizer=SGDConfig(name="sgd"), precision="fp64", device=device)
    tokenizer = load_tokenizer(source)
    open_eyes(source, tokenizer)
    return state, tokenizer


def rows_of(path: Path, tokenizer: Any) -> Rows:
    rows = build_rows(DataConfig(train=[SourceConfig(path=str(path))], sequence_length=512), "train", tokenizer)
    assert isinstance(rows, Rows)
    return rows


def taken(state: TrainState, batches: list[Batch]) -> tuple[float, dict[str, torch.Tensor]]:
    state.model.eval()
    state.optimizer.zero_grad()
    weight = sum(batch.total_weight for batch in batches)
    outputs = forward_backward_all(state, [batch.scaled(1 / weight) for batch in batches])
    gradients = {name: p.grad.clone() for name, p in state.trainable.items() if p.grad is not None}
    return sum(float(output.loss) for output in outputs), gradients


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_step_is_that_of_transformers(models: dict[str, Path], kind: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl")
    with ExitStack() as stack:
        stack.enter_context(widening() if kind == "gemma3" else nullcontext())  # it casts to fp32 inside
        state, tokenizer = ready(models[kind])
        rows = rows_of(path, tokenizer)
        plain = AutoModelForImageTextToText.from_pretrained(models[kind], dtype=torch.float64)
        assert type(state.model) is type(plain)
        assert sum(p.numel() for p in state.model.parameters()) == sum(p.numel() for p in plain.parameters())
        expected = step(plain, rows.sight.processor, tmp_path)  # type: ignore[union-attr]
        batches = [pack([rows[index]], rows.sight) for index in range(len(rows))]
        loss, gradients = taken(state, batches)
    assert loss == pytest.approx(expected.loss, rel=1e-12)
    errors = gradient_errors(gradients, expected.gradients, tiny=1e-9)
    assert max(errors.values()) < 1e-10, max(errors.items(), key=lambda item: item[1])
    eyes = [name for name in errors if "vision" in name or "visual" in name]
    assert eyes
    assert any("text_model" in name or "language_model" in name for name in errors)


@pytest.mark.parametrize("kind", sorted(PACKED))
def test_rows_with_images_packed_are_those_alone(models: dict[str, Path], kind: str, tmp_path: Path) -> None:
    state, tokenizer = ready(models[kind])
    rows = rows_of(write_rows(tmp_path / "rows.jsonl"), tokenizer)
    assert rows.sight is not None
    assert picture_fault(state, rows.sight) == ""
    alone = taken(state, [pack([rows[index]], rows.sight) for index in range(len(rows))])
    together = taken(state, [pack([rows[index] for index in range(len(rows))], rows.sight)])
    assert together[0] == pytest.approx(alone[0], rel=1e-12)
    assert max(gradient_errors(together[1], alone[1], tiny=1e-9).values()) < 1e-10


@pytest.mark.parametrize("kind", sorted(set(FAMILIES) - PACKED))
def test_a_family_that_cannot_be_packed_says_why(models: dict[str, Path], kind: str, tmp_path: Path) -> None:
    state, tokenizer = ready(models[kind])
    rows = rows_of(write_rows(tmp_path / "rows.jsonl"), tokenizer)
    assert rows.sight is not None
    state.picture_fault = picture_fault(state, rows.sight)
    assert state.picture_fault
    with pytest.raises(ModelError, match="cannot run 2 documents in one batch: its "):
        taken(state, [pack([rows[0], rows[1]], rows.sight)])


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("target", [["attn"], ["vision"], ["attn", "vision_mlp"]])
def test_adapters_train_where_they_are_asked_for(
    models: dict[str, Path], kind: str, target: list[str], tmp_path: Path
) -> None:
    state, tokenizer = ready(models[kind], LoraConfig(rank=2, target=target))
    rows = rows_of(write_rows(tmp_path / "rows.jsonl"), tokenizer)
    with torch.no_grad():
        for name, parameter in state.trainable.items():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    _, gradients = taken(state, [pack([rows[index]], rows.sight) for index in range(2)])
    assert all("lora_" in name for name in state.trainable)
    seen = {"vision" in name or "visual" in name for name, gradient in gradients.items() if gradient.abs().max() > 0}
    assert seen == {bool(set(target) & {"vision", "vision_mlp"}), not set(target) & {"attn"}}


@pytest.mark.parametrize("kind", ["llava", "mllama", "smolvlm"])
def test_adapters_may_stand_between_eyes_and_text(models: dict[str, Path], kind: str, tmp_path: Path) -> None:
    state, tokenizer = ready(models[kind], LoraConfig(rank=2, target=["projector"]))
    rows = rows_of(write_rows(tmp_path / "rows.jsonl"), tokenizer)
    _, gradients = taken(state, [pack([rows[0]], rows.sight)])
    assert all(gradient.abs().max() > 0 for name, gradient in gradients.items() if "lora_B" in name)


def test_evaluation_sees_images(models: dict[str, Path], tmp_path: Path) -> None:
    state, tokenizer = ready(models["llava"])
    rows = rows_of(write_rows(tmp_path / "rows.jsonl"), tokenizer)
    batches = [pack([rows[index]], rows.sight) for index in range(len(rows))]
    loss, _ = taken(state, batches)
    assert evaluate(state, batches).loss == pytest.approx(loss, rel=1e-12)
    blind = evaluate(state, [Batch.pack([rows[index]]) for index in range(len(rows))]).loss
    assert blind != pytest.approx(loss, rel=1e-3)
