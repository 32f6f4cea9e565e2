"""The notebooks run by papermill, hold what they claim, and leave models that Transformers opens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from luthier.jobs import LocalBackendConfig, TrainerClient
from tests.jobs.notebooks import NAMES, NOTEBOOKS, machine, run, said

PARAMETERS = 134_515_008


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the jobs of all notebooks are kept."""
    home = tmp_path_factory.mktemp("notebooks") / "home"
    yield home
    client = TrainerClient(LocalBackendConfig(home=home))
    for job in client.list_jobs():
        client.delete_job(job.name)


@pytest.fixture(scope="module", autouse=True)
def _one_thread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("LUTHIER_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        yield


@pytest.fixture(scope="module")
def full(home: Path) -> tuple[str, Path]:
    """What the first notebook says, and the model that it has trained: the others go on with that, which they read
    faster than its .gguf file."""
    told = said(run("full_fine_tuning", home.parent / "full.ipynb", home=str(home), steps=2))
    (export,) = home.glob("jobs/*/workspace/output/export")
    return told, export


def opens(directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.num_parameters() == PARAMETERS
    assert "<|im_end|>" in AutoTokenizer.from_pretrained(directory).get_vocab()


def newest(home: Path, output: str) -> Path:
    return max(home.glob(f"jobs/*/workspace/output/{output}"), key=lambda path: path.stat().st_mtime)


@pytest.mark.soak
def test_full_fine_tuning(full: tuple[str, Path]) -> None:
    told, export = full
    assert "full_finetune_single_device ['node-0']\nComplete 100 %" in told
    losses = [float(row.split()[2]) for row in told.splitlines() if re.match(r" +\d+ +\d", row)]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert f"LlamaForCausalLM, {PARAMETERS:,} parameters" in told
    opens(export)


@pytest.mark.soak
def test_lora(full: tuple[str, Path], home: Path) -> None:
    told = said(run("lora", home.parent / "lora.ipynb", home=str(home), steps=1, model=f"file://{full[1]}"))
    steps = re.findall(r"^(\S+) +Complete, exit code 0$", told, re.MULTILINE)
    assert steps == ["dataset-initializer", "model-initializer", "node-0", "exporter"]
    assert "2,257,920 trainable of 136,772,928" in told
    assert "'step': 1.0" in told
    opens(home / "merged")


@pytest.mark.soak
def test_chat_data(full: tuple[str, Path], home: Path) -> None:
    more: dict[str, Any] = {"home": str(home), "steps": 1, "asked": 1}
    told = said(run("chat_data", home.parent / "chat.ipynb", model=f"file://{full[1]}", **more))
    assert "362 conversations, 26 of several turns" in told
    assert re.search(r"^Complete {'epoch': 0.02, 'loss': [\d.]+}$", told, re.MULTILINE)
    assert re.search(r"[01] of 1 with the words", told)
    opens(newest(home, "export"))


@pytest.mark.soak
def test_a_training_function_of_ones_own(full: tuple[str, Path], home: Path) -> None:
    told = said(run("custom_function", home.parent / "own.ipynb", home=str(home), steps=2, model=str(full[1])))
    first, second = (float(loss) for loss in re.findall(r"^step \d: loss ([\d.]+)$", told, re.MULTILINE))
    assert second < first
    assert f"Complete torch-distributed {{'step': 2.0, 'loss': {second}" in told
    opens(newest(home, "model"))


def test_kubernetes_objects(tmp_path: Path) -> None:
    """What is said needs no machine: it is what is kept, to the letter."""
    told = said(run("kubernetes_objects", tmp_path / "objects.ipynb"))
    assert told == said(kept("kubernetes_objects")), "run python -m tests.jobs.notebooks kubernetes_objects"
    assert "storageUri: hf://meta-llama/Llama-3.2-1B-Instruct" in told
    assert "ACCESS_TOKEN: (secret)" in told
    assert "hf_example" not in told


def kept(name: str) -> Any:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_is_real_and_says_nothing_of_a_machine(name: str) -> None:
    notebook = kept(name)
    nbformat.validate(notebook)
    assert machine(notebook) == []
    assert notebook.cells[0].cell_type == "markdown"
    assert "**Takes**" in notebook.cells[0].source
    assert "**Result**" in notebook.cells[0].source
    ran = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert ran == list(range(1, len(ran) + 1))
    assert not any(output.output_type == "error" for cell in notebook.cells for output in cell.get("outputs", ()))
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(NAMES)


@pytest.mark.parametrize(
    ("name", "claim"),
    [
        ("full_fine_tuning", r"13 +13 +0\.0\d+[\s\S]*deer antler"),
        ("lora", r"2,257,920 trainable of 136,772,928[\s\S]*onion skins"),
        ("chat_data", "[34] of 4 with the words that were expected"),
        ("custom_function", "Complete torch-distributed {'step': 8.0, [\\s\\S]*before sunrise"),
    ],
)
def test_what_is_kept_holds_what_is_claimed(name: str, claim: str) -> None:
    assert re.search(claim, said(kept(name)))
