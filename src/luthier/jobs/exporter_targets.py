"""Where an exporter takes a model: a repository of the Hub, a bucket, a directory. None looks whole while it is not.

The Hub takes all files in one commit, and a directory is renamed when it is there. In a bucket nothing can be renamed,
so the file without which no model opens (`config.json`, or `adapter_config.json`) goes first and comes last.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Protocol

from luthier.jobs.initializers.again import again
from luthier.jobs.initializers.fetch import replace, sync
from luthier.jobs.initializers.progress import Progress
from luthier.jobs.storage import Access, BrokenError, Place, StorageError, chosen, told

MARK = "luthier_export.json"
"""The file of an export that says it is one, so that it may be replaced."""
OPENS = ("config.json", "adapter_config.json")
"""Without one of these nothing opens the directory."""
REPLACED = ("*.safetensors", "*.safetensors.index.json", "*.bin", *OPENS)
"""Files that would be taken for part of a new export if an earlier one left them."""


class Target(Protocol):
    """Where a model goes."""

    def prepare(self) -> None:
        """Find out whether it can go there.

        Raises:
            StorageError: it cannot.
        """

    def put(self, directory: Path, names: list[str]) -> None:
        """Take files there, all or none as far as who opens them can tell.

        Raises:
            StorageError: it was refused, or broke off for good.
        """


def target_of(place: Place, access: Access) -> Target:
    """The target that a place is.

    Raises:
        StorageError: nothing can be taken there.
    """
    match place.scheme:
        case "hf":
            return HubTarget(place, access)
        case "s3" | "gs":
            return BucketTarget(place, access)
        case "file":
            return DirectoryTarget(place)
        case _:
            remedy = "name an hf://, s3://, gs:// or file:// place"
            raise StorageError("nothing can be uploaded there", where=place.uri, remedy=remedy)


class HubTarget:
    """A model repository. One that is new is private: what was trained on may be; its page has the switch."""

    def __init__(self, place: Place, access: Access) -> None:
        from luthier.jobs.initializers.hub import Hub

        if place.repo_type == "dataset" or "/" not in place.repo:
            raise StorageError("that is no model repository", where=place.uri, remedy="write hf://owner/name")
        self._place, self._hub = place, Hub(place, access, "model")

    def prepare(self) -> None:
        def make() -> None:
            with self._hub.told():
                self._hub.api.create_repo(self._place.repo, private=True, exist_ok=True)
                if self._place.revision is not None:
                    self._hub.api.create_branch(self._place.repo, branch=self._place.revision, exist_ok=True)

        again(make, self._place, "exporter")

    def put(self, directory: Path, names: list[str]) -> None:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        below = f"{self._place.path}/" if self._place.path else ""

        def commit() -> None:
            progress = Progress("exporter", _size(directory, names))
            with self._hub.told():
                api, repo, revision = self._hub.api, self._place.repo, self._place.revision
                there = [name for name in api.list_repo_files(repo, revision=revision) if name.startswith(below)]
                stale = chosen((name.removeprefix(below) for name in there), (), REPLACED)
                operations: list[CommitOperationAdd | CommitOperationDelete] = [
                    CommitOperationDelete(below + name) for name in stale if name not in names
                ]
                operations += [CommitOperationAdd(below + name, directory / name) for name in names]
                for operation in operations:  # one by one, so that there is something to tell
                    if isinstance(operation, CommitOperationAdd):
                        api.preupload_lfs_files(repo, [operation], revision=revision, free_memory=False)
                        progress.add(operation.upload_info.size)
                api.create_commit(repo, operations, commit_message="Export by Luthier", revision=revision)
                there = api.list_repo_files(repo, revision=revision)
            if missing := [name for name in names if below + name not in there]:
                raise StorageError(
                    f"it left out {', '.join(missing)}", where=self._place.uri, remedy="see its .gitignore"
                )

        again(commit, self._place, "exporter")


class BucketTarget:
    """A path of a bucket that is empty or holds an earlier export."""

    def __init__(self, place: Place, access: Access) -> None:
        from luthier.jobs.initializers.bucket import Bucket

        self._place, self._bucket = place, Bucket(place, access)
        self._root = self._bucket.root

    def prepare(self) -> None:
        there = again(self._there, self._place, "exporter")
        if there and MARK not in there:
            remedy = "name a path that is empty, or that of an earlier export"
            raise StorageError("there are other files", where=self._place.uri, remedy=remedy)

    def put(self, directory: Path, names: list[str]) -> None:
        def rank(name: str) -> int:
            base = name.rpartition("/")[2]
            return 0 if name == MARK else 3 if base in OPENS else 2 if base.endswith(".index.json") else 1

        there = again(self._there, self._place, "exporter")
        self._remove([name for name in there if name in OPENS])
        progress = Progress("exporter", _size(directory, names))
        for name in sorted(names, key=lambda name: (rank(name), name)):
            if rank(name) == 3:  # it would vouch for them
                self._remove([old for old in chosen(there, (), REPLACED) if old not in names and old not in OPENS])
                there = []
            self._one(directory / name, f"{self._root}/{name}", progress)

    def _there(self) -> list[str]:
        """Names below the path."""
        with self._bucket.told():
            self._bucket.files.ls(self._place.bucket)  # a bucket that is not there has no files either
            found = self._bucket.files.find(f"{self._root}/")
        return [str(key).removeprefix(f"{self._root}/") for key in found if not str(key).endswith("/")]

    def _remove(self, names: list[str]) -> None:
        def remove() -> None:
            with self._bucket.told():
                self._bucket.files.rm([f"{self._root}/{name}" for name in names])

        if names:
            again(remove, self._place, "exporter")

    def _one(self, file: Path, key: str, progress: Progress) -> None:
        from fsspec.callbacks import Callback

        size, counted = file.stat().st_size, 0

        class Parts(Callback):
            def relative_update(self, inc: int = 1) -> None:
                nonlocal counted
                counted += inc
                progress.add(inc)

        def upload() -> None:
            with self._bucket.told():
                self._bucket.files.put_file(str(file), key, callback=Parts())
                arrived = self._bucket.files.info(key)["size"]
            if arrived != size:
                raise BrokenError(f"of {file.name} {arrived} bytes arrived")

        again(upload, self._place, "exporter")
        progress.add(size - counted)  # parts that were sent twice, or not told


class DirectoryTarget:
    """A directory that is empty, not there yet, or an earlier export."""

    def __init__(self, place: Place) -> None:
        self._place, self._path = place, Path(place.path)

    def prepare(self) -> None:
        with told(self._place):
            if self._path.is_dir():
                if any(self._path.iterdir()) and not (self._path / MARK).is_file():
                    remedy = "name a directory that is empty, or an earlier export"
                    raise StorageError("there are other files", where=self._place.uri, remedy=remedy)
            elif self._path.exists():
                raise StorageError("it is a file", where=self._place.uri, remedy="name a directory")
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(self._path.parent, os.W_OK):
                raise PermissionError

    def put(self, directory: Path, names: list[str]) -> None:
        aside = self._path.parent / f".{self._path.name}.partial"
        with told(self._place):
            shutil.rmtree(aside, ignore_errors=True)
            progress = Progress("exporter", _size(directory, names))
            for name in names:
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                with (directory / name).open("rb") as source, (aside / name).open("wb") as file:
                    shutil.copyfileobj(source, file, 1 << 20)
                    file.flush()
                    os.fsync(file.fileno())
                    progress.add(file.tell())
            for folder in (aside, *(path for path in aside.rglob("*") if path.is_dir())):
                sync(folder)
            replace(aside, self._path)


def _size(directory: Path, names: list[str]) -> int:
    return sum((directory / name).stat().st_size for name in names)
