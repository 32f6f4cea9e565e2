"""A job's spec as text: whole for a process that is to run it, without its secrets for all else."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from luthier.jobs.spec import Function, JobSpec, Transfer


def described(spec: JobSpec) -> dict[str, Any]:
    """A spec as it may be kept and shown: of secrets, environment variables and files the names alone, and no addresses
    of package indexes, which may have a password in them."""
    plain: dict[str, Any] = asdict(spec)
    for transfer in (plain["dataset"], plain["model"], plain["exporter"]):
        if transfer is not None:
            transfer["secrets"] = sorted(transfer["secrets"])
    plain["env"], plain["files"] = sorted(plain["env"]), sorted(plain["files"])
    if plain["function"] is not None:
        del plain["function"]["pip_index_urls"]
    return plain


def node_job(spec: JobSpec, *, with_files: bool) -> dict[str, Any]:
    """What `luthier.jobs.node` reads, without addresses of package indexes, which may have a password in them.

    Args:
        with_files: the node is to lay the job's files; its backend has not.
    """
    function = None
    if spec.function is not None:
        function = asdict(spec.function)
        del function["pip_index_urls"]
    job = {
        "engine": spec.engine,
        "config": dict(spec.config) if spec.config is not None else None,
        "function": function,
        "files": dict(spec.files) if with_files else None,
        "num_nodes": spec.num_nodes,
        "nproc_per_node": spec.nproc_per_node,
    }
    return {name: value for name, value in job.items() if value is not None}


def packed(spec: JobSpec) -> str:
    """A spec with all its secrets as JSON, to be handed to a process through a pipe."""
    return json.dumps(asdict(spec))


def unpacked(text: str) -> JobSpec:
    """The spec that `packed` was given."""
    plain = json.loads(text)
    for name in ("dataset", "model", "exporter"):
        plain[name] = Transfer(**plain[name]) if plain[name] is not None else None
    if plain["function"] is not None:
        lists = {name: tuple(plain["function"][name]) for name in ("packages", "pip_index_urls")}
        plain["function"] = Function(**plain["function"] | lists)
    plain["command"] = tuple(plain["command"]) if plain["command"] is not None else None
    plain["args"] = tuple(plain["args"])
    plain["runtime_patches"] = tuple(plain["runtime_patches"])
    return JobSpec(**plain)
