"""docs/config.md says what the models say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from luthier.config.reference import reference


def test_the_reference_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "config.md"
    assert page.read_text(encoding="utf-8") == reference(), "run `make reference`"


def test_config_imports_no_torch() -> None:
    code = "import sys, luthier.config; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
