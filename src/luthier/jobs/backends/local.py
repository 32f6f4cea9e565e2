"""Jobs as processes of this machine. They outlive whoever submits them; any process of this user sees all of them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from luthier.errors import UserError
from luthier.jobs.backends.local_steps import clean_environment, devices_of, phases, visible_devices
from luthier.jobs.backends.local_upkeep import LOCK, SUPERVISOR_LOG, remove, settle
from luthier.jobs.locks import take
from luthier.jobs.logs import last_lines, tail
from luthier.jobs.messages import has_ended, unknown_job, unknown_step
from luthier.jobs.options import LocalBackendConfig
from luthier.jobs.packages import installed
from luthier.jobs.progress import read_progress
from luthier.jobs.spec import DATASET_STEP, EXPORT_STEP, MODEL_STEP, OUTPUT, JobSpec
from luthier.jobs.store import FINAL, RUN, SUSPEND, JobRecord, JobStore, StepRecord, home_directory
from luthier.jobs.types import CREATED, SUSPENDED, UNKNOWN, Event, Runtime, Step, TrainJob
from luthier.jobs.wire import packed

_SECRET = "(secret)"
_OF_SUPERVISOR = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH")
"""All that a supervisor itself sees: an environment can be read from outside."""


class LocalBackend:
    """Runs jobs on this machine.

    Args:
        config: where jobs are kept, and how many run at a time.

    Raises:
        UserError: the jobs cannot be kept there.
    """

    def __init__(self, config: LocalBackendConfig | None = None) -> None:
        config = config or LocalBackendConfig()
        if config.max_running_jobs < 1:
            raise UserError(f"{config.max_running_jobs} is less than 1", where="max_running_jobs", remedy="let one run")
        self._limit = config.max_running_jobs
        self._store = JobStore(home_directory(config.home))

    def list_runtimes(self) -> list[Runtime]:
        """All runtimes, by name."""
        return deepcopy(self._runtimes)

    def get_runtime_packages(self, runtime: Runtime) -> dict[str, str]:
        """Installed Python packages -> their versions: on this machine those of this very environment."""
        return installed()

    def submit(self, spec: JobSpec) -> None:
        """Take a job. It is durable when this returns.

        Raises:
            UserError: a job of that name is there already, or it needs what one machine does not have.
        """
        visible = self._checked(spec)
        uid = secrets.token_hex(5)
        directory = self._store.home / "jobs" / f"{spec.name}-{uid}"
        for part in (directory, directory / "workspace", directory / "logs"):
            part.mkdir(mode=0o700)
        # Held from before the job is there until the supervisor ends: whoever finds it free knows that nobody minds it.
        lock = take(directory / LOCK, wait=False)
        assert lock is not None
        with contextlib.ExitStack() as left:
            left.callback(os.close, lock)
            unless_kept = left.enter_context(contextlib.ExitStack())
            unless_kept.callback(shutil.rmtree, directory)
            self._store.add(uid, spec, len(devices_of(spec, visible)[0]))
            unless_kept.pop_all()
            if not self._start(spec, uid, directory, visible, lock):
                said = last_lines(directory / SUPERVISOR_LOG, 1)
                self._store.remove(uid)
                shutil.rmtree(directory)
                raise UserError(f"its supervisor could not be started: {said}", where=spec.name)

    def list_jobs(self) -> list[TrainJob]:
        """All jobs, the oldest first."""
        settled = [settle(self._store, job) for job in self._store.list()]
        return [self._train_job(job) for job in settled if job is not None]

    def get_job(self, name: str) -> TrainJob:
        """One job as it is now.

        Raises:
            UserError: there is none of that name.
        """
        return self._train_job(self._find(name))

    def get_job_logs(self, name: str, step: str, *, follow: bool) -> Iterator[str]:
        """Lines of a step's log, without line ends; with `follow` each as soon as it is written, until the job has
        ended.

        Raises:
            UserError: there is no such job, or the job has no such step.
        """
        job = self._find(name)
        steps = [known.name for known in job.steps]
        if step not in steps:
            raise unknown_step(name, step, steps)
        return self._lines(job, self._store.directory(job) / "logs" / f"{step}.txt", follow)

    def get_job_events(self, name: str) -> list[Event]:
        """What has happened to a job, the oldest first."""
        return [
            Event(
                involved_object_kind="TrainJob" if event.step is None else "Step",
                involved_object_name=name if event.step is None else f"{name}-{event.step}",
                message=event.message,
                reason=event.reason,
                event_time=_when(event.time),
            )
            for event in self._store.events(self._find(name).uid)
        ]

    def delete_job(self, name: str) -> None:
        """End a job's processes, wait until they are gone, and forget it with its files.

        Raises:
            UserError: there is none of that name.
        """
        remove(self._store, self._find(name))

    def suspend_job(self, name: str) -> None:
        """Let a job stop: its processes are asked to, so that a run saves a checkpoint first. It keeps its secrets.

        Raises:
            UserError: there is none of that name, or it has ended.
        """
        self._wish(name, SUSPEND)

    def resume_job(self, name: str) -> None:
        """Let a suspended job go on when its turn comes: steps that were done stay done, nodes start again.

        Raises:
            UserError: there is none of that name, or it has ended.
        """
        self._wish(name, RUN)

    def as_object(self, spec: JobSpec) -> list[dict[str, Any]]:
        """The steps of a job: their names, command lines, and what their environments have besides this one's."""
        visible = self._checked(spec)
        directory = self._store.home / "jobs" / f"{spec.name}-UID"
        plans = phases(spec, "UID", directory, {}, devices_of(spec, visible), 0)
        transfers = {DATASET_STEP: spec.dataset, MODEL_STEP: spec.model, EXPORT_STEP: spec.exporter}
        shown = []
        for plan in (plan for phase in plans for plan in phase):
            transfer = transfers.get(plan.name)
            hidden = transfer.secrets if transfer is not None else {*spec.env, "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"}
            environment = {name: _SECRET if name in hidden else value for name, value in plan.environment.items()}
            shown.append({"step": plan.name, "command": list(plan.command), "environment": environment})
        return shown

    @cached_property
    def _runtimes(self) -> list[Runtime]:
        from luthier.jobs.runtimes import builtin

        visible = visible_devices(os.environ)
        runtimes = builtin("gpu", len(visible)) if visible else builtin("cpu", 1)
        for runtime in runtimes:
            if runtime.trainer is not None:
                runtime.trainer.image = ""  # no containers run here
        return runtimes

    # --- submitting ---------------------------------------------------------------------------------------------------

    def _checked(self, spec: JobSpec) -> list[str]:
        """The GPUs that this machine has for a job, which is refused where it needs what one machine does not have."""
        remedy = "leave it out, or submit to Kubernetes"
        if spec.image is not None:
            raise UserError("jobs of this machine run in no container", where="image", remedy=remedy)
        if spec.runtime_patches:
            raise UserError("jobs of this machine have no pods to patch", where="runtime_patches", remedy=remedy)
        visible = visible_devices({**os.environ, **spec.env})
        devices_of(spec, visible)
        return visible

    def _start(self, spec: JobSpec, uid: str, directory: Path, visible: list[str], lock: int) -> bool:
        """Start the supervisor and hand the job over; whether it has been taken."""
        environment = dict(os.environ) if spec.inherit_environment else clean_environment(os.environ)
        given = {"spec": packed(spec), "environment": environment, "devices": visible}
        words = [str(self._store.home), uid, str(lock), str(self._limit)]
        with (directory / SUPERVISOR_LOG).open("ab") as out:
            starter = subprocess.Popen(
                [sys.executable, "-m", "luthier.jobs.backends.local_supervisor", *words],
                env={name: os.environ[name] for name in _OF_SUPERVISOR if name in os.environ},
                cwd=directory,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[lock],
            )
        starter.communicate(json.dumps(given).encode())
        return starter.returncode == 0

    # --- looking ------------------------------------------------------------------------------------------------------

    def _find(self, name: str) -> JobRecord:
        job = self._store.find(name)
        job = settle(self._store, job) if job is not None else None
        if job is None:
            raise unknown_job(name)
        return job

    def _wish(self, name: str, wish: str) -> None:
        job = self._find(name)
        if job.status in FINAL:
            raise has_ended(name, job.status)
        self._store.wish(job.uid, wish)

    def _lines(self, job: JobRecord, path: Path, follow: bool) -> Iterator[str]:
        def over() -> bool:
            if not follow:
                return True
            now = self._store.get(job.uid)
            now = settle(self._store, now) if now is not None else None
            return now is None or now.status in FINAL

        return tail(path, over)

    def _train_job(self, job: JobRecord) -> TrainJob:
        spec, message = job.spec, job.message
        if job.status == CREATED:
            running, waiting = self._store.ahead(job)
            message = f"waits for its turn: {len(running)} running, {len(waiting)} waiting before it"
        elif job.status == SUSPENDED:
            message = "resume_job() lets it go on"
        progress = None
        if spec["command"] is None:
            run = self._store.directory(job) / "workspace" / OUTPUT
            progress = read_progress(run, spec["config"])
        return TrainJob(
            name=job.name,
            runtime=self._runtime(spec["runtime"]),
            steps=[_step(job, step, spec) for step in job.steps],
            num_nodes=spec["num_nodes"],
            creation_timestamp=_when(job.created),
            status=job.status,
            trainer_status=progress,
            message=message,
        )

    def _runtime(self, name: str) -> Runtime:
        return next((deepcopy(runtime) for runtime in self._runtimes if runtime.name == name), Runtime(name))


def _step(job: JobRecord, step: StepRecord, spec: dict[str, Any]) -> Step:
    is_node = step.name.startswith("node-")
    processes = spec["nproc_per_node"] if spec["nproc_per_node"] != "auto" else max(1, step.devices)
    return Step(
        name=step.name,
        status=step.status,
        pod_name=f"{job.name}-{step.name}",
        device=("gpu" if step.devices else "cpu") if is_node else UNKNOWN,
        device_count=str(step.devices or processes) if is_node else UNKNOWN,
        started=_when(step.started) if step.started is not None else None,
        ended=_when(step.ended) if step.ended is not None else None,
        exit_code=step.exit_code,
    )


def _when(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
