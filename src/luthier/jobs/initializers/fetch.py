"""Fetching all files of a source into one directory, so that a break costs little and nobody sees half of it.

Files come into a directory beside the target (`.dataset.partial`): begun ones under `begun/`, whole ones under
`whole/`, and `plan.json` says what they are to be. When all are there and checked, `whole/` takes the target's name. A
run that dies at any moment leaves either the old directory or none, and the next one goes on where it was.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from luthier.jobs.initializers.again import WAITS, again, gone
from luthier.jobs.initializers.progress import Progress, measure, say
from luthier.jobs.storage import BrokenError, Entry, Place, Source, StorageError, chosen, inside

MARKER = ".luthier-fetched"
"""File in a target that is whole; hidden, so that readers of the directory pass over it."""
AT_ONCE = 4
_ROOM = 64 << 20
"""Bytes that a disk should have left."""

Check = Callable[[list[str], list[str]], None]
"""Looks at the names that a source has and those of them that were chosen; raises `StorageError`."""


def fetch(source: Source, target: Path, *, ignore: Iterable[str], allow: Iterable[str] | None, check: Check) -> None:
    """Fetch what a source has, unless the target has it.

    Args:
        source: where from.
        target: the directory; replaced if it came from another URI.
        ignore, allow: patterns of names, as of `chosen`.
        check: of the names, before anything is fetched.

    Raises:
        StorageError: the source, or what is in the way at the target.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(target.parent / f".{target.name}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        say(f"{target.name}: another process is fetching; waiting for it")
        lock.acquire()
    try:
        _Fetch(source, target, list(ignore), None if allow is None else list(allow)).run(check)
    finally:
        lock.release()


class _Fetch:
    def __init__(self, source: Source, target: Path, ignore: list[str], allow: list[str] | None) -> None:
        self.source, self.target = source, target
        self.ignore, self.allow = ignore, allow
        self.identity = _identity(source.place, ignore, allow)
        self.partial = target.parent / f".{target.name}.partial"
        self.whole, self.begun = self.partial / "whole", self.partial / "begun"
        self.stop = threading.Event()

    def run(self, check: Check) -> None:
        name, uri = self.target.name, self.source.place.uri
        if fetched(self.target).get("of") == self.identity:
            say(f"{name}: {uri} is in {self.target} already")
            return
        self._require_replaceable()
        say(f"{name}: asking for {uri}")
        entries = self._chosen(again(self.source.entries, self.source.place, name), check)
        self._prepare(entries)
        sizes = [entry.size for entry in entries]
        total = None if None in sizes else sum(size or 0 for size in sizes)
        say(f"{name}: {_files(len(entries))}{'' if total is None else ', ' + measure(total)}")
        self._require_room(total)
        self.progress = Progress(name, total)
        self._all(entries)
        self._finish(entries)
        say(f"{name}: {_files(len(entries))} in {self.target}")

    def _chosen(self, entries: list[Entry], check: Check) -> list[Entry]:
        names = [inside(entry.name, self.source.place.uri) for entry in entries]
        kept = chosen(names, self.ignore, self.allow)
        check(names, kept)
        folders = {"/".join(name.split("/")[:depth]) for name in kept for depth in range(1, name.count("/") + 1)}
        if both := folders & set(kept) or {name for name in kept if name.split("/")[0] == MARKER}:
            raise StorageError(f"{min(both)!r} cannot be on a disk beside the others", where=self.source.place.uri)
        wanted = set(kept)
        return [entry for entry in entries if entry.name in wanted]

    def _require_replaceable(self) -> None:
        if not (self.target.exists() or self.target.is_symlink()) or (self.target / MARKER).is_file():
            return
        if self.target.is_dir() and not any(self.target.iterdir()):
            return
        remedy = "move it away, or take another workspace"
        raise StorageError(
            "it holds files that were not fetched by this command", where=str(self.target), remedy=remedy
        )

    def _prepare(self, entries: list[Entry]) -> None:
        """Keep of an earlier run's files those that are certainly what this one wants."""
        plan = {"of": self.identity, "files": {entry.name: _facts(entry) for entry in entries}}
        earlier = _read(self.partial / "plan.json")
        if earlier.get("of") != self.identity:
            shutil.rmtree(self.partial, ignore_errors=True)
            earlier = {}
        for folder in (self.whole, self.begun):
            folder.mkdir(parents=True, exist_ok=True)
        (self.whole / MARKER).unlink(missing_ok=True)
        for name, facts in earlier.get("files", {}).items():
            if plan["files"].get(name) != facts or not (facts["version"] or facts["checksum"]):
                (self.whole / name).unlink(missing_ok=True)
                self._part(name).unlink(missing_ok=True)
        _write(self.partial / "plan.json", plan)

    def _require_room(self, total: int | None) -> None:
        if total is None:
            return
        here = sum(path.stat().st_size for path in self.partial.rglob("*") if path.is_file())
        free = shutil.disk_usage(self.partial).free
        if total - here + _ROOM > free:
            needed = f"{measure(total - here)} are missing, and {measure(free)} are free"
            raise StorageError(f"there is no room: {needed}", where=str(self.target.parent), remedy="free some space")

    def _all(self, entries: list[Entry]) -> None:
        pool = ThreadPoolExecutor(AT_ONCE)
        tasks = [pool.submit(self._one, entry) for entry in entries]
        try:
            done, _ = wait(tasks, return_when=FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            self.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)  # some may hang on a server for a minute

    def _part(self, name: str) -> Path:
        """Flat, since a begun file of one name must not be the directory of another."""
        return self.begun / hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()

    def _one(self, entry: Entry) -> None:
        whole, part = self.whole / entry.name, self._part(entry.name)
        if whole.is_file():
            self.progress.add(whole.stat().st_size, here=True)
            return
        whole.parent.mkdir(parents=True, exist_ok=True)
        with part.open("a+b") as file:
            if entry.size is not None and file.tell() > entry.size:
                _empty(file)
            began = file.tell()
            self.progress.add(began, here=True)
            self._fill(entry, file)
            if not self._right(entry, file):
                if began == 0:
                    raise self._wrong(entry)
                self.progress.add(-file.tell())  # what an earlier run left may be at fault
                _empty(file)
                self._fill(entry, file)
                if not self._right(entry, file):
                    raise self._wrong(entry)
            file.flush()
            os.fsync(file.fileno())
        part.rename(whole)

    def _fill(self, entry: Entry, file: IO[bytes]) -> None:
        """Append what is missing, however often the source breaks off, as long as it moves."""
        tries = 0
        while entry.size is None or file.tell() < entry.size:
            before = file.tell()
            try:
                self._append(entry, file)
                if entry.size is None or file.tell() >= entry.size:
                    return
                raise BrokenError(f"it ended after {file.tell()} of {entry.size} bytes")
            except BrokenError as error:
                file.flush()  # for the next process, if this one does not live to go on
                tries = 0 if file.tell() > before else tries + 1
                if tries > len(WAITS):
                    raise gone(self.source.place, error) from error
                say(f"{self.target.name}: {entry.name} broke off after {measure(file.tell())}; going on")
                if self.stop.wait(WAITS[max(tries - 1, 0)]):
                    raise StorageError("stopped", where=self.source.place.uri) from None

    def _append(self, entry: Entry, file: IO[bytes]) -> None:
        for chunk in self.source.read(entry, file.tell()):
            if self.stop.is_set():
                raise StorageError("stopped", where=self.source.place.uri)
            if isinstance(chunk, str):
                self.progress.add(-file.tell())
                _empty(file)
                continue
            file.write(chunk)
            self.progress.add(len(chunk))

    def _right(self, entry: Entry, file: IO[bytes]) -> bool:
        file.flush()
        size = file.seek(0, os.SEEK_END)
        if entry.size is not None and size != entry.size:
            return False
        if entry.checksum is None:
            return True
        kind, expected = entry.checksum
        digest = hashlib.sha1(f"blob {size}\0".encode()) if kind == "git" else hashlib.new(kind, usedforsecurity=False)
        file.seek(0)
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        return digest.hexdigest() == expected or not self.source.binding(entry)

    def _wrong(self, entry: Entry) -> StorageError:
        self._part(entry.name).unlink(missing_ok=True)
        what = "size" if entry.checksum is None else f"{entry.checksum[0]} checksum"
        return StorageError(
            f"{entry.name} came with another {what} than it should have",
            where=self.source.place.uri,
            remedy="run it again",
        )

    def _finish(self, entries: list[Entry]) -> None:
        """Give the directory its name."""
        wanted = {self.whole / entry.name for entry in entries}
        for path in sorted(self.whole.rglob("*"), reverse=True):  # what an earlier commit had and this one has not
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
            elif not path.is_dir() and path not in wanted:
                path.unlink()
        mark = {"of": self.identity, "revision": getattr(self.source, "revision", None), "files": len(entries)}
        _write(self.whole / MARKER, mark)
        for folder in (self.whole, *(path for path in self.whole.rglob("*") if path.is_dir())):
            sync(folder)
        replace(self.whole, self.target)
        shutil.rmtree(self.partial, ignore_errors=True)


def fetched(target: Path) -> dict[str, Any]:
    """What the marker of a directory says: "of" has the "uri" that it came from, "revision" the Hub's commit.

    Empty where the directory was not fetched, or is not whole.
    """
    return _read(target / MARKER)


def replace(new: Path, target: Path) -> None:
    """Give a directory that is whole the name of another, which goes; both lie in one file system."""
    old = target.parent / f".{target.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    try:
        if target.exists() or target.is_symlink():
            target.rename(old)
        new.rename(target)
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.EXDEV):
            raise
        remedy = "mount the volume at the directory above"
        raise StorageError(
            "it is a volume of its own and cannot be replaced", where=str(target), remedy=remedy
        ) from error
    sync(target.parent)
    if old.is_symlink() or old.is_file():
        old.unlink()
    else:
        shutil.rmtree(old, ignore_errors=True)


def sync(folder: Path) -> None:
    """Have the disk know the names in a directory."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _empty(file: IO[bytes]) -> None:
    file.seek(0)
    file.truncate()


def _identity(place: Place, ignore: list[str], allow: list[str] | None) -> dict[str, Any]:
    """What makes two fetches the same. The query of an address may be a secret and is known by its hash."""
    query = hashlib.sha256(place.address.encode()).hexdigest() if "?" in place.address else None
    return {"uri": place.uri, "query": query, "sha256": place.sha256, "ignore": ignore, "allow": allow}


def _facts(entry: Entry) -> dict[str, Any]:
    return {"size": entry.size, "checksum": list(entry.checksum) if entry.checksum else None, "version": entry.version}


def _files(count: int) -> str:
    return f"{count} file{'' if count == 1 else 's'}"


def _read(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _write(path: Path, value: dict[str, Any]) -> None:
    aside = path.with_name(f"{path.name}.new")
    with aside.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
