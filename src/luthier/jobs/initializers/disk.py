"""file://: a file or a directory of this machine, or of a volume that is mounted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from luthier.jobs.storage import Entry, Place, StorageError, told

CHUNK = 1 << 20


class Disk:
    """Links are followed: a Hub cache is made of them."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def entries(self) -> list[Entry]:
        root = Path(self.place.path)
        with told(self.place):
            if not root.is_dir():
                root.stat()
                return [self._entry(root, root.name)]
            return [self._entry(path, path.relative_to(root).as_posix()) for path in _walk(root)]

    def read(self, entry: Entry, start: int) -> Iterator[bytes | Literal["from the start"]]:
        with told(self.place), open(entry.key, "rb") as file:
            file.seek(start)
            while chunk := file.read(CHUNK):
                yield chunk

    def binding(self, entry: Entry) -> bool:
        return True

    def _entry(self, path: Path, name: str) -> Entry:
        if not path.is_file():
            raise StorageError(f"{name!r} is no regular file, or a link to nothing", where=self.place.uri)
        status = path.stat()
        version = f"{status.st_ino}-{status.st_mtime_ns}"
        return Entry(name, str(path), status.st_size, version=version)


def _walk(root: Path) -> Iterator[Path]:
    """Every file below; a directory that links make appear within itself is entered once."""
    for folder, folders, files in os.walk(root, followlinks=True, onerror=_raise):
        above = [parent.resolve() for parent in [Path(folder), *Path(folder).parents]]
        folders[:] = sorted(name for name in folders if (Path(folder) / name).resolve() not in above)
        yield from (Path(folder) / name for name in sorted(files))


def _raise(error: OSError) -> None:
    raise error
