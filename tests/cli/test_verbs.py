"""The verbs that have no recipe of their own, and what they share."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from luthier.cli.frame import entries, plain, run_config, split_arguments
from luthier.cli.main import main
from luthier.cli.plot import HEIGHT, drawing


def test_plot_schedule_gives_the_rate_of_every_step(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["plot", "schedule", "schedule={name: linear, warmup: 4}", "optimizer.learning_rate=0.5", "--steps", "9"]
    assert main([*words, "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    rates = result["learning_rate"]
    assert (result["name"], len(rates)) == ("linear", 9)
    assert max(rates) == 0.5
    assert rates.index(0.5) < 5
    assert rates[:5] == sorted(rates[:5])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert main(words) == 0
    assert "5.00e-01 |" in capfd.readouterr().out


def test_a_drawing_is_as_high_as_its_values() -> None:
    lines = list(drawing([0.0, 0.5, 1.0]))
    columns = ["".join(line[11 + column] for line in lines[:HEIGHT]).count("█") for column in range(3)]
    assert columns == [0, HEIGHT // 2, HEIGHT]
    assert len(list(drawing([0.0]))) == len(list(drawing([1.0] * 1000))) == HEIGHT + 2


def test_doctor_measures_this_machine(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["versions"]["torch"] == torch.__version__
    assert result["cpu"]["threads"] == torch.get_num_threads()
    assert result["speed"]["cpu"]["fp32"] > 1e8
    assert "hub" not in result
    assert main(["doctor"]) == 0
    out = capfd.readouterr().out
    assert "GFLOP/s" in out
    assert "GiB" in out


@pytest.mark.parametrize("words", [["--model", "debug:llama", "adapter.rank=4"], ["--matrix"]])
def test_adapters_are_verified_only_where_peft_is(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)  # Python's own word for what cannot be imported
    assert main(["verify", *words]) == 2
    told = (
        "adapters are compared with PEFT's, and peft is not installed; install it with: pip install 'luthier[verify]'"
    )
    assert capfd.readouterr().err.strip() == f"error: adapter: {told}"


def test_a_config_file_is_told_from_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert split_arguments(["run.yaml", "a.b=c", "x"]) == (Path("run.yaml"), ["a.b=c", "x"])
    assert split_arguments(["a.b=c", "run.yaml"]) == (Path("run.yaml"), ["a.b=c"])
    assert split_arguments(["a.b=c"]) == (None, ["a.b=c"])
    assert split_arguments(["dir/x=1/run.yaml"]) == (Path("dir/x=1/run.yaml"), [])
    monkeypatch.chdir(tmp_path)
    Path("rank=4.yaml").write_text("")
    assert split_arguments(["rank=4.yaml"]) == (Path("rank=4.yaml"), [])


def test_rows_to_measure_on_replace_those_held_out(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ndata: {train: t.jsonl, validation_fraction: 0.1}\n")
    config = run_config([str(path)], validation="v.jsonl")
    assert config.data.validation_fraction is None
    assert config.data.validation is not None
    assert [source.path for source in config.data.validation] == ["v.jsonl"]


@dataclass
class Point:
    x: int
    y: float


def test_results_become_plain_data() -> None:
    value = {"p": Point(1, float("inf")), Path("k"): (Path("a"), np.float32(0.5)), "t": torch.tensor(3), "n": None}
    assert plain(value) == {"p": {"x": 1, "y": None}, "k": ["a", 0.5], "t": 3, "n": None}


def test_results_for_people() -> None:
    result = {
        "loss": 1.25,
        "rows": 12345,
        "done": True,
        "best": None,
        "list": [1, 2],
        "deep": {"a": 1e-9},
        "few": [{"b": 1}],
    }
    assert list(entries(result)) == [
        "loss  1.2500",
        "rows  12,345",
        "done  yes",
        "best  none",
        "list  1, 2",
        "deep",
        "  a  1e-09",
        "few",
        "  b  1",
    ]
