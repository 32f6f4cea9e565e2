"""The machine's peak and traces of chosen steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from luthier.config.sections import ProfileConfig
from luthier.report.profile import Profiler
from luthier.report.throughput import peak_flops, peak_memory, sheet_flops


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("A card of tomorrow", None),
    ],
)
def test_data_sheets(name: str, bf16: float | None) -> None:
    assert sheet_flops(name, torch.bfloat16) == bf16
    assert sheet_flops(name, torch.float64) is None


def test_the_cpu_is_measured_once() -> None:
    first = peak_flops(torch.device("cpu"), torch.float32)
    assert first > 1e8
    assert peak_flops(torch.device("cpu"), torch.float32) == first


def test_memory_never_falls() -> None:
    before = peak_memory(torch.device("cpu"))
    block = torch.ones(100 * 2**20, dtype=torch.uint8)
    del block
    assert peak_memory(torch.device("cpu")) >= before > 0


def test_chosen_steps_are_traced(tmp_path: Path) -> None:
    with Profiler(ProfileConfig(start=2, steps=2), tmp_path / "profile") as profiler:
        for number in range(1, 6):
            with profiler.step(number):
                torch.ones(3, 3) @ torch.ones(3, 3)
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "steps-2-3.json"
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert {"step 2", "step 3", "aten::mm"} <= names
    assert "step 4" not in names


def test_a_run_that_ends_early_leaves_what_it_traced(tmp_path: Path) -> None:
    with Profiler(ProfileConfig(start=1, steps=9), tmp_path) as profiler, profiler.step(1):
        torch.ones(1)
    assert [path.name for path in tmp_path.iterdir()] == ["steps-1-end.json"]


def test_no_profile_no_files(tmp_path: Path) -> None:
    with Profiler(None, tmp_path / "profile") as profiler, profiler.step(1):
        pass
    assert not (tmp_path / "profile").exists()
