"""The directory of one run: what lies where, who may write, and whether there is something to go on from."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from filelock import FileLock, Timeout

from luthier.config import RunConfig, dump_config, load_config
from luthier.errors import ConfigError, Terminated

_LOCK = ".lock"


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths inside a run's output directory."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved config: `luthier train RUN/config.yaml` repeats the run."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        """What the run leaves: a model directory, or PEFT files."""
        return self.path / "export"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @staticmethod
    def existing(path: Path) -> tuple[RunDirectory, RunConfig]:
        """Open the directory of a run that has been.

        Raises:
            ConfigError: if it is not one.
        """
        run = RunDirectory(path)
        if not run.config.is_file():
            raise ConfigError(
                "is not a run directory", where=str(path), remedy="give the output directory of a luthier train"
            )
        return run, load_config(run.config)

    def write_config(self, config: RunConfig) -> None:
        """Leave the resolved config in the directory."""
        write_text(self.config, dump_config(config))

    def changes(self, config: RunConfig) -> list[str]:
        """Settings that the run went by until now and that this config has otherwise, a line each."""
        try:
            before = load_config(self.config)
        except ConfigError:  # none was left, or it is another version's
            return []
        return [f"{path}: {new}, before {old}" for path, old, new in _differences(_plain(before), _plain(config))]

    def discard(self) -> None:
        """Remove the directory of a run that was refused: one that holds nothing but what was said while it began."""
        if self.path.is_dir() and {entry.name for entry in self.path.iterdir()} <= {self.log.name, _LOCK, "logs"}:
            shutil.rmtree(self.path, ignore_errors=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Own the directory: one run at a time writes there.

        Raises:
            ConfigError: if another run is writing, or the path cannot be a directory.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot be the run directory ({error.strerror or error})", where=f"output {self.path}"
            ) from None
        lock = FileLock(self.path / _LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ConfigError(
                "another run is writing here",
                where=f"output {self.path}",
                remedy="wait for it or choose another output",
            ) from None
        try:
            yield
        finally:
            lock.release()


def _plain(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude={"output"})


def _differences(before: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in before | now:
            yield from _differences(before.get(key), now.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from _differences(old, new, f"{path}.{number}")
    elif before != now:
        yield path, before, now


def write_text(path: Path, text: str) -> None:
    """Replace a file whole: aside, flushed to disk, renamed."""
    aside = path.with_name(f".{path.name}.writing")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


class Interruption:
    """What SIGTERM and SIGINT do to a run.

    While it is deferred (`deferred()`, around the steps) the first one is a wish to stop after the step, and a second
    SIGINT stops at once. Otherwise nothing is lost by stopping at once: SIGINT raises KeyboardInterrupt, SIGTERM
    Terminated with the code that shells give to a process ended by it.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._deferred = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interruption:
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread: the embedding program keeps its own handlers
                break
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Within, the first signal waits for the end of the step."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and (self.signal is not None or not self._deferred):
            raise KeyboardInterrupt
        if not self._deferred:
            raise Terminated(128 + number)
        self.signal = number
