"""What a rank leaves in files for whoever started it: its answer, or why it failed.

A failure is written as torch's elastic agent reads it, so that torchrun's own report has it too, with our entry beside.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

OUTCOME = "LUTHIER_OUTCOME"
"""Set by our launcher: the file for the answer. Where it is set, a rank prints neither its answer nor why it failed."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

# What a rank says when another has gone: gloo's and NCCL's own messages, and those of the store.
_PEER_GONE = re.compile(r"gloo|nccl|Connection (closed|reset|refused)|Broken pipe|recvValue|sendBytes", re.IGNORECASE)

_failed_at: int | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank failed.

    Attributes:
        kind: class of the error, "InternalError", "Interrupted", or the name of the signal that ended the process.
        message: a sentence.
        code: what the command leaves with.
        details: where, what and remedy of a user's mistake.
        traceback: of an error that is nobody's mistake; else what is known, the end of the rank's log.
        at: nanoseconds since 1970 when it happened.
        peer_gone: it may well be another rank's failure that this one noticed.
        rank: which.
        ranks: of how many.
        log: of that rank.
        recorded: whether the rank itself said so; else it is what its launcher saw, and the message names the rank.
    """

    kind: str
    message: str
    code: int
    details: dict[str, Any] = field(default_factory=dict)
    traceback: str = ""
    at: int = 0
    peer_gone: bool = False
    rank: int = 0
    ranks: int = 1
    log: str = ""
    recorded: bool = False

    def report(self) -> str:
        """The traceback, and whose it is."""
        whose = f"rank {self.rank} of {self.ranks} failed; its log is {self.log}" if self.recorded else self.message
        return "\n".join(text for text in (self.traceback.rstrip("\n"), whose) if text)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the ranks of this machine ended.

    Attributes:
        code: what to leave with.
        text: rank 0's answer, as it is to be printed.
        failure: the first, when they failed.
    """

    code: int
    text: str = ""
    failure: Failure | None = None


def note_failure() -> None:
    """Remember when this rank failed: tidying up takes time, in which the others fail for want of it."""
    global _failed_at
    _failed_at = time.time_ns() if _failed_at is None else _failed_at


def tell_failure(failure: Failure) -> None:
    """Leave a failure for whoever started this rank; nothing happens where nobody did."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    at = _failed_at or time.time_ns()
    gone = bool(failure.traceback and _PEER_GONE.search(failure.message))
    entry = asdict(failure) | {"at": at, "peer_gone": gone, "recorded": True}
    said = {
        "message": f"{failure.kind}: {failure.message}",
        "extraInfo": {"py_callstack": failure.traceback or failure.message, "timestamp": str(at // 1_000_000_000)},
    }
    _write(Path(path), {"message": said, "luthier": entry})


def read_failure(record: Mapping[str, Any]) -> Failure | None:
    """The failure in an error file's content; None where something else wrote it."""
    entry = record.get("luthier")
    return Failure(**entry) if isinstance(entry, dict) else None


def tell_answer(code: int, text: str) -> None:
    """Leave an answer, and what to leave with. The process itself then ends with 0: the others are not to be ended."""
    _write(Path(os.environ[OUTCOME]), {"code": code, "text": text})


def read_answer(path: Path) -> Outcome:
    """What a rank has left; a rank that ended well without a word has nothing to say."""
    if not path.is_file():
        return Outcome(0)
    record = json.loads(path.read_text(encoding="utf-8"))
    return Outcome(record["code"], record["text"])


def _write(path: Path, record: Mapping[str, Any]) -> None:
    aside = path.with_name(f".{path.name}.writing")
    aside.write_text(json.dumps(record), encoding="utf-8")
    aside.replace(path)
