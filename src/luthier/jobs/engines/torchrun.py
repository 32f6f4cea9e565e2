"""torchrun, which leaves with the exit code of the process that failed first, and says so in one line.

torchrun itself leaves with 1 whatever happened, and a screenful of its own after the user's traceback.
"""

from __future__ import annotations

import gc
import logging
import os
import sys


def main() -> int:
    """Run torchrun with this process's arguments; returns what to leave with."""
    gc.disable()  # while a million objects are made that all stay
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    gc.enable()
    if "LOGLEVEL" not in os.environ:
        elastic = logging.getLogger("torch.distributed.elastic")
        elastic.propagate = False
        elastic.addHandler(logging.NullHandler())
    try:
        run(parse_args(sys.argv[1:]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(f"rank {rank} was ended by {failure.signal_name()}", file=sys.stderr)
            return 128 - failure.exitcode
        print(f"rank {rank} left with exit code {failure.exitcode}", file=sys.stderr)
        return failure.exitcode
    except SignalException as error:
        print(f"ended by {error.sigval.name}", file=sys.stderr)
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
