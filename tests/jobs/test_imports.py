"""The jobs are light: they load neither torch nor what is as heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "datasets", "numpy", "pyarrow", "kubernetes", "huggingface_hub", "fsspec")
MAIN = "from luthier.cli.main import main; main(%s)"
USES = {
    "import": "import luthier.jobs",
    "client": "from luthier.jobs import TrainerClient; TrainerClient().list_jobs()",
    "help": MAIN % ["jobs", "--help"],
    "list": MAIN % ["jobs", "list"],
    "runtimes": MAIN % ["runtimes"],
    "submit": MAIN % ["jobs", "submit", "--runtime", "luthier-qwen2.5-0.5b", "--dry-run"],
    "ls": MAIN % ["ls"],
}


def loaded(code: str, home: str) -> set[str]:
    program = f"import sys\n{code}\nprint('loaded', *sorted(sys.modules))"
    environment = {"LUTHIER_HOME": home, "PATH": ""}
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    return set(out.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize("use", USES)
def test_nothing_heavy_is_loaded(use, tmp_path):
    assert loaded(USES[use], str(tmp_path)).isdisjoint(HEAVY)


def test_importing_the_room_loads_next_to_nothing(tmp_path):
    found = loaded("import luthier.jobs", str(tmp_path))
    assert "pydantic" not in found
    assert {name for name in found if name.startswith("luthier.")} == {"luthier.jobs"}
