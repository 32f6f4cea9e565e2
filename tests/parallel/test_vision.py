"""Models that see on several ranks: the numbers of Transformers, also where a rank's rows have no images."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from luthier.config import DataConfig, LoraConfig, SourceConfig
from luthier.data.loader import Rows, build_rows, pack
from luthier.engine.step import forward_backward_all
from luthier.errors import ConfigError
from luthier.hf.debug.tiny import debug_config
from luthier.hf.load import build_on_meta, model_class
from luthier.hf.source import resolve
from luthier.hf.tokenizer import load_tokenizer
from luthier.hf.vision.processor import open_eyes
from luthier.parallel import rules
from luthier.parallel.layout import Layout
from tests.oracles.plain import gradient_errors
from tests.oracles.seeing import save_seeing, step, write_rows


def rows_of(model: Path, file: Path) -> Rows:
    source = resolve(str(model))
    tokenizer = load_tokenizer(source)
    open_eyes(source, tokenizer)
    config = DataConfig(train=[SourceConfig(path=str(file))], sequence_length=512, cache=False)
    rows = build_rows(config, "train", tokenizer)
    assert isinstance(rows, Rows)
    return rows


def measure(model: Path, layout: dict[str, int], file: Path, lora: LoraConfig | None = None) -> dict[str, Any]:
    from luthier.parallel.norm import settle
    from tests.parallel.cases import ready, strengthen, whole

    state = ready(model, layout, adapter=lora)
    if lora is not None:
        strengthen(state)
    state.model.eval()
    mesh = state.mesh
    assert mesh is not None
    rows = rows_of(model, file)
    total = float(rows.weight_sums.sum())
    own = range(mesh.data_rank, len(rows), mesh.data_ranks)
    outputs = forward_backward_all(state, [pack([rows[row]], rows.sight).scaled(1 / total) for row in own])
    loss = float(mesh.sum(torch.stack([output.loss for output in outputs]).sum()))
    settle(state.trainable.values())
    gradients = {name: whole(p.grad) for name, p in state.trainable.items() if p.grad is not None}
    return {"loss": loss, "gradients": gradients, "seen": [bool(rows[row].pictures) for row in own]}


@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"dp_replicate": 2}])
@pytest.mark.parametrize("kind", ["llava", "smolvlm", "qwen2_5_vl"])
def test_two_ranks(world: Any, kind: str, layout: dict[str, int], tmp_path: Path) -> None:
    model = save_seeing(kind, tmp_path / "model")
    file = write_rows(tmp_path / "rows.jsonl")
    processor = rows_of(model, file).sight.processor  # type: ignore[union-attr]
    expected = step(AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float64), processor, tmp_path)
    results = world(2).run(measure, model, layout, file)
    assert [result["seen"] for result in results] == [[True, False], [True, True]]
    for result in results:
        assert result["loss"] == pytest.approx(expected.loss, rel=1e-10)
        unused = result["gradients"].keys() - expected.gradients.keys()
        assert all(not result["gradients"].pop(name).any() for name in unused)
        assert max(gradient_errors(result["gradients"], expected.gradients, tiny=1e-9).values()) < 1e-10


def test_adapters_of_eyes_on_two_ranks(world: Any, tmp_path: Path) -> None:
    model = save_seeing("llava", tmp_path / "model")
    file = write_rows(tmp_path / "rows.jsonl")
    lora = LoraConfig(rank=2, target=["attn", "vision"])
    (one,) = world(1).run(measure, model, {}, file, lora)
    for result in world(2).run(measure, model, {"dp_shard": 2}, file, lora):
        assert result["loss"] == pytest.approx(one["loss"], rel=1e-10)
        assert max(gradient_errors(result["gradients"], one["gradients"], tiny=1e-9).values()) < 1e-10


@pytest.mark.parametrize(
    ("kind", "layout", "words"),
    [
        ("llava", {"tp": 2}, "cannot run on tp 2: what sees has no plan for it"),
        ("qwen2_5_vl", {"cp": 2}, "cannot run on cp 2: what sees has no plan for it"),
        ("smolvlm", {"pp": 2}, "cannot run on pp 2: what sees has no plan for it"),
        ("mllama", {"dp_shard": 2}, "cannot run on several ranks"),
    ],
)
def test_layouts_that_no_eyes_have_are_refused(kind: str, layout: dict[str, int], words: str) -> None:
    config = debug_config(kind)
    model = build_on_meta(model_class(resolve(f"debug:{kind}"), config), config)
    with pytest.raises(ConfigError, match=words):
        rules.check(model, Layout(**{"dp_shard": 1, **layout}))


def test_rows_with_images_are_not_cut() -> None:
    rules.check_pictures(Layout(dp_replicate=2, dp_shard=2))
    with pytest.raises(ConfigError, match="rows with images cannot run on tp 2") as caught:
        rules.check_pictures(Layout(dp_shard=2, tp=2))
    assert caught.value.where == "parallel.tp"
    assert "dp_shard 4 would work" in str(caught.value)
