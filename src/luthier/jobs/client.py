"""`TrainerClient`: builds and checks jobs, and hands them to a backend. It keeps nothing: any client sees all jobs."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Literal, overload

from luthier.config.faults import shown
from luthier.errors import ConfigError, UserError
from luthier.jobs.backends.base import Backend
from luthier.jobs.messages import unknown_job
from luthier.jobs.options import (
    BackendConfig,
    KubernetesBackendConfig,
    LocalBackendConfig,
    Option,
    SlurmBackendConfig,
)
from luthier.jobs.runtimes import find
from luthier.jobs.spec import JobSpec, node_step
from luthier.jobs.trainers import AnyTrainer
from luthier.jobs.types import (
    COMPLETE,
    FAILED,
    STATUSES,
    Event,
    Initializer,
    ModelExporter,
    Runtime,
    TrainJob,
)
from luthier.jobs.validate import LONGEST_NAME, NAME

_LAST_LINES = 20
"""Of the log of a step that failed, in the error that says so."""


class JobFailedError(UserError, RuntimeError):
    """A job that was waited for has failed; says why, with the last lines of the step's log."""


class JobTimeoutError(UserError, TimeoutError):
    """A job has not reached the status that was waited for in time."""


class TrainerClient:
    """Trains models as jobs.

    Args:
        backend_config: where jobs run; on this machine when None.

    >>> TrainerClient().train(runtime="luthier-qwen2.5-0.5b", dry_run=True).recipe
    'full_finetune_single_device'
    """

    def __init__(self, backend_config: BackendConfig | None = None) -> None:
        config = backend_config if backend_config is not None else LocalBackendConfig()
        if not isinstance(config, LocalBackendConfig | KubernetesBackendConfig | SlurmBackendConfig):
            what = f"{type(config).__name__} is not LocalBackendConfig, KubernetesBackendConfig or SlurmBackendConfig"
            raise ConfigError(what, where="backend_config")
        self._config = config

    @cached_property
    def backend(self) -> Backend:
        """Who runs the jobs."""
        match self._config:
            case LocalBackendConfig():
                from luthier.jobs.backends.local import LocalBackend

                return LocalBackend(self._config)
            case KubernetesBackendConfig():
                from luthier.jobs.backends.kubernetes import KubernetesBackend

                return KubernetesBackend(self._config)
            case _:
                from luthier.jobs.backends.slurm import SlurmBackend

                return SlurmBackend(self._config)

    # --- runtimes -----------------------------------------------------------------------------------------------------

    def list_runtimes(self) -> list[Runtime]:
        """All runtimes, by name."""
        return sorted(self.backend.list_runtimes(), key=lambda runtime: runtime.name)

    def get_runtime(self, name: str) -> Runtime:
        """One runtime; the names of KEP-2401 (`torchtune-llama3.2-1b`) mean the same models.

        Raises:
            UserError: there is none of that name.
        """
        return find(name, self.list_runtimes())

    def get_runtime_packages(self, runtime: Runtime | str) -> dict[str, str]:
        """Installed Python packages of a runtime -> their versions."""
        name = runtime.name if isinstance(runtime, Runtime) else runtime
        return self.backend.get_runtime_packages(self.get_runtime(name))

    # --- jobs ---------------------------------------------------------------------------------------------------------

    @overload
    def train(
        self,
        runtime: str | Runtime | None = None,
        initializer: Initializer | None = None,
        trainer: AnyTrainer | None = None,
        options: Sequence[Option] | None = None,
        *,
        exporter: ModelExporter | None = None,
        dry_run: Literal[False] = False,
    ) -> str: ...

    @overload
    def train(
        self,
        runtime: str | Runtime | None = None,
        initializer: Initializer | None = None,
        trainer: AnyTrainer | None = None,
        options: Sequence[Option] | None = None,
        *,
        exporter: ModelExporter | None = None,
        dry_run: Literal[True],
    ) -> JobSpec: ...

    def train(
        self,
        runtime: str | Runtime | None = None,
        initializer: Initializer | None = None,
        trainer: AnyTrainer | None = None,
        options: Sequence[Option] | None = None,
        *,
        exporter: ModelExporter | None = None,
        dry_run: bool = False,
    ) -> str | JobSpec:
        """Submit a job.

        Args:
            runtime: its blueprint, or the name of one. Left out, `luthier` for a built-in trainer, which then needs an
                initializer for model and data, and `torch-distributed` for a function.
            initializer: what is fetched first; the runtime's own model and data set where it says nothing.
            trainer: what the nodes do; the runtime's own fine-tune when left out.
            options: name, labels, deadline, ...
            exporter: where the result goes; it stays in the job's workspace when left out.
            dry_run: check all that does not depend on where it runs, start nothing, and return what would run.

        Returns:
            the job's name; of a dry run its spec.

        Raises:
            UserError: all that is wrong, a sentence for each.
        """
        from luthier.jobs.asked import Asked
        from luthier.jobs.build import build

        spec = build(
            Asked(
                self._kind,
                self.list_runtimes(),
                runtime,
                initializer,
                trainer,
                () if options is None else options,
                exporter,
            )
        )
        if dry_run:
            return spec
        self.backend.submit(spec)
        return spec.name

    def list_jobs(self, runtime: Runtime | str | None = None) -> list[TrainJob]:
        """All jobs, or those of one runtime, the oldest first."""
        jobs = self.backend.list_jobs()
        if runtime is None:
            return jobs
        names = {runtime.name if isinstance(runtime, Runtime) else runtime}
        with contextlib.suppress(UserError):  # jobs outlive their runtime
            names.add(self.get_runtime(*names).name)
        return [job for job in jobs if job.runtime.name in names]

    def get_job(self, name: str) -> TrainJob:
        """One job as it is now.

        Raises:
            UserError: there is none of that name.
        """
        return self.backend.get_job(_asked(name))

    def get_job_logs(self, name: str, step: str = node_step(0), follow: bool | None = False) -> Iterator[str]:
        """Lines of a step's log; with `follow` each as soon as it is written, until the job has ended.

        Args:
            name: of the job.
            step: "node-0", "dataset-initializer", "model-initializer", "exporter".
            follow: whether to wait for more.

        Raises:
            UserError: there is no such job, or the job has no such step.
        """
        return self.backend.get_job_logs(_asked(name), step, follow=bool(follow))

    def get_job_events(self, name: str) -> list[Event]:
        """What has happened to a job, the oldest first."""
        return self.backend.get_job_events(_asked(name))

    def wait_for_job_status(
        self,
        name: str,
        status: Collection[str] = frozenset({COMPLETE}),
        timeout: float = 600,
        polling_interval: float = 2,
        callbacks: Sequence[Callable[[TrainJob], None]] | None = None,
    ) -> TrainJob:
        """Wait until a job is in one of some statuses.

        Args:
            name: of the job.
            status: Created, Running, Complete, Failed or Suspended; one, or several of them.
            timeout: seconds.
            polling_interval: seconds between two looks.
            callbacks: called with the job at every look.

        Raises:
            JobFailedError: it failed, and that was not waited for; ends with the last lines of the step that did.
            JobTimeoutError: the time is over.
            UserError: there is no such job, or no such status, or the job has ended otherwise.
        """
        asked = [status] if isinstance(status, str) or not isinstance(status, Collection) else list(status)
        odd = [one for one in asked if one not in STATUSES]
        wanted = set(asked) if not odd else set()
        if not wanted:
            told = ", ".join(map(str, odd)) or "nothing"
            raise ConfigError(f"{told} is not a status", where="status", remedy=f"there are {', '.join(STATUSES)}")
        for where, seconds in (("timeout", timeout), ("polling_interval", polling_interval)):
            if not isinstance(seconds, int | float) or not seconds > 0:
                raise ConfigError(f"must be more than 0, not {seconds!r}", where=where, remedy="give seconds")
        if polling_interval > timeout:
            raise ConfigError("must be more than 0, and no more than timeout", where="polling_interval")
        end = time.monotonic() + timeout
        while True:
            job = self.get_job(name)
            for callback in callbacks or ():
                callback(job)
            if job.status in wanted:
                return job
            if job.status == FAILED:
                raise self._failure(job)
            if job.status == COMPLETE:
                raise UserError(f"has ended as {COMPLETE}, and will not be {' or '.join(sorted(wanted))}", where=name)
            rest = end - time.monotonic()
            if rest <= 0:
                what = f"is {job.status} after {timeout:g} seconds, not {' or '.join(sorted(wanted))}"
                raise JobTimeoutError(what, where=name, remedy="wait longer, or look at its logs")
            time.sleep(min(polling_interval, rest))

    def delete_job(self, name: str) -> None:
        """End a job's processes, wait until they are gone, and forget it.

        Raises:
            UserError: there is none of that name.
        """
        self.backend.delete_job(_asked(name))

    def suspend_job(self, name: str) -> None:
        """Let a job stop and wait; a run saves a checkpoint first.

        Raises:
            UserError: there is none of that name, or it has ended.
        """
        self.backend.suspend_job(_asked(name))

    def resume_job(self, name: str) -> None:
        """Let a suspended job go on when its turn comes, a run from its last checkpoint.

        Raises:
            UserError: there is none of that name, or it has ended.
        """
        self.backend.resume_job(_asked(name))

    def _failure(self, job: TrainJob) -> JobFailedError:
        first, *rest = job.message.splitlines() or [""]
        what = f"has failed: {first}" if first else "has failed"
        failed = [step for step in job.steps if step.status == FAILED]
        lines: deque[str] = deque(maxlen=_LAST_LINES)
        if failed:  # the first of them: the others were ended because of it
            culprit = min(failed, key=lambda step: step.ended or datetime.max.replace(tzinfo=UTC))
            with contextlib.suppress(UserError):  # its log may be gone already
                lines.extend(self.get_job_logs(job.name, culprit.name))
        return JobFailedError("\n".join([what, *(lines or rest)]), where=job.name)

    @property
    def _kind(self) -> Any:
        return {LocalBackendConfig: "local", KubernetesBackendConfig: "kubernetes", SlurmBackendConfig: "slurm"}[
            type(self._config)
        ]


def _asked(name: object) -> str:
    """The name of a job, as somebody asks for it.

    Raises:
        UserError: no job can have it, on any backend.
    """
    if not isinstance(name, str) or len(name) > LONGEST_NAME or not NAME.fullmatch(name):
        raise unknown_job(shown(name))
    return name
