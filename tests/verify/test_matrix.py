"""The matrix walks models, keeps what it found, and writes a page; what is beyond a bound is wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from luthier.cli.main import main
from luthier.hf.debug.shrink import VOCABULARY
from luthier.hf.debug.tiny import debug_config
from luthier.verify import group, matrix, reference
from luthier.verify.compare import compare
from luthier.verify.table import counts, lines
from luthier.verify.trial import Bounds, Cell, Trial, documents, fault
from luthier.verify.worker import Worker
from tests.verify.proof import Here

pytestmark = [pytest.mark.filterwarnings("ignore")]


class OneRank:
    """A group of this process alone."""

    def __init__(self) -> None:
        self._worker = Worker("cpu")

    def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        answer = self._worker.answer(name, arguments)
        assert "answer" in answer, answer
        return answer["answer"]

    def close(self) -> None:
        pass


class Reference(Here):
    def close(self) -> None:
        pass


def test_it_walks_keeps_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "ranks", lambda *_, **__: OneRank())
    monkeypatch.setattr(group, "reference", lambda *_, **__: Reference())
    results, columns = tmp_path / "results.json", ("one process", "LoRA")
    told: list[str] = []
    types = ["gemma2", "gpt2", "whisper"]
    found = matrix.run(tmp_path / "scratch", results, types=types, columns=columns, told=told.append)
    assert [line.split(":")[0] for line in told] == [*(f"{k}, {c}" for k in types[:2] for c in columns), "whisper"]
    assert found == json.loads(results.read_text())
    assert counts(found, columns) == {c: {"right": 2, "refused": 0, "wrong": 0} for c in columns}
    # gemma2's norms round their weights to fp32, GPT-2's do not
    assert [found[kind]["cells"]["one process"]["bound"] for kind in types[:2]] == [1e-6, 1e-10]
    assert found["gpt2"]["cells"]["LoRA"]["error"] < 1e-13
    assert "encoder-decoder" in found["whisper"]["kind"]
    told.clear()
    found["gpt2"]["cells"]["LoRA"]["status"] = "wrong"
    results.write_text(json.dumps(found))
    matrix.run(tmp_path / "scratch", results, resume=True, types=types, columns=columns, told=told.append)
    assert [line.split(":")[0] for line in told] == ["gpt2, LoRA"]
    matrix.write_page(found, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "3 types. 1 are no causal language models of text" in page
    assert "| whisper |  | – <sup>" in page
    assert "| gemma2 | Gemma2ForCausalLM |" in page


MEASURED: dict[str, Any] = {
    "layout": "tp 2",
    "losses": [2.0],
    "norms": [1.0],
    "loss_error": 0.0,
    "norm_error": 0.0,
    "copies": (),
    "packed": True,
    "adapters": "",
    "gradients": {"worst": 0.0, "tensor": "w", "equal": 1, "tensors": 2, "missing": (), "extra": ()},
}
EXPORT: dict[str, Any] = {"worst": 0.0, "tensor": "w", "equal": 2, "tensors": 2, "missing": (), "extra": ()}


@pytest.mark.parametrize(
    ("measured", "export", "told"),
    [
        ({"loss_error": 1e-8}, {}, "loss off by 1.0e-08, allowed 1e-09"),
        ({"loss_error": float("nan")}, {}, "loss off by nan"),
        ({"norm_error": 1e-9}, {}, "gradient norm off by"),
        ({"gradients": {"worst": 2e-10}}, {}, "gradient of w off by 2.0e-10, allowed 1e-10"),
        ({"gradients": {"missing": ("v",)}}, {}, "no rank has a gradient of v"),
        ({"gradients": {"extra": ("v",)}}, {}, "a gradient too many: v"),
        ({"copies": ("v",)}, {}, "ranks hold different copies of v"),
        ({}, {"equal": 1}, "export: 1 of 2 weights differ, w most"),
        ({}, {"missing": ("v",)}, "export: v on one side only"),
        ({}, {}, ""),
    ],
)
def test_what_is_beyond_a_bound_is_told(measured: dict[str, Any], export: dict[str, Any], told: str) -> None:
    gradients = MEASURED["gradients"] | measured.get("gradients", {})
    found = fault({**MEASURED, **measured, "gradients": gradients}, EXPORT | export, Bounds.of("float64", False))
    assert found.startswith(told)
    assert bool(found) == bool(told)


def test_what_is_zero_in_exact_arithmetic_is_measured_against_the_rest() -> None:
    reference = {"big": torch.tensor([1.0, -4.0]), "zero": torch.tensor([1e-16, 0.0])}
    ours = {"big": torch.tensor([1.0, -4.0]), "zero": torch.tensor([-3e-16, 0.0])}
    held = {name: (value, value) for name, value in ours.items()}
    found = compare(held, reference, negligible=1e-13, everywhere=False)
    assert found.worst == pytest.approx(1e-16)
    assert (found.equal, found.tensors, found.tensor) == (1, 2, "zero")
    assert compare(held, reference, negligible=0.0, everywhere=False).worst == pytest.approx(4.0)
    del held["big"]
    assert compare(held, reference, negligible=1e-13, everywhere=False).missing == ("big",)
    held["other"] = held["zero"]
    assert compare(held, reference, negligible=1e-13, everywhere=False).extra == ("other",)


@pytest.mark.parametrize(("status", "code"), [("right", 0), ("wrong", 1), ("failed", 1)])
def test_the_command_leaves_with_1_when_a_bound_is_broken(
    status: Any, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cell = Cell("tp 2", status, "why" if code else "", "", MEASURED, EXPORT, Bounds.of("float64", False))
    about = {"model": "debug:llama", "class": "X", "parameters": 10, "steps": 3, "tokens": 60, "precision": "float64"}
    monkeypatch.setattr("luthier.verify.run.verify", lambda *_, **__: ([cell], lines([cell], about)))
    assert main(["verify", "--model", "debug:llama"]) == code
    assert f"tp 2: {status}" in capfd.readouterr().out
    assert main(["verify", "--model", "debug:llama", "--json"]) == code
    assert json.loads(capfd.readouterr().out)["layouts"][0]["status"] == status


def test_a_model_that_no_run_can_train_is_refused_before_a_process_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = debug_config("llama")
    config.quantization_config = {"quant_method": "fp8"}
    config.save_pretrained(tmp_path)
    monkeypatch.delattr(group, "reference")
    assert main(["verify", "--model", str(tmp_path), "--tiny", "--nproc", "2"]) == 2
    assert "holds quantised weights, which cannot be trained; name the unquantised model" in capfd.readouterr().err


def test_documents_are_the_same_for_a_seed() -> None:
    assert documents(50, (3, 4), 2) == documents(50, (3, 4), 2) != documents(50, (3, 4), 2, seed=1)
    assert all(max(d["tokens"]) < 50 and d["weights"][-1] == 1.0 for step in documents(50, (9, 4), 2) for d in step)
    assert dataclasses.asdict(Bounds.of("float32", False))["gradient"] == 2e-6


def test_widening_leaves_nothing_in_fp32() -> None:
    values = torch.rand(5, dtype=torch.float64)
    with reference.widening():
        found = (values.float() * torch.ones(5)).to(torch.float32).to(dtype=torch.float32).sum(dtype=torch.float32)
    assert found.dtype == torch.float64
    assert found == values.sum()
    with reference.widening():
        assert torch.frombuffer(bytearray(b"\0\0\xc0?\0\0 @"), dtype=torch.float32).tolist() == [1.5, 2.5]
        rows, experts, ends = torch.rand(4, 8), torch.rand(2, 8, 8), torch.tensor([1, 4], dtype=torch.int32)
        product = torch.nn.functional.grouped_mm(rows, experts, offs=ends)  # float64, which it refuses
        assert torch.equal(product, torch.cat([rows[:1] @ experts[0], rows[1:] @ experts[1]]))
    assert torch.zeros(1).dtype == torch.float32


@pytest.fixture(scope="module")
def cancelling(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """A model that takes the difference of two attentions, in fp32."""
    place = tmp_path_factory.mktemp("cancelling")
    debug_config("diffllama").save_pretrained(place / "model")
    reference.make(str(place / "model"))
    here: Any = Here()
    steps = documents(VOCABULARY, matrix.LENGTHS, matrix.STEPS)
    return Trial({"path": str(place / "model")}, steps, place / "files", here)


def test_what_fp32_inside_costs_is_gone_without_it(cancelling: Trial) -> None:
    here: Any = OneRank()
    cell = cancelling.cell(here, {})
    assert cell.status == "right"
    assert cell.bounds is not None
    assert cell.bounds.gradient == 1e-4
    assert 1e-6 < cell.error < 1e-4
    assert cell.widened is not None
    assert cell.widened["gradients"]["worst"] < 1e-11
    told = lines([cell], {"model": "m", "class": "X", "parameters": 1, "steps": 1, "tokens": 1, "precision": "float64"})
    assert any(line.startswith("  without fp32") and line.endswith("allowed 1e-10") for line in told)
    adapted = cancelling.cell(here, {}, lora=True)  # the reference reads its own adapters again
    assert adapted.status == "right"


@pytest.mark.parametrize(
    ("worst", "widened", "told"),
    [
        (5e-7, 1.0, ""),
        (9e-5, 9e-11, ""),
        (9e-5, 2e-10, "with float64 in the place of fp32: gradient of w off by 2.0e-10, allowed 1e-10"),
        (2e-4, 0.0, "gradient of w off by 2.0e-04, allowed 1e-06"),
    ],
)
def test_fp32_inside_is_allowed_nothing_that_is_there_without_it(
    worst: float, widened: float, told: str, cancelling: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Off:
        """Ranks whose gradients are always off by so much."""

        def call(self, name: str, **arguments: Any) -> dict[str, Any]:
            off = widened if arguments["subject"].get("widened") else worst
            return {**MEASURED, "gradients": {**MEASURED["gradients"], "worst": off}}

    monkeypatch.setattr(Trial, "_round_trip", lambda *_: EXPORT)
    off: Any = Off()
    cell = cancelling.cell(off, {})
    assert (cell.status, cell.reason) == ("wrong" if told else "right", told)
