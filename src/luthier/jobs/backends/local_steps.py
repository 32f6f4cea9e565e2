"""What the steps of a job are on this machine: command lines, environments, devices. Starts nothing."""

from __future__ import annotations

import random
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from luthier.errors import UserError
from luthier.jobs.node import JOB_FILE, pip_variables
from luthier.jobs.processes import MARK
from luthier.jobs.spec import DATASET_STEP, EXPORT_STEP, MODEL_STEP, JobSpec, Transfer, gpus_of, node_step

LOOPBACK = "127.0.0.1"
_DEVICES = "CUDA_VISIBLE_DEVICES"

_KEPT = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|TEMP|TMP|XDG_\w+"
    r"|(?i:https?|ftp|no|all)_(?i:proxy)|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|PIP_\w+"
    r"|HF_\w+|LUTHIER_CACHE|PYTHONPATH|LD_LIBRARY_PATH|DYLD_\w+|CUDA_\w+|NVIDIA_\w+|NCCL_\w+|GLOO_\w+|OMP_\w+|MKL_\w+"
)
"""Variables of whoever submits a job that its steps see too: where things are and how to reach the network."""

# Below the ports that systems hand out by themselves, above those of the usual services.
_PORTS = range(10_000, 30_000)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step that is about to start.

    Attributes:
        environment: all of it, secrets too.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The small part of an environment that every step sees."""
    return {name: value for name, value in environment.items() if _KEPT.fullmatch(name)}


def devices_of(spec: JobSpec, visible: Sequence[str]) -> list[list[str]]:
    """The GPUs that each node sees: as many as it asks for, else as it has processes, else an even share of all.

    Args:
        visible: names of this machine's GPUs, as CUDA_VISIBLE_DEVICES has them.

    Raises:
        UserError: there are fewer than asked for.
    """
    asked = gpus_of(spec.resources_per_node)
    if asked is not None:
        count = asked
    elif not visible:
        count = 0
    elif spec.nproc_per_node != "auto":
        count = spec.nproc_per_node if spec.num_nodes > 1 else len(visible)
    else:
        count = max(1, len(visible) // spec.num_nodes)
    if count * spec.num_nodes > len(visible):
        have = {0: "no GPU", 1: "one GPU"}.get(len(visible), f"{len(visible)} GPUs")
        raise UserError(
            f"{spec.num_nodes} x {count} GPUs are needed, and this machine has {have}",
            where="num_nodes" if asked is None else "resources_per_node.gpu",
            remedy='ask for fewer; resources_per_node={"gpu": 0} trains on the CPU',
        )
    return [list(visible[node * count : (node + 1) * count]) for node in range(spec.num_nodes)]


def visible_devices(environment: Mapping[str, str]) -> list[str]:
    """Names of the GPUs of this machine that an environment shows."""
    shown = environment.get(_DEVICES)
    if shown is not None:
        return [name.strip() for name in shown.split(",") if name.strip()]
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    listed = subprocess.run([program, "-L"], capture_output=True, text=True, check=False)
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0
    return [str(number) for number in range(count)]


def phases(
    spec: JobSpec,
    uid: str,
    directory: Path,
    environment: Mapping[str, str],
    devices: Sequence[Sequence[str]],
    port: int,
) -> list[list[StepPlan]]:
    """The steps of a job, those together that run at the same time.

    Args:
        uid: of the job, which marks its processes.
        directory: of the job.
        environment: that the nodes see, besides their own.
        devices: that each node sees.
        port: at which the nodes meet.
    """
    marks = {MARK: uid, "LUTHIER_WORKSPACE": str(directory / "workspace")}
    lines = {"PYTHONUNBUFFERED": "1"}  # so that a log has each line at once
    clean = {**clean_environment(environment), **lines, **marks}

    def transfer(name: str, what: Transfer | None, *words: str) -> list[StepPlan]:
        if what is None:
            return []
        return [StepPlan(name, (sys.executable, "-m", *words), {**clean, **what.env, **what.secrets})]

    before = transfer(DATASET_STEP, spec.dataset, "luthier.jobs.initializers", "dataset")
    before += transfer(MODEL_STEP, spec.model, "luthier.jobs.initializers", "model")
    nodes = []
    for number, own in enumerate(devices):
        processes = spec.nproc_per_node if spec.nproc_per_node != "auto" else max(1, len(own))
        variables = {
            **environment,
            **lines,
            **spec.env,
            **marks,
            "PET_NNODES": str(spec.num_nodes),
            "PET_NPROC_PER_NODE": str(processes),
            "PET_NODE_RANK": str(number),
            "PET_MASTER_ADDR": LOOPBACK,
            "PET_MASTER_PORT": str(port),
        }
        if own or gpus_of(spec.resources_per_node) is not None:
            variables[_DEVICES] = ",".join(own)
        if spec.function is not None:
            variables |= pip_variables(spec.function.pip_index_urls)
        if spec.command is None:
            variables[JOB_FILE] = str(directory / "job.json")
        command = spec.command or (sys.executable, "-m", "luthier.jobs.node")
        nodes.append(StepPlan(node_step(number), command, variables))
    after = transfer(EXPORT_STEP, spec.exporter, "luthier.jobs.exporter")
    return [phase for phase in (before, nodes, after) if phase]


def free_port() -> int:
    """A port of loopback that nobody uses now, and that the system does not give to a connection by itself."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
