"""Files that several processes write at once."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from luthier.jobs.files import lay, write


def test_many_may_write_one_file_at_once(tmp_path: Path) -> None:
    """As nodes do that share a workspace: each finds it whole, and nothing is left beside it."""
    text = "a line\n" * 1000

    def node(_: int) -> str:
        lay({"formats/own.py": text}, tmp_path)
        return (tmp_path / "formats" / "own.py").read_text()

    with ThreadPoolExecutor(8) as nodes:
        assert set(nodes.map(node, range(64))) == {text}
    assert [path.name for path in (tmp_path / "formats").iterdir()] == ["own.py"]
    assert stat.S_IMODE((tmp_path / "formats" / "own.py").stat().st_mode) == 0o600


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write(tmp_path / "file", "\ud800")
    assert list(tmp_path.iterdir()) == []
