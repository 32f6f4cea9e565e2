"""Start the processes of a run, or join them: `luthier train run.yaml --nproc 4`, torchrun, srun and Kubeflow alike."""

from luthier.launch.garbage import GarbageCollection, keep_modules
from luthier.launch.place import Place, Request, place, request
from luthier.launch.records import Failure, Outcome
from luthier.launch.world import (
    FIRST_STEP_TIMEOUT,
    STEP_TIMEOUT,
    any_rank,
    join,
    patient_group,
    restarted,
    set_timeout,
    unhurried,
)

__all__ = [
    "FIRST_STEP_TIMEOUT",
    "STEP_TIMEOUT",
    "Failure",
    "GarbageCollection",
    "Outcome",
    "Place",
    "Request",
    "any_rank",
    "join",
    "keep_modules",
    "patient_group",
    "place",
    "request",
    "restarted",
    "set_timeout",
    "unhurried",
]
