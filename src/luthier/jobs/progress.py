"""How far a run is, read from its `metrics.jsonl`, and said to Kubeflow Trainer where there is one."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from luthier.errors import first_line
from luthier.jobs.types import TrainerStatus

METRICS = "metrics.jsonl"

SERVER_URL = "KUBEFLOW_TRAINER_SERVER_URL"
SERVER_CA_CERT = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
"""A file."""
SERVER_TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"
"""A file too; the cluster renews it now and then."""

_TAIL_BYTES = 65536
_PACE_ROWS = 10
_EVERY_SECONDS = 5.0
_MOST_METRICS = 256


def read_progress(run: Path, config: Mapping[str, Any] | None) -> TrainerStatus | None:
    """How far a run is.

    Args:
        run: its directory.
        config: the run as plain data; `train.steps` or `train.epochs` say where it ends. None where only metrics are
            known, as of a function that writes such a file.

    Returns:
        progress by steps where their number is known, by passes through the rows else; 100 only once the last step is
        done. None before the first row of metrics.
    """
    rows, written = _rows(run / METRICS)
    if not rows:
        return None
    newest: dict[str, float] = {}
    for row in rows:
        newest |= row
    done = _done(newest, config.get("train") or {}) if config is not None else None
    percent = left = None
    if done is not None:
        percent = min(100, int(100 * done + 1e-6))
        steps = newest["step"] / done - newest["step"] if done and "step" in newest else None
        paces = [row["step_seconds"] for row in rows if math.isfinite(row.get("step_seconds", math.nan))]
        # The first step of a process warms caches and kernels up: it says little about the others.
        paces = paces[1:][-_PACE_ROWS:] or paces
        seconds = steps * sum(paces) / len(paces) if steps is not None and paces else math.nan
        if math.isfinite(seconds):
            left = round(max(0.0, seconds))
    return TrainerStatus(
        progress_percentage=percent,
        estimated_remaining_seconds=left,
        metrics=newest,
        last_updated_time=datetime.fromtimestamp(written, UTC),
    )


def _done(newest: Mapping[str, float], train: Mapping[str, Any]) -> float | None:
    """The share of the run that is done; None where that cannot be known."""
    if train.get("steps"):
        done = newest.get("step", 0) / train["steps"]
    else:
        done = newest.get("epoch", math.nan) / (train.get("epochs") or 1)
    return done if 0 <= done < math.inf else None


def _rows(path: Path) -> tuple[list[dict[str, float]], float]:
    """The numbers in the last rows of a file that is being written, and when the last was. What is no row, or no
    number, is passed over: a spoilt file must neither fail a run nor hide the other jobs of a list."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
            file.seek(start)
            *lines, _ = file.read().split(b"\n")  # what follows the last newline is half a row
            written = os.fstat(file.fileno()).st_mtime
    except OSError:
        return [], 0.0
    rows = []
    for line in lines[1:] if start else lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append({name: float(value) for name, value in row.items() if _fits(value)})
    return rows, written


def _fits(value: Any) -> bool:
    """Whether it is a number, and no larger than a float can be."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 1023)


class ProgressPoster(threading.Thread):
    """Says to Kubeflow Trainer how far a run is, every five seconds when there is news, and once more at the end.

    A server that does not answer costs the run nothing.

    Args:
        run: its directory.
        config: the run as plain data.
        url: of the server.
    """

    def __init__(self, run: Path, config: Mapping[str, Any], url: str) -> None:
        super().__init__(name="progress", daemon=True)
        self._run, self._config, self._url = run, config, url
        self._over = threading.Event()
        self._said: TrainerStatus | None = None

    def run(self) -> None:
        while not self._over.wait(_EVERY_SECONDS):
            self._say()
        self._say()

    def close(self) -> None:
        """Say the last, and stop."""
        self._over.set()
        self.join()

    def _say(self) -> None:
        status = read_progress(self._run, self._config)
        if status is None or status == self._said:
            return
        try:
            post(self._url, status)
        except OSError:
            return  # tried again with the next
        self._said = status


def post(url: str, status: TrainerStatus) -> None:
    """Say to a server how far a run is.

    Raises:
        OSError: it cannot be reached, or does not take it.
    """
    import urllib.request
    from http.client import HTTPException

    said: dict[str, Any] = {"lastUpdatedTime": (status.last_updated_time or datetime.now(UTC)).isoformat()}
    if status.progress_percentage is not None:
        said["progressPercentage"] = status.progress_percentage
    if status.estimated_remaining_seconds is not None:
        said["estimatedRemainingSeconds"] = status.estimated_remaining_seconds
    metrics = list(status.metrics.items())[:_MOST_METRICS]
    said["metrics"] = [{"name": name, "value": str(value)} for name, value in metrics]
    headers = {"Content-Type": "application/json"}
    if token := os.environ.get(SERVER_TOKEN):
        headers["Authorization"] = f"Bearer {Path(token).read_text(encoding='utf-8').strip()}"
    body = json.dumps({"trainerStatus": said}).encode()
    context = None
    if authority := os.environ.get(SERVER_CA_CERT):
        import ssl

        context = ssl.create_default_context(cafile=authority)
    try:
        request = urllib.request.Request(url, data=body, headers=headers, method="POST")
        with urllib.request.urlopen(request, timeout=_EVERY_SECONDS, context=context):
            pass
    except (HTTPException, ValueError) as error:  # an answer, or an address, that is none
        raise OSError(first_line(error)) from error
