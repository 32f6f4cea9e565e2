"""Jobs through Slurm. Each has a directory that all nodes see; Slurm's own books say where it stands.

HOME/slurm/NAME/
    job.json       the job without its secrets, and its number in Slurm
    node.json      what a node reads
    batch.sh       the script
    workspace/     working directory of every step: dataset/, model/, output/
    logs/STEP.txt  what a step wrote
    number.txt     its number in Slurm, in the script's words
    steps.txt      when each step started and ended, in the script's words
    nodes/NODE     how each node ended, in its own
    final.json     how it ended; Slurm forgets
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

from luthier.errors import UserError
from luthier.jobs.backends import slurm_commands as slurm
from luthier.jobs.backends.local_steps import clean_environment
from luthier.jobs.backends.slurm_commands import SlurmState
from luthier.jobs.backends.slurm_script import BATCH_LOG, NUMBER, SCRIPT_STEP, batch_script
from luthier.jobs.backends.slurm_step import NODE, VARIABLE
from luthier.jobs.backends.slurm_words import first_failure, names_of, read_node_words, read_words, steps_of, when
from luthier.jobs.files import lay, write
from luthier.jobs.logs import last_lines, tail
from luthier.jobs.messages import duplicate, has_ended, unknown_job, unknown_step
from luthier.jobs.node import JOB_FILE, pip_variables
from luthier.jobs.options import SlurmBackendConfig
from luthier.jobs.packages import installed
from luthier.jobs.progress import read_progress
from luthier.jobs.spec import DATASET_STEP, EXPORT_STEP, MODEL_STEP, OUTPUT, JobSpec
from luthier.jobs.store import FINAL, home_directory
from luthier.jobs.types import COMPLETE, CREATED, FAILED, RUNNING, SUSPENDED, Event, Runtime, TrainJob
from luthier.jobs.wire import described, node_job

JOB, NODE_JOB, SCRIPT, FINAL_WORD = "job.json", "node.json", "batch.sh", "final.json"

_PAUSE = 0.2
_PATIENCE = 600.0
"""Seconds for a cancelled job to leave."""
_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_STOPPED = {"SUSPENDED", "STOPPED"}
_HELD = {"JobHeldUser", "JobHeldAdmin"}
_WORKING = {"RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "RESIZING"}
_WHY = {
    "TIMEOUT": "ran into its time limit",
    "DEADLINE": "ran into its deadline",
    "OUT_OF_MEMORY": "took more memory than it had asked for",
    "NODE_FAIL": "lost a node",
    "BOOT_FAIL": "lost a node that did not start",
    "PREEMPTED": "was preempted, and not put back into the queue",
    "CANCELLED": "was cancelled",
    "REVOKED": "was taken to another cluster",
}
"""Slurm's words for an end -> ours."""


