"""What srun starts: a step of a job with the environment that is its own.

    python -m luthier.jobs.backends.slurm_step STEP COMMAND...

sbatch hands environments on in one variable, secrets among them, so that they are in no script and on no command line.
A step takes out its part, and no other step sees it. Nodes are told where they meet, as Kubeflow tells them; srun's
own word that each task is a rank is taken away, since a task here starts the ranks of its node.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from luthier.jobs.node import Children
from luthier.jobs.spec import node_step
from luthier.launch.place import first_node

VARIABLE = "LUTHIER_STEPS"
"""JSON: step -> variables; all nodes are "node"."""
NODE, NODES = "node", "nodes"
"""All nodes as a step; a directory beside the workspace where each says how it ended."""

_FIRST_PORT, _PORTS = 10_000, 20_000
_OF_RANKS = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_NPROCS")


def environment_of(step: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a step's process.

    Args:
        step: "node" for any node.
        environment: as srun made it.
    """
    own = dict(environment)
    own |= json.loads(own.pop(VARIABLE, "{}")).get(step, {})
    if step != NODE:
        return own
    job = int(own["SLURM_JOB_ID"])
    own["PET_NODE_RANK"] = own.get("SLURM_NODEID", "0")
    own["PET_MASTER_ADDR"] = first_node(own.get("SLURM_JOB_NODELIST", "")) or "localhost"
    own["PET_MASTER_PORT"] = str(_FIRST_PORT + job % _PORTS)
    if own.get("PET_NPROC_PER_NODE") == "auto":
        own["PET_NPROC_PER_NODE"] = own.get("SLURM_GPUS_ON_NODE", "1")
    for name in _OF_RANKS:
        own.pop(name, None)
    return own


def main() -> None:
    step, *command = sys.argv[1:]
    environment = environment_of(step, os.environ)
    if step != NODE:
        os.execvpe(command[0], command, environment)
    children = Children()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, children.pass_on)
    code = children.run(command, environment)
    note(environment, code)
    sys.exit(code)


def note(environment: Mapping[str, str], code: int) -> None:
    """Say how a node ended, as the script does of steps; srun gives one exit code for all nodes."""
    name = node_step(int(environment["PET_NODE_RANK"]))
    place = Path(environment["LUTHIER_WORKSPACE"]).parent / NODES
    place.mkdir(exist_ok=True)
    with open(place / name, "a", encoding="utf-8") as file:
        file.write(f"{time.time()} {environment.get('SLURM_RESTART_COUNT', '0')} {name} {code}\n")


if __name__ == "__main__":
    main()
