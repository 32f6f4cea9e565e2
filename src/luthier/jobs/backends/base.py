"""What every backend does; `TrainerClient` is a thin client over it, and one contract test holds all of them to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from luthier.jobs.spec import JobSpec
    from luthier.jobs.types import Event, Runtime, TrainJob


class Backend(Protocol):
    """Where jobs run. Errors are `luthier.errors.UserError`s that say the same on every backend."""

    def list_runtimes(self) -> list[Runtime]:
        """All runtimes, by name."""

    def get_runtime_packages(self, runtime: Runtime) -> dict[str, str]:
        """Installed Python packages of a runtime -> their versions."""

    def submit(self, spec: JobSpec) -> None:
        """Take a job. It is durable when this returns.

        Raises:
            UserError: a job of that name is there already, or the backend cannot do what the spec asks.
        """

    def list_jobs(self) -> list[TrainJob]:
        """All jobs, the oldest first."""

    def get_job(self, name: str) -> TrainJob:
        """One job as it is now.

        Raises:
            UserError: there is none of that name.
        """

    def get_job_logs(self, name: str, step: str, *, follow: bool) -> Iterator[str]:
        """Lines of a step's log, without line ends; with `follow` each as soon as it is written, until the job ends.

        Raises:
            UserError: there is no such job, or the job has no such step.
        """

    def get_job_events(self, name: str) -> list[Event]:
        """What has happened to a job, the oldest first."""

    def delete_job(self, name: str) -> None:
        """End a job's processes, wait until they are gone, and forget it.

        Raises:
            UserError: there is none of that name.
        """

    def suspend_job(self, name: str) -> None:
        """Let a job stop, its processes by SIGTERM first, and hold it back; returns before it has.

        Raises:
            UserError: there is none of that name, or it has ended.
        """

    def resume_job(self, name: str) -> None:
        """Let a suspended job go on when its turn comes: nodes start again.

        Raises:
            UserError: there is none of that name, or it has ended.
        """

    def as_object(self, spec: JobSpec) -> Any:
        """What `submit` would make of a spec, for people to look at: a manifest, a script, command lines."""
