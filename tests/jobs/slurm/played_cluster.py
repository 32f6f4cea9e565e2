"""A machine that has Slurm's commands, those of `played.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

COMMANDS = ("sbatch", "srun", "squeue", "sacct", "scancel", "scontrol")


def played_slurm(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-ins before all else on PATH.

    Args:
        directory: for them, and for what their cluster keeps.

    Returns:
        the cluster's directory, where files say what befalls jobs.
    """
    cluster, programs = directory / "cluster", directory / "bin"
    cluster.mkdir()
    programs.mkdir()
    for name in COMMANDS:
        program = programs / name
        played = Path(__file__).with_name("played.py")
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{played}" {name} "$@"\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PLAYED_SLURM", str(cluster))
    return cluster
