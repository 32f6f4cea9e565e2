"""What jobs look like at a terminal, and in what `--json` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from luthier.cli.frame import table

if TYPE_CHECKING:
    from luthier.jobs.types import Event, TrainJob

ENDED = ("Complete", "Failed")


def plain(job: TrainJob) -> dict[str, Any]:
    """A job for `--json`; of its runtime the name."""
    return {
        "name": job.name,
        "runtime": job.runtime.name,
        "status": job.status,
        "message": job.message,
        "num_nodes": job.num_nodes,
        "created": job.creation_timestamp,
        "progress": job.trainer_status,
        "steps": job.steps,
    }


def jobs_table(jobs: Sequence[TrainJob]) -> Iterator[str]:
    """A row for each."""
    head = ("Job", "Runtime", "Status", "Progress", "Created")
    rows = [
        [job.name, job.runtime.name, job.status, _progress(job) or "-", _time(job.creation_timestamp)] for job in jobs
    ]
    return table(head, rows) if rows else iter(["there are no jobs"])


def line_of(job: TrainJob) -> str:
    """Where a job stands, in one line."""
    said = [part for part in (_progress(job), job.message.partition("\n")[0]) if part]
    return f"{job.name}  {job.status}" + (f"  {', '.join(said)}" if said else "")


def _progress(job: TrainJob) -> str:
    status = job.trainer_status
    if status is None:
        return ""
    parts = [f"{status.progress_percentage}%"] if status.progress_percentage is not None else []
    if status.estimated_remaining_seconds is not None and job.status not in ENDED:
        minutes, seconds = divmod(status.estimated_remaining_seconds, 60)
        hours, minutes = divmod(minutes, 60)
        parts.append(f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left")
    if "loss" in status.metrics:
        parts.append(f"loss {status.metrics['loss']:.4f}")
    return ", ".join(parts)


def details(job: TrainJob) -> Iterator[str]:
    """That, why, and a line for each step."""
    yield line_of(job)
    yield from (f"    {line}" for line in job.message.splitlines()[1:])
    for step in job.steps:
        times = [_time(moment) if moment is not None else "-" for moment in (step.started, step.ended)]
        code = "" if step.exit_code is None else f"  exit code {step.exit_code}"
        yield f"  {step.name:<20}{step.status or '-':<12}{' to '.join(times)}{code}"


def event_line(event: Event) -> str:
    """Something that has happened."""
    return f"{_time(event.event_time)}  {event.reason:<12}  {event.involved_object_name}  {event.message}"


def _time(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
