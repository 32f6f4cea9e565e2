"""Runs the notebooks of examples/notebooks: `python -m tests.jobs.notebooks [NAME ...]` writes their outputs anew.

What is kept of an output says nothing of the machine: no paths, no times, no warnings of other people's libraries.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
import papermill

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"
NAMES = ("full_fine_tuning", "lora", "chat_data", "custom_function", "kubernetes_objects")


def run(name: str, output: Path, **parameters: Any) -> Any:
    """Run a notebook beside its files; returns it with its outputs."""
    papermill.execute_notebook(
        str(NOTEBOOKS / f"{name}.ipynb"),
        str(output),
        parameters,
        kernel_name="python3",
        progress_bar=False,
        cwd=str(NOTEBOOKS),
    )
    return nbformat.read(output, as_version=4)


def said(notebook: Any) -> str:
    """All that its cells have printed."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output["text"] for output in outputs if output.get("name") == "stdout")


def strip(notebook: Any) -> None:
    """Take out what is not the same on the next machine."""
    notebook.metadata.pop("papermill", None)
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.cells = [cell for cell in notebook.cells if "injected-parameters" not in cell.metadata.get("tags", ())]
    count = 0
    for cell in notebook.cells:
        cell.metadata = (
            nbformat.NotebookNode(tags=["parameters"]) if "parameters" in cell.metadata.get("tags", ()) else {}
        )
        if cell.cell_type == "code":
            count += 1
            cell.execution_count = count
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]


def machine(notebook: Any) -> list[str]:
    """What it says of the machine that it ran on: there should be nothing."""
    told = nbformat.writes(notebook)
    patterns = (
        r"/(?:home|root|tmp|usr|opt|work|private|Users)/[\w./-]*",
        r"\d\d:\d\d:\d\d",
        r"20\d\d-\d\d-\d\d",
        "Warning",
    )
    return [found for pattern in patterns for found in re.findall(pattern, told)]


def main(names: list[str]) -> None:
    for name in names or NAMES:
        with tempfile.TemporaryDirectory() as place:
            parameters = {} if name == "kubernetes_objects" else {"home": f"{place}/home"}
            notebook = run(name, Path(place) / "out.ipynb", **parameters)
        strip(notebook)
        nbformat.write(notebook, NOTEBOOKS / f"{name}.ipynb")
        print(name, *machine(notebook))


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main(sys.argv[1:])
