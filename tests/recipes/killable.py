"""Runs one training config again and again in forked children and kills each after a while.

Forked, because importing torch costs more than the whole run:
`python -m tests.recipes.killable CONFIG KILLS SEED LONGEST_SECONDS`.
Every child starts as `luthier train CONFIG --resume auto` would. The last one is left alone.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

from luthier.config import load_config
from luthier.recipes.sft import train


def child(config: Path) -> int:
    """Start a run from its newest checkpoint in a new process; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        train(load_config(config))
        status = 0
    finally:
        os._exit(status)


def main() -> None:
    config, kills, seed, longest = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    chance = random.Random(seed)
    killed = 0
    while killed < kills:
        pid = child(config)
        signal.sigtimedwait([signal.SIGCHLD], chance.uniform(0.0, longest))  # at once when the child ends by itself
        done, status = os.waitpid(pid, os.WNOHANG)
        if not done:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            killed += 1
        elif os.waitstatus_to_exitcode(status):
            sys.exit(f"the run failed after {killed} kills")
    _, status = os.waitpid(child(config), 0)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
