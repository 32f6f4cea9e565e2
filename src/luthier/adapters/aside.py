"""Files that a reader finds whole or not at all: written aside, then renamed."""

from __future__ import annotations

import os
from pathlib import Path


def aside_of(path: Path) -> Path:
    """Where a file is written before it takes its name."""
    return path.with_name(f".{path.name}.aside")


def rename(aside: Path, path: Path) -> None:
    """Let a finished file take its name, and both reach the disk."""
    with open(aside, "rb") as file:
        os.fsync(file.fileno())
    os.replace(aside, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
