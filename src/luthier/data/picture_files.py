"""Where pictures lie, and how tokenised rows remember them: by path and digest, never by their pixels."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from luthier.batch import Picture
from luthier.errors import DataError

_BESIDE, _STORED, _HELD = "file", "store", "row"
Stamp = tuple[str, int, int]
"""A file, its size and when it was last changed (ns)."""


def digest(data: bytes) -> str:
    """32 hex digits."""
    return hashlib.sha256(data).hexdigest()[:32]


def read(picture: Picture) -> bytes:
    """The bytes of a picture, as they were when the row was tokenised.

    Raises:
        DataError: they are gone, or others.
    """
    if picture.data is not None:
        return picture.data
    try:
        data = Path(picture.path).read_bytes()
    except OSError as error:
        raise DataError(f"the image {picture.path} cannot be read ({error.strerror})") from error
    if digest(data) != picture.digest:
        what = f"the image {picture.path} is not what it was when the row was tokenised"
        raise DataError(what, remedy="start a new run, which tokenises it again")
    return data


def keep(data: bytes, name: str, store: Path | None) -> Picture:
    """A picture that lies in no file of its own: kept in the store under its digest, or in memory.

    Args:
        data: its bytes.
        name: what to call it in memory.
        store: a directory; None for memory.
    """
    mark = digest(data)
    if store is None:
        return Picture(name, mark, data)
    file = store / mark[:2] / mark
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_name(f"{mark}.{os.getpid()}")
        aside.write_bytes(data)
        aside.replace(file)
    return Picture(str(file), mark)


def pack(pictures: Sequence[Picture], root: Path | None, store: Path | None) -> bytes:
    """Pictures as bytes, by paths that do not depend on where root and store lie."""
    entries = []
    for picture in pictures:
        if picture.data is not None:
            entries.append([_HELD, picture.path, picture.digest, base64.b64encode(picture.data).decode()])
            continue
        path = Path(picture.path)
        stored = store is not None and path.is_relative_to(store)
        base = store if stored else root
        assert base is not None
        kind = _STORED if stored else _BESIDE
        entries.append([kind, path.relative_to(base.resolve() if not stored else base).as_posix(), picture.digest])
    return json.dumps(entries).encode() if entries else b""


def unpack(packed: bytes, root: Path | None, store: Path | None) -> tuple[Picture, ...]:
    """What `pack` packed, for the root and the store of now."""
    found = []
    for kind, name, mark, *data in json.loads(packed) if packed else []:
        if kind == _HELD:
            found.append(Picture(name, mark, base64.b64decode(data[0])))
            continue
        base = store if kind == _STORED else root
        assert base is not None
        found.append(Picture(str((base if kind == _STORED else base.resolve()) / name), mark))
    return tuple(found)


def stamps(pictures: Iterable[Picture], store: Path | None) -> list[Stamp]:
    """What tells whether files have changed; what is kept under its digest has not."""
    found: dict[str, Stamp] = {}
    for picture in pictures:
        if picture.data is None and not (store is not None and Path(picture.path).is_relative_to(store)):
            about = os.stat(picture.path)
            found[picture.path] = (picture.path, about.st_size, about.st_mtime_ns)
    return list(found.values())


def unchanged(marks: Iterable[Sequence[object]]) -> bool:
    """Whether files are as their stamps say."""
    for path, size, changed in marks:
        try:
            about = os.stat(str(path))
        except OSError:
            return False
        if (about.st_size, about.st_mtime_ns) != (size, changed):
            return False
    return True
