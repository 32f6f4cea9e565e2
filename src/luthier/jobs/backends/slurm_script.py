"""The batch script of a job: options for sbatch, then each step by srun, with a word in a file of when it ran."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

from luthier.errors import UserError
from luthier.jobs.backends.slurm_step import NODE
from luthier.jobs.options import SlurmBackendConfig
from luthier.jobs.spec import DATASET_STEP, EXPORT_STEP, MODEL_STEP, JobSpec, amount_of, gpus_of, is_gpu, node_step

STEPS, BATCH_LOG, NUMBER = "steps.txt", "batch.txt", "number.txt"
SCRIPT_STEP = "script"
"""What the script calls itself in `STEPS`."""

_MEBI = 1 << 20

_HEAD = """
# Words in single quotes are meant as they are.
# shellcheck disable=SC2016

set -uo pipefail
# Whoever stops the job stops its steps; this script stays until they have saved and left.
trap : TERM INT

note() {
    printf '%s %s %s %s\\n' "$(date +%s.%N)" "${SLURM_RESTART_COUNT:-0}" "$1" "$2" >> STEPS
}

# NAME, then srun's options and the command
step() {
    local name=$1 code=0
    shift
    note "$name" started
    srun --job-name="$name" "$@" || code=$?
    note "$name" "$code"
    return "$code"
}

# A process id. A signal that comes meanwhile ends bash's own wait, and not the process.
await() {
    local code=0
    wait "$1" || code=$?
    while kill -0 "$1" 2> /dev/null; do
        code=0
        wait "$1" || code=$?
    done
    return "$code"
}

finish() {
    note script "$1"
    exit "$1"
}

"""


def batch_script(spec: JobSpec, directory: Path, config: SlurmBackendConfig) -> str:
    """The script.

    Args:
        spec: of the job. Nothing secret of it gets in.
        directory: of the job, seen by all nodes.
        config: of the backend.

    Raises:
        UserError: resources that Slurm has no word for.
    """
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options(spec, directory, config))]
    text = "\n".join(lines) + _HEAD.replace("STEPS", shlex.quote(str(directory / STEPS)))
    text += f"note {SCRIPT_STEP} started\n"
    text += f"printf '%s' \"$SLURM_JOB_ID\" > {shlex.quote(str(directory / NUMBER))}\n"
    text += f"cd {shlex.quote(str(directory / 'workspace'))} || finish 1\n"
    transfers = [(DATASET_STEP, "dataset", spec.dataset), (MODEL_STEP, "model", spec.model)]
    started = []
    for step, what, transfer in transfers:
        if transfer is not None:
            words = _words(step, directory, "--nodes=1", "--ntasks=1", "--overlap")
            text += f"{words} {_python('luthier.jobs.initializers', what, step=step)} &\n{what}=$!\n"
            started.append(what)
    text += "".join(f'await "${what}" || finish "$?"\n' for what in started)
    nodes = f"--nodes={spec.num_nodes}", f"--ntasks={spec.num_nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"
    command = (
        shlex.join(_start(NODE, spec.command)) if spec.command is not None else _python("luthier.jobs.node", step=NODE)
    )
    text += f'{_words(NODE, directory, *nodes)} {command} &\nnodes=$!\nawait "$nodes" || finish "$?"\n'
    if spec.exporter is not None:
        words = _words(EXPORT_STEP, directory, "--nodes=1", "--ntasks=1")
        text += f"{words} {_python('luthier.jobs.exporter', step=EXPORT_STEP)} &\nexporter=$!\n"
        text += 'await "$exporter" || finish "$?"\n'
    return text + "finish 0\n"


def options(spec: JobSpec, directory: Path, config: SlurmBackendConfig) -> list[str]:
    """sbatch's options of a job, one a line of the script."""
    found = [
        f"--job-name={spec.name}",
        f"--nodes={spec.num_nodes}",
        "--ntasks-per-node=1",
        # Preempted, or after its node was lost, it starts again, and the run goes on from its last checkpoint.
        "--requeue",
        "--open-mode=append",
        f'--output="{_pattern(directory / "logs" / BATCH_LOG)}"',
    ]
    resources = {name: value for name, value in (spec.resources_per_node or {}).items() if not is_gpu(name)}
    if (gpus := gpus_of(spec.resources_per_node)) is not None:
        found.append(f"--gpus-per-node={gpus}")
    if "cpu" in resources:
        found.append(f"--cpus-per-task={max(1, math.ceil(_amount(resources.pop('cpu'), 'cpu')))}")
    if "memory" in resources:
        found.append(f"--mem={max(1, int(_amount(resources.pop('memory'), 'memory') / _MEBI))}M")
    if resources:
        remedy = "give gpu, cpu and memory here, and what else the cluster has as sbatch_options"
        raise UserError("Slurm has no word for it", where=f"resources_per_node.{next(iter(resources))}", remedy=remedy)
    seconds = spec.active_deadline_seconds
    limit = config.time_limit if seconds is None else f"{seconds // 60}:{seconds % 60:02}"
    chosen = {"partition": config.partition, "account": config.account, "qos": config.qos, "time": limit}
    found += [f"--{name}={value}" for name, value in chosen.items() if value is not None]
    return [*found, *config.sbatch_options]


def log_of(step: str, directory: Path) -> Path:
    """Where a step's words are kept; "node" stands for all nodes, whose numbers srun fills in."""
    return directory / "logs" / (f"{step}.txt" if step != NODE else f"{node_step(0)[:-1]}%n.txt")


def _words(step: str, directory: Path, *options: str) -> str:
    log = log_of(step, directory)
    output = _pattern(log.parent) + "/" + log.name
    return shlex.join(["step", step, *options, f"--output={output}", "--open-mode=append"])


def _python(module: str, *words: str, step: str) -> str:
    return shlex.join(_start(step, [sys.executable, "-m", module, *words]))


def _start(step: str, command: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "luthier.jobs.backends.slurm_step", step, *command]


def _pattern(path: Path) -> str:
    """A path as Slurm's file name patterns have it."""
    return str(path).replace("%", "%%")


def _amount(quantity: str | float, of: str) -> Decimal:
    """What a quantity of Kubernetes is in whole units."""
    if (amount := amount_of(quantity)) is None:
        where, remedy = f"resources_per_node.{of}", 'write 8 or "64Gi"'
        raise UserError(f'"{quantity}" is no amount of {of}', where=where, remedy=remedy)
    return amount
