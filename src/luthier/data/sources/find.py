"""Which files a path means: a file, a directory, a glob. Sorted, so that no file system decides the order of rows."""

from __future__ import annotations

import difflib
import glob
import json
import os
from pathlib import Path

from luthier.data.sources.splits import WHERE, of_split
from luthier.errors import ConfigError, DataError

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
_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"
_SAVED_DATASET = ("dataset_info.json", "dataset_infos.json", _SAVED, _SAVED_SPLITS)
"""What `datasets` writes beside its Arrow files when it saves a data set, or one of several splits."""
FILE_KINDS = {
    "json": ("json", "jsonl"),
    "csv": ("csv",),
    "parquet": ("parquet",),
    "arrow": ("arrow",),
    "text": ("txt",),
}
"""`kind` of a source -> how its files are read."""


def kind_of(path: Path) -> str | None:
    """How a file is read, told from its suffix (before .gz or .zst); None if the suffix is not known."""
    name = path.name.lower()
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    return KINDS.get(os.path.splitext(name)[1])


def find_files(path: str, split: str = "train", kind: str | None = None) -> list[Path]:
    """The files that a path means.

    Args:
        path: a file, a directory (searched through and through, hidden files left out), or a glob.
        split: which files of a directory, where their names tell splits apart.
        kind: one of `FILE_KINDS`: which files of a directory; all when None.

    Raises:
        DataError: there is nothing there, or nothing that can be read as rows.
    """
    if not path.strip():
        raise DataError("no file is named", where="data.*.path", remedy="name a file, a directory or a glob")
    start = Path(path).expanduser()
    if start.is_dir():
        files = _in_directory(start, path)
        if kind is not None:
            files = [file for file in files if kind_of(file) in FILE_KINDS[kind]]
        if not files:
            raise DataError(f"the directory holds no {kind} file", where=path, remedy="check data.*.kind")
        return of_split(files, start, split)
    if split != "train":
        remedy = "name the directory, or leave the split out"
        raise ConfigError("only a data set of the Hub (hf://) or a directory has splits", where=WHERE, remedy=remedy)
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
    seen: set[str] = set()
    for root, folders, names in os.walk(directory, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(root)) in seen:  # a link back into the directory: its rows are here already
            folders.clear()
            continue
        seen.add(real)
        if _SAVED_SPLITS in names:
            _refuse_splits(Path(root), folders)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        saved = _saved_files(Path(root, _SAVED)) if _SAVED in names else None
        for name in names:
            file = Path(root, name)
            known = kind_of(file) is not None and file.suffix.lower() not in _NOTES
            if saved is not None:
                known = name in saved
            if known and not name.startswith(".") and name not in _SAVED_DATASET:
                files.append(file)
    if not files:
        raise DataError("the directory holds no file of rows", where=path, remedy=f"these can be read: {_known()}")
    return sorted(files, key=lambda file: file.relative_to(directory).parts)


def _refuse_splits(directory: Path, folders: list[str]) -> None:
    """Several splits saved together are not one source: what is held out in one would be trained on."""
    splits = sorted(name for name in folders if (directory / name / _SAVED).is_file())
    if len(splits) > 1:
        raise DataError(
            f"holds the splits {', '.join(splits)} of a saved data set",
            where=str(directory),
            remedy=f"name the one that is meant, as in {directory / splits[-1]}",
        )


def _saved_files(state: Path) -> set[str] | None:
    """The files that are the rows of a saved data set; what else lies there is `datasets`' cache."""
    try:
        return {file["filename"] for file in json.loads(state.read_text(encoding="utf-8"))["_data_files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a file of that name which `datasets` did not write


def _require_kind(file: Path) -> None:
    if kind_of(file) is None:
        suffix = file.suffix or "no suffix"
        raise DataError(f"files with {suffix} cannot be read", where=str(file), remedy=f"these can: {_known()}")


def _known() -> str:
    return ", ".join(suffix.removeprefix(".") for suffix in KINDS) + ", each also with .gz or .zst"


def _nearest(missing: Path) -> str | None:
    try:
        names = [name for name in os.listdir(missing.parent) if name != missing.name]
    except OSError:
        return None
    near = difflib.get_close_matches(missing.name, names, n=1, cutoff=0.6)
    return f"did you mean {missing.parent / near[0]}?" if near else None
