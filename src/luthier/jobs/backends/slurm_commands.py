"""Slurm's commands: sbatch, squeue, sacct, scancel, scontrol, and what they print."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from luthier.errors import UserError

_GONE = "Invalid job id"
_PENDING = "Job is pending execution"
"""What `scontrol requeuehold` says of a job that has not started."""
_SQUEUE = "%i|%T|%r"
_SACCT = "JobIDRaw,State,ExitCode"


@dataclass(frozen=True, slots=True)
class SlurmState:
    """What Slurm says of a job.

    Attributes:
        state: its word ("RUNNING", "OUT_OF_MEMORY").
        reason: why it waits ("Resources", "JobHeldUser"); "" where that is not known.
        exit_code: of the batch script, where it has ended; 128 and more for a signal.
    """

    state: str
    reason: str = ""
    exit_code: int | None = None


def submit(script: str, environment: Mapping[str, str], export: Iterable[str]) -> str:
    """Hand a script to sbatch; returns the job's id.

    Args:
        script: path.
        environment: of sbatch, whose variables the job may get.
        export: names of those that it does get.

    Raises:
        UserError: sbatch does not take it; says why in its words.
    """
    out = _run("sbatch", "--parsable", f"--export={','.join(export)}", script, environment=environment)
    return out.strip().partition(";")[0]  # the name of the cluster may follow


def queued(jobs: Iterable[str]) -> dict[str, SlurmState]:
    """What squeue says of jobs: those that wait or run, and for some minutes those that have ended."""
    wanted = list(jobs)
    if not wanted:
        return {}
    words = ("squeue", f"--jobs={','.join(wanted)}", "--states=all", "--noheader", f"--format={_SQUEUE}")
    try:
        out = _run(*words)
    except UserError as error:
        if _GONE not in error.what:  # of a single job that it has forgotten; of several it leaves those out
            raise
        out = ""
    rows = (line.split("|", 2) for line in out.splitlines() if line.count("|") >= 2)
    return {number: SlurmState(state, "" if reason == "None" else reason) for number, state, reason in rows}


def accounted(jobs: Iterable[str]) -> dict[str, SlurmState]:
    """What the accounting says of jobs; nothing where the cluster keeps none."""
    wanted = list(jobs)
    if not wanted:
        return {}
    words = ("sacct", f"--jobs={','.join(wanted)}", "--allocations", "--noheader", "--parsable2", f"--format={_SACCT}")
    try:
        out = _run(*words)
    except UserError as error:
        if "disabled" not in error.what and "not found" not in error.what:
            raise
        return {}
    found = {}
    for line in out.splitlines():
        number, state, code = line.split("|")
        left, _, by = code.partition(":")
        # "CANCELLED by 1000"
        found[number] = SlurmState(state.split()[0], exit_code=128 + int(by) if int(by or 0) else int(left or 0))
    return found


def cancel(job: str) -> None:
    """End a job; nothing where it has ended."""
    _tolerant("scancel", job)


def hold(job: str) -> None:
    """Stop a job and keep it from starting again; one that waits is kept from starting."""
    try:
        _run("scontrol", "requeuehold", job)
    except UserError as error:
        if _PENDING not in error.what:
            raise
        _run("scontrol", "hold", job)


def release(job: str) -> None:
    """Let a held job start when its turn comes."""
    _run("scontrol", "release", job)


def _tolerant(*words: str) -> None:
    try:
        _run(*words)
    except UserError as error:
        if _GONE not in error.what:
            raise


def _run(*words: str, environment: Mapping[str, str] | None = None) -> str:
    """What a command prints.

    Raises:
        UserError: it is not there, or fails.
    """
    try:
        done = subprocess.run(
            words, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
    except FileNotFoundError:
        remedy = "submit from a machine that has Slurm's commands, such as a login node"
        raise UserError("was not found", where=words[0], remedy=remedy) from None
    except PermissionError as error:
        raise UserError(f"cannot be run ({error.strerror})", where=words[0]) from None
    if done.returncode:
        lines = [re.sub(rf"^{words[0]}: (error: )?", "", line).strip() for line in done.stderr.splitlines()]
        said = "; ".join(line for line in lines if line) or f"left with exit code {done.returncode}"
        raise UserError(said, where=words[0])
    return done.stdout