class SlurmBackend:
    """Runs jobs by sbatch.

    Args:
        config: where jobs are kept, and what sbatch is told.
    """

    def __init__(self, config: SlurmBackendConfig | None = None) -> None:
        self._config = config or SlurmBackendConfig()
        self._home = home_directory(self._config.home) / "slurm"
        try:
            self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            remedy = "set LUTHIER_HOME to a directory that you can write to and all nodes see"
            raise UserError(f"cannot be used ({error.strerror})", where=str(self._home), remedy=remedy) from None

    def list_runtimes(self) -> list[Runtime]:
        """All runtimes, by name."""
        from luthier.jobs.runtimes import builtin

        return builtin()

    def get_runtime_packages(self, runtime: Runtime) -> dict[str, str]:
        """Installed Python packages -> their versions: nodes run this very environment."""
        return installed()

    def submit(self, spec: JobSpec) -> None:
        """Take a job. It is durable when this returns.

        Raises:
            UserError: a job of that name is there already, or Slurm does not take it.
        """
        self._check(spec)
        directory = self._home / spec.name
        script = batch_script(spec, directory, self._config)
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            raise duplicate(spec.name) from None
        with ExitStack() as unless_taken:
            unless_taken.callback(shutil.rmtree, directory)
            for name in ("workspace", "logs"):
                (directory / name).mkdir(mode=0o700)
            record: dict[str, Any] = {"spec": described(spec), "created": time.time()}
            write(directory / JOB, json.dumps(record))
            write(directory / NODE_JOB, json.dumps(node_job(spec, with_files=False)))
            write(directory / SCRIPT, script)
            lay(spec.files, directory / "workspace")
            own = self._environment(spec, directory)
            names = sorted({*clean_environment(os.environ), *own})
            record["slurm"] = slurm.submit(str(directory / SCRIPT), {**os.environ, **own}, names)
            unless_taken.callback(slurm.cancel, record["slurm"])
            write(directory / JOB, json.dumps(record))
            unless_taken.pop_all()

    def list_jobs(self) -> list[TrainJob]:
        """All jobs, the oldest first."""
        names = sorted(path.name for path in self._home.iterdir() if (path / JOB).is_file())
        records = {name: self._record(name) for name in names}
        states = self._states(records)
        jobs = [self._train_job(name, record, states.get(name)) for name, record in records.items()]
        return sorted(jobs, key=lambda job: (job.creation_timestamp, job.name))

    def get_job(self, name: str) -> TrainJob:
        """One job as it is now.

        Raises:
            UserError: there is none of that name.
        """
        record = self._record(name)
        return self._train_job(name, record, self._states({name: record}).get(name))

    def get_job_logs(self, name: str, step: str, *, follow: bool) -> Iterator[str]:
        """Lines of a step's log, without line ends; with `follow` each as soon as it is written, until the job ends.

        Raises:
            UserError: there is no such job, or the job has no such step.
        """
        steps = names_of(self._record(name)["spec"])
        if step not in steps:
            raise unknown_step(name, step, steps)

        def over() -> bool:
            try:
                return not follow or self._status(name) in FINAL
            except UserError:  # it has been deleted meanwhile
                return True

        return tail(self._home / name / "logs" / f"{step}.txt", over)

    def get_job_events(self, name: str) -> list[Event]:
        """What has happened to a job, the oldest first."""
        record = self._record(name)
        number = record.get("slurm", "?")
        found = [
            Event("TrainJob", name, f"{name} has been taken as job {number}", "Submitted", when(record["created"]))
        ]
        for word in read_words(self._home / name):
            again = f" (restart {word.attempt})" if word.attempt else ""
            if word.step == SCRIPT_STEP:
                if word.code is None:
                    found.append(Event("TrainJob", name, f"its turn has come{again}", RUNNING, when(word.time)))
                continue
            ended = COMPLETE if word.code == 0 else FAILED, f"exit code {word.code}{again}"
            reason, message = ended if word.code is not None else ("Started", f"task of srun{again}")
            found.append(Event("Step", f"{name}-{word.step}", message, reason, when(word.time)))
        if (final := self._final(name)) is not None:
            found.append(Event("TrainJob", name, final["message"], final["status"], when(final["time"])))
        return found

    def delete_job(self, name: str) -> None:
        """End a job's processes, wait until they are gone, and forget it with its files.

        Raises:
            UserError: there is none of that name.
        """
        record = self._record(name)
        if self._final(name) is None and (number := record.get("slurm")):
            slurm.cancel(number)
            until = time.monotonic() + _PATIENCE
            while (state := slurm.queued([number]).get(number)) and state.state in _WORKING | _WAITING | _STOPPED:
                if time.monotonic() > until:
                    what = f"is still {state.state} as job {number} of Slurm, {_PATIENCE:g} seconds after scancel"
                    raise UserError(what, where=name, remedy="delete it again later; its nodes may be lost")
                time.sleep(_PAUSE)
        gone = self._home / f".{name}.{time.time_ns()}"
        (self._home / name).rename(gone)
        shutil.rmtree(gone)

    def suspend_job(self, name: str) -> None:
        """Let a job stop, and hold it back: its steps are asked to leave, so that a run saves a checkpoint first.

        Raises:
            UserError: there is none of that name, or it has ended.
        """
        slurm.hold(self._alive(name))

    def resume_job(self, name: str) -> None:
        """Let a held job start again when its turn comes; the run goes on from its last checkpoint.

        Raises:
            UserError: there is none of that name, or it has ended.
        """
        slurm.release(self._alive(name))

    def as_object(self, spec: JobSpec) -> str:
        """The script that sbatch would get."""
        self._check(spec)
        return batch_script(spec, self._home / spec.name, self._config)

    # --- submitting ---------------------------------------------------------------------------------------------------

    def _check(self, spec: JobSpec) -> None:
        remedy = "leave it out, or submit to Kubernetes"
        if spec.image is not None:
            raise UserError("jobs of Slurm run in no container", where="image", remedy=remedy)
        if spec.runtime_patches:
            raise UserError("jobs of Slurm have no pods to patch", where="runtime_patches", remedy=remedy)
        if spec.inherit_environment:
            raise UserError(
                "jobs of Slurm have an environment of their own", where="inherit_environment", remedy=remedy
            )

    def _environment(self, spec: JobSpec, directory: Path) -> dict[str, str]:
        """What sbatch sees: where the workspace is, and in one variable what each step sees besides."""
        steps: dict[str, dict[str, str]] = {}
        for name, transfer in ((DATASET_STEP, spec.dataset), (MODEL_STEP, spec.model), (EXPORT_STEP, spec.exporter)):
            if transfer is not None:
                steps[name] = {**transfer.env, **transfer.secrets}
        steps[NODE] = {
            **spec.env,
            "PET_NNODES": str(spec.num_nodes),
            "PET_NPROC_PER_NODE": str(spec.nproc_per_node),
        }
        if spec.function is not None:
            steps[NODE] |= pip_variables(spec.function.pip_index_urls)
        if spec.command is None:
            steps[NODE][JOB_FILE] = str(directory / NODE_JOB)
        return {
            "LUTHIER_WORKSPACE": str(directory / "workspace"),
            VARIABLE: json.dumps(steps),
            "PYTHONUNBUFFERED": "1",
        }

    # --- looking ------------------------------------------------------------------------------------------------------

    def _record(self, name: str) -> dict[str, Any]:
        if not name or "/" in name or name.startswith("."):
            raise unknown_job(name)
        try:
            record: dict[str, Any] = json.loads((self._home / name / JOB).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise unknown_job(name) from None
        number = self._home / name / NUMBER
        if "slurm" not in record and number.is_file():  # whoever submitted it could not note that any more
            record["slurm"] = number.read_text(encoding="utf-8")
        return record

    def _alive(self, name: str) -> str:
        """The number of a job that has not ended."""
        record = self._record(name)
        job = self._train_job(name, record, self._states({name: record}).get(name))
        if job.status in FINAL or "slurm" not in record:
            raise has_ended(name, job.status)
        return str(record["slurm"])

    def _final(self, name: str) -> dict[str, Any] | None:
        try:
            word: dict[str, Any] = json.loads((self._home / name / FINAL_WORD).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return word

    def _states(self, records: dict[str, dict[str, Any]]) -> dict[str, SlurmState]:
        """What Slurm says of jobs that have not been seen to end: what runs by squeue, the rest by the accounting."""
        numbers = {
            name: str(record["slurm"])
            for name, record in records.items()
            if "slurm" in record and self._final(name) is None
        }
        queued = slurm.queued(numbers.values())
        rest = slurm.accounted(number for number in numbers.values() if number not in queued)
        found = {name: queued.get(number) or rest.get(number) for name, number in numbers.items()}
        return {name: state for name, state in found.items() if state is not None}

    def _status(self, name: str) -> str:
        record = self._record(name)
        return self._course(name, record, self._states({name: record}).get(name))[0]

    def _course(self, name: str, record: dict[str, Any], state: SlurmState | None) -> tuple[str, str]:
        """Status and message of a job; an end is noted, since Slurm forgets."""
        if (final := self._final(name)) is not None:
            return final["status"], final["message"]
        if state is not None and state.state in _WORKING:
            return RUNNING, ""
        if state is not None and (state.state in _STOPPED or state.reason in _HELD):
            return SUSPENDED, "resume_job() lets it go on"
        if state is not None and state.state in _WAITING:
            return CREATED, f"waits in the queue: {state.reason}" if state.reason else ""
        if "slurm" not in record:
            return FAILED, "was never handed to Slurm: whoever submitted it was stopped meanwhile"
        status, message = self._end(name, record["spec"], state)
        write(self._home / name / FINAL_WORD, json.dumps({"status": status, "message": message, "time": time.time()}))
        return status, message

    def _end(self, name: str, spec: dict[str, Any], state: SlurmState | None) -> tuple[str, str]:
        directory = self._home / name
        words = read_words(directory)
        last = next((word.code for word in reversed(words) if word.step == SCRIPT_STEP), None)
        if state is None and last is None:
            return FAILED, "Slurm knows it no more, and its script left no word: it was cancelled, or its node was lost"
        if (state.state == "COMPLETED") if state is not None else last == 0:
            return COMPLETE, ""
        failed = first_failure(words, read_node_words(directory))
        if state is not None and state.state == "TIMEOUT" and (limit := spec["active_deadline_seconds"]) is not None:
            return FAILED, f"ran longer than its active_deadline_seconds of {limit}"
        if state is not None and state.state in _WHY:
            return FAILED, _WHY[state.state]
        if failed is None:
            said = last_lines(directory / "logs" / BATCH_LOG)
            code = last if last is not None else state.exit_code if state is not None else None
            return FAILED, f"its script left with exit code {code}" + (f":\n{said}" if said else "")
        step = "node-0" if failed.step == NODE else failed.step
        said = last_lines(directory / "logs" / f"{step}.txt")
        return FAILED, f"{step} left with exit code {failed.code}" + (f":\n{said}" if said else "")

    def _train_job(self, name: str, record: dict[str, Any], state: SlurmState | None) -> TrainJob:
        spec = record["spec"]
        status, message = self._course(name, record, state)
        directory = self._home / name
        progress = None
        if spec["command"] is None:
            progress = read_progress(directory / "workspace" / OUTPUT, spec["config"])
        return TrainJob(
            name=name,
            runtime=self._runtimes.get(spec["runtime"]) or Runtime(spec["runtime"]),
            steps=steps_of(name, spec, read_words(directory), read_node_words(directory), status),
            num_nodes=spec["num_nodes"],
            creation_timestamp=when(record["created"]),
            status=status,
            trainer_status=progress,
            message=message,
        )

    @cached_property
    def _runtimes(self) -> dict[str, Runtime]:
        return {runtime.name: runtime for runtime in self.list_runtimes()}
