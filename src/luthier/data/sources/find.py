"""Which files a path means: a file, a directory, a glob. Sorted, so that no file system decides the order of rows."""

from __future__ import annotations

import difflib
import glob
import os
from pathlib import Path

from luthier.errors import DataError

COMPRESSIONS = (".gz", ".zst")
KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".txt": "txt",
    ".md": "txt",
}
"""Suffix -> how the file is read."""
_NOTES = (".md",)
"""Suffixes that in a directory are taken for notes about the data; named outright they are text."""
_SAVED_DATASET = ("dataset_info.json", "state.json", "dataset_dict.json")
"""What `datasets` writes beside its Arrow files."""


def kind_of(path: Path) -> str | None:
    """How a file is read, told from its suffix (before .gz or .zst); None if the suffix is not known."""
    name = path.name.lower()
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    return KINDS.get(os.path.splitext(name)[1])


def find_files(path: str) -> list[Path]:
    """The files that a path means.

    Args:
        path: a file, a directory (searched through and through, hidden files left out), or a glob.

    Raises:
        DataError: there is nothing there, or nothing that can be read as rows.
    """
    start = Path(path).expanduser()
    if start.is_dir():
        return _in_directory(start, path)
    if start.exists():
        _require_kind(start)
        return [start]
    if glob.has_magic(path):
        found = sorted(Path(match) for match in glob.glob(str(start), recursive=True))
        files = [file for match in found for file in (_in_directory(match, path) if match.is_dir() else [match])]
        if not files:
            raise DataError("no file matches this pattern", where=path)
        unique = list(dict.fromkeys(files))
        for file in unique:
            _require_kind(file)
        return unique
    raise DataError("there is no such file or directory", where=path, remedy=_nearest(start))


def _in_directory(directory: Path, path: str) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise DataError(f"cannot be read ({error.strerror})", where=str(error.filename)) from error

    files = []
    for root, folders, names in os.walk(directory, onerror=refuse, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            file = Path(root, name)
            known = kind_of(file) is not None and file.suffix.lower() not in _NOTES
            if known and not name.startswith(".") and name not in _SAVED_DATASET:
                files.append(file)
    if not files:
        raise DataError("the directory holds no file of rows", where=path, remedy=f"these can be read: {_known()}")
    return sorted(files, key=lambda file: file.relative_to(directory).parts)


def _require_kind(file: Path) -> None:
    if kind_of(file) is None:
        suffix = file.suffix or "no suffix"
        raise DataError(f"files with {suffix} cannot be read", where=str(file), remedy=f"these can: {_known()}")


def _known() -> str:
    return ", ".join(suffix.removeprefix(".") for suffix in KINDS) + ", each also with .gz or .zst"


def _nearest(missing: Path) -> str | None:
    try:
        names = os.listdir(missing.parent)
    except OSError:
        return None
    near = difflib.get_close_matches(missing.name, names, n=1, cutoff=0.6)
    return f"did you mean {missing.parent / near[0]}?" if near else None
