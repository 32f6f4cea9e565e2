"""What a run writes and says while it trains."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from luthier.batch import Batch, Sample
from luthier.config import RunConfig
from luthier.data.state import LoaderState, StepBatch
from luthier.hf.load import load_model
from luthier.hf.source import resolve
from luthier.report import progress
from luthier.report.flops import count_flops
from luthier.report.metrics import METRICS
from luthier.report.reporter import Reporter, run_log
from luthier.report.throughput import peak_flops, peak_memory


@dataclass
class Counters:
    step: int = 0
    rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    skipped_steps: int = 0


@dataclass
class State:
    model: torch.nn.Module
    device: torch.device
    counters: Counters
    mesh: None = None
    is_main: bool = True

    @property
    def outline(self) -> torch.nn.Module:
        return self.model


@dataclass
class Measured:
    loss: float = 1.5

    @property
    def metrics(self) -> dict[str, float]:
        return {"loss": 1.5, "perplexity": 4.48, "tokens": 90}


class Screen(io.StringIO):
    """Standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def state() -> State:
    return State(load_model(resolve("debug:llama")), torch.device("cpu"), Counters())


def batch() -> StepBatch:
    samples = [Sample.from_ids(range(length), [0] * 3 + [1] * (length - 3)) for length in (9, 17)]
    packed = Batch.pack(samples)
    return StepBatch(
        microbatches=[packed, packed],
        state=LoaderState(),
        rows=4,
        tokens=2 * packed.tokens,
        trained_tokens=2 * packed.trained_tokens,
        total_weight=2 * packed.total_weight,
        epoch=0.5,
    )


def take(report: Reporter, state: State) -> dict[str, float]:
    step = batch()
    state.counters.step += 1
    state.counters.tokens += step.tokens
    return report.step(state.counters, step, {"loss": 2.0, "gradient_norm": 1.0, "learning_rate": 1e-4})


def config(**report: object) -> RunConfig:
    return RunConfig.model_validate({"model": "debug:llama", "data": {}, "report": report})


def rows(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_rows_of_a_run(state: State, tmp_path: Path) -> None:
    with Reporter(tmp_path, config(), state, 3) as report:
        for _ in range(3):
            row = take(report, state)
        report.validation(3, Measured())
    written = rows(tmp_path)
    assert [line["step"] for line in written] == [1, 2, 3, 3]
    assert written[-1] == {"step": 3, "validation_loss": 1.5, "validation_perplexity": 4.48, "validation_tokens": 90}
    assert all(line.keys() <= METRICS.keys() for line in written)
    flops = 2 * count_flops(state.model).step([8, 16], 20)
    assert row["flops_per_second"] * row["step_seconds"] == pytest.approx(flops)
    assert row["tokens_per_second"] * row["step_seconds"] == pytest.approx(48)
    assert row["peak_share"] == pytest.approx(row["flops_per_second"] / peak_flops(state.device, torch.float32))
    assert 50 * 2**20 < row["memory_bytes"] <= peak_memory(state.device)


def test_rows_are_thinned_but_the_ends_stay(state: State, tmp_path: Path) -> None:
    with Reporter(tmp_path, config(every=4), state, 10) as report:
        for _ in range(10):
            take(report, state)
    assert [line["step"] for line in rows(tmp_path)] == [1, 4, 8, 10]


def test_a_resumed_run_goes_on_where_its_checkpoint_was(state: State, tmp_path: Path) -> None:
    with Reporter(tmp_path, config(), state, 6) as report:
        for _ in range(5):
            take(report, state)
    state.counters = Counters(step=2)
    with Reporter(tmp_path, config(), state, 6) as report:
        take(report, state)
    assert [line["step"] for line in rows(tmp_path)] == [1, 2, 3]


def test_lines_where_there_is_no_terminal(state: State, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with run_log(tmp_path / "log.txt"), Reporter(tmp_path, config(), state, 300) as report:
        for _ in range(300):
            take(report, state)
        report.validation(300, Measured())
    said = capsys.readouterr().err.splitlines()
    line = r"step \d+/300  loss 2\.0000  [\d,]+ tokens/s  \d+% of peak  [\d.]+ [MG]iB  [\d.:]+( s)? left"
    assert re.fullmatch(line, said[0])
    assert said[0].startswith("step 1/300")
    assert said[-2].startswith("step 300/300")
    assert said[-1] == "step 300: validation loss 1.5000, perplexity 4.480"
    assert len(said) < 100
    kept = (tmp_path / "log.txt").read_text(encoding="utf-8").splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ INFO luthier\.report\.reporter: " + line, kept[0])
    assert len(kept) == len(said)


def test_one_line_at_the_bottom_of_a_terminal(state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    with run_log(), Reporter(tmp_path, config(), state, 2) as report:
        take(report, state)
        logging.getLogger("luthier.recipes").info("a message")
        take(report, state)
    text = screen.getvalue()
    assert "\r\x1b[2Ka message\nstep 1/2 " in text  # the message stands above the line, which comes back
    assert text.endswith("\r\x1b[2K")  # and goes at the end
    assert text.count("\n") == 1


def test_stages_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    with progress.stage("tokenising") as told:
        for done in range(5001):
            told(done, 5000)
    text = screen.getvalue()
    assert text.startswith("\r\x1b[2Ktokenising ...")
    assert text.endswith("\r\x1b[2K")
    assert text.count("\r") < 100


def test_short_stages_say_nothing_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    with run_log(), progress.stage("tokenising") as told:
        told(1, 2)
    assert capsys.readouterr().err == ""


def test_the_log_leaves_no_handler_behind(tmp_path: Path) -> None:
    top = logging.getLogger("luthier")
    before = (list(top.handlers), top.level)
    with run_log(tmp_path / "log.txt"):
        assert len(top.handlers) == len(before[0]) + 2
    assert (top.handlers, top.level) == before


def test_a_log_that_cannot_be_written_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.txt").symlink_to("/dev/full")
    with run_log(tmp_path / "log.txt"):
        for word in ("one", "two"):
            logging.getLogger("luthier.test").info(word)
    one, said, two = capsys.readouterr().err.splitlines()
    assert (one, two) == ("one", "two")
    assert "log.txt cannot be written (No space left on device); the run goes on without it" in said


def test_a_log_takes_any_name_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("luthier"), "propagate", False)  # pytest's own log cannot be sent to xdist
    with run_log(tmp_path / "log.txt"):
        logging.getLogger("luthier.test").info("n\udcff.jsonl:1 is cut")
    assert (tmp_path / "log.txt").read_text(encoding="utf-8").endswith("n\\udcff.jsonl:1 is cut\n")
