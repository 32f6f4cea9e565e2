"""A model that sees, from a config to what Transformers and PEFT open."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText, AutoProcessor

from luthier.config import RunConfig
from luthier.engine.state import TrainState
from luthier.errors import ConfigError, DataError
from luthier.recipes import distill, setup
from luthier.recipes.evaluate import evaluate
from luthier.recipes.sft import train
from luthier.recipes.show import show
from tests.oracles.seeing import CONVERSATIONS, encoded, save_seeing, write_rows

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's

OPENED = ("llava", "smolvlm", "gemma3", "mllama")
"""Without torchvision AutoProcessor opens none of a model that sees videos too."""


def config(tmp_path: Path, model: str, name: str = "run", **changes: Any) -> RunConfig:
    rows = tmp_path / "rows.jsonl"
    fields: dict[str, Any] = {
        "model": model,
        "data": {"train": {"path": str(rows if rows.exists() else write_rows(rows))}, "sequence_length": 512},
        "optimizer": {"learning_rate": 0.003},
        "train": {"steps": 3, "rows_per_step": 4, "precision": "fp32"},
        "output": str(tmp_path / name),
    }
    return RunConfig.model_validate(fields | changes)


def loss_of(model: Any, processor: Any, directory: Path) -> float:
    """The mean loss of all trained tokens, by Transformers."""
    total, count = 0.0, 0
    for conversation in CONVERSATIONS:
        inputs, trained = encoded(processor, conversation, directory)
        places = torch.tensor(trained)
        with torch.no_grad():
            logits = model(**inputs).logits[0, places - 1]
        total += float(torch.nn.functional.cross_entropy(logits, inputs["input_ids"][0, places], reduction="sum"))
        count += len(trained)
    return total / count


@pytest.mark.parametrize("kind", OPENED)
def test_an_export_is_opened_with_its_processor(kind: str, tmp_path: Path) -> None:
    first = train(config(tmp_path, f"debug:{kind}"))
    export = Path(first["export"])
    processor = AutoProcessor.from_pretrained(export)
    plain, told = AutoModelForImageTextToText.from_pretrained(export, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    left = loss_of(plain.eval(), processor, tmp_path)
    assert left < first["loss"]
    data = {"train": None, "validation": {"path": str(tmp_path / "rows.jsonl")}, "sequence_length": 512}
    assert evaluate(config(tmp_path, str(export), data=data))["loss"] == pytest.approx(left, rel=1e-5)


@pytest.mark.parametrize("kind", OPENED)
def test_adapters_of_eyes_and_text_are_files_that_peft_opens(kind: str, tmp_path: Path) -> None:
    model = save_seeing(kind, tmp_path / "model")
    adapter = {"kind": "lora", "rank": 4, "target": ["attn", "vision"]}
    trained = train(config(tmp_path, str(model), adapter=adapter))
    base = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(trained["export"])
    before = loss_of(base.eval(), processor, tmp_path)
    adapted = PeftModel.from_pretrained(base, trained["export"])
    moved = {name for name, value in adapted.named_parameters() if "lora_B" in name and value.abs().max() > 0}
    assert any("vision" in name for name in moved)
    assert any("language_model" in name or "text_model" in name for name in moved)
    left = loss_of(adapted.eval(), processor, tmp_path)
    assert left < before
    data = {"train": None, "validation": {"path": str(tmp_path / "rows.jsonl")}, "sequence_length": 512}
    ours = evaluate(config(tmp_path, str(model), data=data), adapter=Path(trained["export"]))
    assert ours["loss"] == pytest.approx(left, rel=1e-5)


def test_packing_is_off_with_its_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    train(config(tmp_path, "debug:mllama"))
    assert "packing is off: its text looks at pictures by cross attention, which knows one document" in caplog.text


def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = train(config(tmp_path, "debug:llava", "whole", train={"steps": 4, "rows_per_step": 2, "precision": "fp32"}))
    train(config(tmp_path, "debug:llava", "part", train={"steps": 2, "rows_per_step": 2, "precision": "fp32"}))
    assert not (tmp_path / "part" / "checkpoints" / "step-000004").exists()
    on = train(config(tmp_path, "debug:llava", "part", train={"steps": 4, "rows_per_step": 2, "precision": "fp32"}))
    assert (on["loss"], on["steps"]) == (whole["loss"], 4)


def test_rows_with_images_are_streamed(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl")
    data = {"train": {"path": str(rows)}, "sequence_length": 512, "streaming": True, "shuffle": False}
    streamed = train(config(tmp_path, "debug:smolvlm", "streamed", data=data))
    held = train(config(tmp_path, "debug:smolvlm", "held", data=data | {"streaming": False}))
    assert streamed["loss"] == pytest.approx(held["loss"], rel=1e-6)


def test_adapters_that_lengthen_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="adapter prompt moves tokens from where rows have their images"):
        train(config(tmp_path, "debug:llava", adapter={"kind": "prompt", "num_virtual_tokens": 2}))


def test_pairs_with_images_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"images": ["a.png"], "prompt": "<image>", "chosen": "a", "rejected": "b"}) + "\n")
    settings = {"data": {"train": {"path": str(file)}}, "method": {"name": "dpo"}}
    with pytest.raises(DataError, match="column 'images' holds images, and pairs have none") as caught:
        train(config(tmp_path, "debug:llava", **settings))
    assert caught.value.where == f"{file}:1"


def test_rows_are_shown_with_their_images(tmp_path: Path) -> None:
    told, lines = show(config(tmp_path, "debug:smolvlm"), rows=2)
    text = "\n".join(str(line) for line in lines)
    assert "image " in text
    assert "tall.png" in text
    assert "<image>x4" in text
    pieces = told["rows"][0]["pieces"]
    assert sum(len(piece["ids"]) for piece in pieces) == told["rows"][0]["tokens"]


def test_a_teacher_whose_documents_with_images_must_not_share_a_row(tmp_path: Path) -> None:
    said = []
    for packing in (True, False):
        data = {"train": str(write_rows(tmp_path / "rows.jsonl")), "sequence_length": 1024, "packing": packing}
        method = {"name": "distill", "teacher": "debug:gemma3", "top_k": 20, "precompute": True}
        more: dict[str, Any] = {"data": data, "method": method, "train": {"steps": 1, "precision": "fp32"}}
        run = config(tmp_path, "debug:gemma3", f"packing-{packing}", **more)
        distill.train(run)
        said.append((run.output / "teacher" / "teacher_ids.bin").read_bytes())
    assert said[0] == said[1]


def test_a_teacher_that_reads_less_in_a_row_than_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = "it looks at the images of others"
    monkeypatch.setattr(setup, "picture_fault", lambda of, _: "" if isinstance(of, TrainState) else fault)
    run = config(tmp_path, "debug:llava", method={"name": "distill", "teacher": "debug:llava"})
    with pytest.raises(ConfigError, match=f"the teacher cannot read several documents in a row: {fault}; set it to"):
        distill.train(run)
