"""A training function of the user's own, on every process under torchrun."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from luthier.jobs.files import write

_CALL = """

if __name__ == "__main__":
    import json as _json
    import pathlib as _pathlib

    {name}(**_json.loads(_pathlib.Path(__file__).with_name("arguments.json").read_text(encoding="utf-8")))
"""


def function_command(function: Mapping[str, Any], directory: Path, python: str = sys.executable) -> list[str]:
    """Write a function as a program, with its arguments beside it as JSON, so that none is read as anything else.

    Args:
        function: source, name and args, as `spec.Function` has them.
        directory: for the files.
        python: the interpreter that has its packages.

    Returns:
        what a node runs; `PET_*` variables tell it how many processes to start and where nodes meet.
    """
    program = directory / "function.py"
    write(program, function["source"].rstrip() + "\n" + _CALL.format(name=function["name"]))
    write(directory / "arguments.json", json.dumps(function["args"]))
    return [python, "-m", "luthier.jobs.engines.torchrun", str(program)]
