"""Files that are whole or not there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from luthier.errors import UserError


def write(path: Path, text: str) -> None:
    """Write a file for its owner alone: aside, and then put in place. Several processes may do so at once."""
    descriptor, aside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    with ExitStack() as unless_written:
        unless_written.callback(os.unlink, aside)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        unless_written.pop_all()


def lay(files: Mapping[str, str], workspace: Path) -> None:
    """Write a job's text files into its workspace, by relative path.

    Raises:
        UserError: a path leads out of it.
    """
    for name, text in files.items():
        path = workspace / name
        if not path.resolve().is_relative_to(workspace.resolve()):
            raise UserError("leads out of the workspace", where=f"files.{name}", remedy="give a relative path")
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, text)
