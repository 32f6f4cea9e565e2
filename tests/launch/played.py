"""`luthier` with another recipe in the place of fine-tuning: `python -m tests.launch.played train ...`.

What it plays is in the environment variable PLAY, a function of this module that each rank calls once it has joined.
torch is imported by ranks alone, and nothing of the recipes, since importing costs more than all else here.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from luthier import launch
from luthier.cli.main import entrance
from luthier.errors import DataError

if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
    import torch
    import torch.distributed as dist

SUMMARY = {
    "steps": 1,
    "steps_total": 1,
    "skipped_steps": 0,
    "tokens": 0,
    "loss": None,
    "validation": None,
    "best": None,
}


def sums() -> dict[str, Any]:
    """The sum of all ranks, which only comes right when all have joined."""
    print("to standard output, which belongs to the answer")
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    sys.stderr.write(f"rank {dist.get_rank()} speaks\n")  # print's two writes may lie around another rank's
    return {"loss": total.item()}


def raises() -> dict[str, Any]:
    """Rank 1 fails while rank 0 waits for it."""
    if dist.get_rank() == 1:
        raise ZeroDivisionError("on purpose")
    dist.barrier()
    raise AssertionError("not reached")


def mistakes() -> dict[str, Any]:
    """Rank 1 finds what the user can mend."""
    if dist.get_rank() == 1:
        raise DataError("is empty", where="rows.jsonl", remedy="write something")
    dist.barrier()
    raise AssertionError("not reached")


def dies_once() -> dict[str, Any]:
    """Rank 1 is killed at the first attempt."""
    if not launch.restarted():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
    return {"loss": float(launch.any_rank(dist.get_rank()))}


def hangs() -> dict[str, Any]:
    """Ranks that hear a signal and do not stop."""
    signal.signal(signal.SIGINT, lambda *_: print("heard", file=sys.stderr, flush=True))
    launch.any_rank()
    if dist.get_rank() == 0:
        print("at work", file=sys.stderr, flush=True)
    while True:
        signal.pause()


def loses_a_node() -> dict[str, Any]:
    """The second of two machines is gone at once, launcher and all; the first goes on alone."""
    here = launch.place(os.environ)
    assert here is not None
    if here.ranks == 1 and not launch.restarted():  # the other is late: this one is started again when it comes
        signal.pause()
    if here.ranks == 2:
        dist.barrier()
        if here.rank == 1:
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
    return {"loss": float(here.ranks)}


def draws() -> dict[str, Any]:
    """Rank 0 draws its progress, if it has a terminal."""
    from luthier.report.progress import TERMINAL

    if dist.get_rank() == 0:
        for step in range(3):
            TERMINAL.draw(f"step {step}", force=True)
        TERMINAL.print("worth keeping")
        TERMINAL.draw("the last", force=True)
        TERMINAL.clear()
    return {"loss": float(sys.stderr.isatty())}


def stops() -> dict[str, Any]:
    """Says that all are at work; then they work until one of them has seen a signal."""
    from luthier.recipes.run_directory import Interruption

    with Interruption() as interruption, interruption.deferred():
        steps = launch.any_rank()
        if dist.get_rank() == 0:
            print("at work", file=sys.stderr, flush=True)
        while not (seen := launch.any_rank(interruption.signal or 0)):
            steps += 1
        same = launch.any_rank(steps) == -launch.any_rank(-steps)
    return {"interrupted": signal.Signals(seen).name, "loss": float(same)}


def train(config: Any, *, resume: str) -> dict[str, Any]:
    play = globals()[os.environ["PLAY"]]
    with launch.join(torch.device("cpu")):
        return {**SUMMARY, "interrupted": None, "export": "nothing", **play()}


if __name__ == "__main__":
    sys.modules["luthier.recipes.methods"] = sys.modules["__main__"]
    entrance()
