"""A rank that answers calls, for tests of what becomes of one that does not."""

from __future__ import annotations

import json
import os
import sys
import threading


def main(rank: int) -> None:
    for line in sys.stdin:
        call = json.loads(line)
        for_me = call["with"].get("rank", rank) == rank
        answer: dict[str, object] = {"answer": {"pid": os.getpid(), "rank": rank}}
        if call["call"] == "die" and for_me:
            os._exit(3)
        if call["call"] == "hang" and for_me:
            threading.Event().wait()
        if call["call"] == "raise" and for_me:
            answer = {"error": "ValueError: no", "trace": "a trace"}
        if call["call"] == "refuse" and for_me:
            answer = {"refused": "it has no heads"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[2]))
