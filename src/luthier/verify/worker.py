"""A rank of a group that walks through models: started once, then given one call after another as lines of JSON."""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from luthier.errors import ConfigError
from luthier.verify.measure import Subject


def join(store: str, rank: int, ranks: int, device: str, patience: float) -> str:
    """Be one of the ranks of a group; a single one has no group.

    Returns:
        the device of this rank.
    """
    if device == "cuda":
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    if ranks > 1:
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        timeout = timedelta(seconds=patience)
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timeout)
    return device


class Worker:
    """What a rank does: `measure` makes a model ready, trains and exports it; `compare` looks at the export.

    Args:
        device: of this rank.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._subject: Subject | None = None

    def measure(
        self,
        subject: dict[str, Any],
        steps: list[Any],
        reference: dict[str, Any],
        gradients: str,
        max_gradient_norm: float,
        negligible: float,
        export: str | None,
    ) -> dict[str, Any]:
        """Train as the reference did and write an export.

        Args:
            subject: arguments of `Subject`.
            steps, reference, gradients, max_gradient_norm, negligible: of `Subject.train`.
            export: a directory to write; None writes nothing.
        """
        self._subject = None
        made = Subject(**subject, device=self._device)
        measured = made.train(
            steps, reference, Path(gradients), max_gradient_norm=max_gradient_norm, negligible=negligible
        )
        if export is not None:
            made.export(Path(export))
        self._subject = made
        return asdict(measured)

    def compare(self, reloaded: str, names: list[str]) -> dict[str, Any]:
        """Hold the model of the last `measure` against what plain Transformers read from its export."""
        assert self._subject is not None
        difference = self._subject.equals(Path(reloaded), names)
        self._subject = None
        return asdict(difference)

    def answer(self, call: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """What a call comes to: {"answer"}, or {"refused"} with the reason, or {"error", "trace"}."""
        try:
            return {"answer": getattr(self, call)(**arguments)}
        except ConfigError as error:  # what a model or a machine has against a config; other errors are faults
            return {"refused": error.what}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}


def serve(worker: Worker, requests: TextIO, answers: TextIO) -> None:
    """Answer calls, a line of JSON each: {"call": name, "with": arguments}."""
    for line in requests:
        request = json.loads(line)
        answers.write(json.dumps(worker.answer(request["call"], request["with"])) + "\n")
        answers.flush()


def main(store: str, rank: str, ranks: str, device: str, patience: str) -> None:
    """Join the group and serve until standard input is closed."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_num_threads(1)
    own = join(store, int(rank), int(ranks), device, float(patience))
    serve(Worker(own), sys.stdin, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
