"""What a job is, once everything that can be checked has been: the same for every backend, plain data throughout.

A job is up to four kinds of steps over one workspace directory, which is `/workspace` in a pod and a directory of the
job's own elsewhere: initializers fill `dataset/` and `model/`, nodes train and write `output/`, the exporter takes the
result elsewhere. Every step's process has the workspace as its working directory, so paths in a config are relative
to it ("model", "dataset", "output") and mean the same everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal

DATASET, MODEL, ADAPTERS, OUTPUT = "dataset", "model", "adapters", "output"
"""Directories below the workspace, those of Kubeflow's mount paths."""
DATASET_STEP, MODEL_STEP, EXPORT_STEP = "dataset-initializer", "model-initializer", "exporter"

_QUANTITY = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,3}|)", re.ASCII)
_UNITS = {"n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("0.001"), "": Decimal(1)}
_UNITS |= {letter: Decimal(1000 ** (number + 1)) for number, letter in enumerate("kMGTPE")}
_UNITS |= {f"{letter}i": Decimal(1024 ** (number + 1)) for number, letter in enumerate("KMGTPE")}
"""Suffixes of Kubernetes' quantities -> what they stand for."""


def node_step(number: int) -> str:
    """The name of a node's step.

    >>> node_step(0)
    'node-0'
    """
    return f"node-{number}"


def gpus_of(resources: Mapping[str, Any] | None) -> int | None:
    """GPUs that resources of a node name; None where they do not say.

    >>> gpus_of({"gpu": "2", "cpu": 8}), gpus_of({"nvidia.com/gpu": 0}), gpus_of({"cpu": 8})
    (2, 0, None)
    """
    named = [int(value) for name, value in (resources or {}).items() if is_gpu(name)]
    return sum(named) if named else None


def is_gpu(resource: str) -> bool:
    """Whether a resource's name means GPUs: "gpu", or as a device plugin has it ("nvidia.com/gpu")."""
    return resource.lower().rpartition("/")[2] == "gpu"


def amount_of(quantity: object) -> Decimal | None:
    """What a quantity in Kubernetes' notation is in whole units; None where it is none, or less than 0.

    >>> amount_of("64Gi"), amount_of("500m"), amount_of(8), amount_of("64GB")
    (Decimal('68719476736'), Decimal('0.500'), Decimal('8'), None)
    """
    match = _QUANTITY.fullmatch(str(quantity)) if isinstance(quantity, int | float | str) else None
    if match is None or isinstance(quantity, bool):
        return None
    return Decimal(match[1]) * (_UNITS[match[2]] if match[2] in _UNITS else Decimal(10) ** int(match[2][1:]))


def step_names(dataset: object | None, model: object | None, num_nodes: int, exporter: object | None) -> list[str]:
    """Steps of a job in the order in which they begin; the first two begin together, and so do the nodes.

    Args:
        dataset, model, exporter: None where there is no such step.
        num_nodes: how many.
    """
    before = [(DATASET_STEP, dataset), (MODEL_STEP, model)]
    names = [name for name, transfer in before if transfer is not None]
    names += [node_step(number) for number in range(num_nodes)]
    return [*names, EXPORT_STEP] if exporter is not None else names


@dataclass(frozen=True, slots=True)
class Transfer:
    """A step that moves files: an initializer, or the exporter.

    Attributes:
        env: what it is told (`STORAGE_URI`, `IGNORE_PATTERNS`, `ENDPOINT`, ...), by Kubeflow's names.
        secrets: what it is told and nobody else may read (`ACCESS_TOKEN`, `SECRET_ACCESS_KEY`, ...). Never written to
            a spec, a log, a command line or a store; a backend hands them to the step's process alone.
    """

    env: Mapping[str, str]
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Function:
    """A training function of the user's own.

    Attributes:
        source: Python source of a module that defines it.
        name: of the function in it.
        args: keyword arguments, as JSON has them.
        packages: to install before.
        pip_index_urls: where from, the first one first; they may have a password in them.
    """

    source: str
    name: str
    args: Mapping[str, Any] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    pip_index_urls: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job as it would run; `TrainerClient.train(dry_run=True)` returns it.

    `config`, `function` or `command` says what the nodes do; without any the entry point of `image` does.

    Attributes:
        name: of the job; lower-case letters, digits and hyphens, at most 63, a letter first.
        runtime: name of the runtime it came from.
        framework: of that runtime ("luthier", "torch", ...).
        num_nodes: machines, or on one machine groups of processes that meet as machines do.
        nproc_per_node: processes of each; "auto" is one for each device.
        recipe: what the selection chose, for people ("lora_finetune_distributed").
        engine: which engine reads `config` ("luthier", "huggingface").
        config: a Luthier run as plain data, every value of its field's type; paths relative to the workspace.
        function: a training function.
        command: a program, and what comes first of its arguments.
        args: what follows `command`, or the image's own entry point (Kubernetes only).
        files: text files that are laid into the workspace before the nodes start, by relative path: a chat template, a
            data-set class.
        image: container image of the nodes; None for the runtime's own.
        env: of the nodes' processes, besides what the backend sets; its values are kept as secrets are.
        resources_per_node: by Kubernetes' names ({"gpu": 2, "cpu": 8, "memory": "64Gi"}).
        dataset, model: initializers; None where there is nothing to fetch.
        exporter: None where the result stays in `output/`.
        labels, annotations: of the job's object, where there is one.
        active_deadline_seconds: a job that runs longer fails.
        runtime_patches: of the TrainJob, as its CRD has them (Kubernetes only).
        inherit_environment: nodes see the submitter's environment too (local only).
    """

    name: str
    runtime: str
    framework: str
    num_nodes: int = 1
    nproc_per_node: int | Literal["auto"] = "auto"
    recipe: str | None = None
    engine: str | None = None
    config: Mapping[str, Any] | None = None
    function: Function | None = None
    command: tuple[str, ...] | None = None
    args: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    image: str | None = None
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    resources_per_node: Mapping[str, Any] | None = None
    dataset: Transfer | None = None
    model: Transfer | None = None
    exporter: Transfer | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    active_deadline_seconds: int | None = None
    runtime_patches: tuple[Mapping[str, Any], ...] = ()
    inherit_environment: bool = False

    def steps(self) -> list[str]:
        """Names of its steps, in the order in which they begin; the nodes begin together."""
        return step_names(self.dataset, self.model, self.num_nodes, self.exporter)
