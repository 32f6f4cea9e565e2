"""Where metrics go: metrics.jsonl always, trackers when asked for."""

from __future__ import annotations

import importlib
import json
import math
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from luthier.errors import ConfigError, UserError

Values = Mapping[str, float | int]


class Sink(Protocol):
    """Something that keeps numbers by step."""

    def write(self, step: int, values: Values) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """One JSON object a line, flushed at once; what is not finite is null.

    Args:
        path: of the file; goes on with what is there.
        step: the step that the run goes on from. Rows of later steps, left by a run that was killed after its last
            checkpoint, and a half-written last line are cut off; 0 starts an empty file.
    """

    def __init__(self, path: Path, *, step: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for number, line in _numbered_lines(path) if _step(path, number, line) <= step] if step else []
        # Written aside: a crash in between must not cost the rows so far.
        aside = path.with_name(path.name + ".writing")
        aside.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(aside, path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Values) -> None:
        row = {"step": step} | {
            name: value if math.isfinite(value) else None for name, value in values.items() if name != "step"
        }
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _numbered_lines(path: Path) -> list[tuple[int, str]]:
    if not path.exists():
        return []
    # what follows the last newline is half a row
    *lines, _ = path.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    return [(number, line) for number, line in enumerate(lines, start=1) if line]


def _step(path: Path, number: int, line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError, RecursionError):
        remedy = "take the line out, or move the file away"
        raise ConfigError("is no row of metrics", where=f"{path}:{number}", remedy=remedy) from None


class TensorBoardSink:
    """Event files under RUN/tensorboard."""

    def __init__(self, directory: Path, project: str, config: Mapping[str, Any], step: int) -> None:
        _module("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        # What a killed run wrote after its last checkpoint is hidden.
        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1)
        self._writer.add_text("config", f"```json\n{json.dumps(config, indent=2)}\n```")

    def write(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A run named after the directory; it goes on when the training does."""

    def __init__(self, directory: Path, project: str, config: Mapping[str, Any], step: int) -> None:
        wandb = _module("wandb")
        marker = directory / "wandb-id.txt"
        if not marker.exists():
            marker.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
        self._run = wandb.init(
            project=project, name=directory.name, id=marker.read_text(encoding="utf-8"), resume="allow",
            dir=str(directory), config=dict(config),
        )  # fmt: skip

    def write(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """A run of the experiment `project`, on the server that MLFLOW_TRACKING_URI names."""

    def __init__(self, directory: Path, project: str, config: Mapping[str, Any], step: int) -> None:
        self._mlflow = _module("mlflow")
        self._mlflow.set_experiment(project)
        marker = directory / "mlflow-id.txt"
        known = marker.read_text(encoding="utf-8") if marker.exists() else None
        run = self._mlflow.start_run(run_id=known, run_name=None if known else directory.name)
        if known is None:
            marker.write_text(run.info.run_id, encoding="utf-8")
            self._mlflow.log_dict(dict(config), "config.json")

    def write(self, step: int, values: Values) -> None:
        self._mlflow.log_metrics({name: float(value) for name, value in values.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class TrackioSink:
    """A run named after the directory in a local trackio project."""

    def __init__(self, directory: Path, project: str, config: Mapping[str, Any], step: int) -> None:
        self._run = _module("trackio").init(project=project, name=directory.name, config=dict(config), resume="allow")

    def write(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[Path, str, Mapping[str, Any], int], Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "mlflow": MlflowSink,
    "trackio": TrackioSink,
}


def open_tracker(name: str, directory: Path, project: str, config: Mapping[str, Any], *, step: int = 0) -> Sink:
    """Start a tracker.

    Args:
        name: a key of `TRACKERS`.
        directory: of the run.
        project: what the tracker files the run under.
        config: the resolved config, JSON-able.
        step: the step that the run goes on from.

    Raises:
        UserError: the tracker's package is not installed.
    """
    return TRACKERS[name](directory, project, config, step)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"{name} cannot be imported ({error})",
            where="report.trackers",
            remedy=f"install it with: pip install 'luthier[{name}]'",
        ) from None
