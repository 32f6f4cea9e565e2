"""What the server knows of sessions, models, samplers, checkpoints and operations, in memory; the store keeps it."""

from __future__ import annotations

import asyncio
import time
import types
import typing
from dataclasses import dataclass, field, fields
from typing import Any, Literal

Status = Literal["waiting", "done", "failed"]
Category = Literal["user", "server"]
_OF_NOW = {"of_now": True}
"""Marks fields that mean nothing to a server that is started again."""


def kept_fields(record: type) -> tuple[tuple[str, type, bool], ...]:
    """What the store keeps of a record: name, type (text for a literal) and whether it may be None, for each field."""
    hints = typing.get_type_hints(record)
    found = []
    for one in fields(record):
        if not one.metadata.get("of_now"):
            hint = hints[one.name]
            optional = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
            kind = next(part for part in typing.get_args(hint) if part is not type(None)) if optional else hint
            origin = typing.get_origin(kind)
            found.append((one.name, str if origin is Literal else origin or kind, optional))
    return tuple(found)


@dataclass(slots=True)
class Session:
    """A client's visit.

    Attributes:
        id: of it.
        owner: whose it is.
        created: seconds since the epoch.
        metadata: what the client said about itself: tags, user_metadata, display_name, project_id, sdk_version.
        ended: when the client closed it; None while it may go on.
        seen: monotonic time of the last sign of life.
        held: whether anything is kept ready for it; given up when it is silent for long.
    """

    id: str
    owner: str
    created: float
    metadata: dict[str, Any]
    ended: float | None = None
    seen: float = field(default_factory=time.monotonic, metadata=_OF_NOW)
    held: bool = field(default=True, metadata=_OF_NOW)


@dataclass(slots=True)
class Model:
    """A model in training; a training run in Tinker's words.

    Attributes:
        id: "SESSION:train:NUMBER".
        owner, session_id: whose it is.
        base_model: as the client named it.
        lora: fields of `LoraConfig`; None where it trains whole.
        seed: of everything random about it.
        created, used: seconds since the epoch, of the beginning and of the last request.
        metadata: the client's own.
        snapshot: number of the last operation that the snapshot on disk holds; -1 where there is none.
        passed: all operations below this number have ended, as far as is known without looking at them; some may have
            been struck out.
    """

    id: str
    owner: str
    session_id: str
    base_model: str
    lora: dict[str, Any] | None
    seed: int
    created: float
    used: float
    metadata: dict[str, Any] | None
    snapshot: int = -1
    passed: int = 0


@dataclass(slots=True)
class Sampler:
    """A sampling session.

    Attributes:
        id: "SESSION:sample:NUMBER".
        owner, session_id: whose it is.
        base_model: as the client named it.
        model_path: tinker path of its weights; None for the base, and for those without a name.
        directory: where its weights lie, in the server's own; None for the base and for live weights.
        model_id: whose live weights it has, else None.
        created: seconds since the epoch.
    """

    id: str
    owner: str
    session_id: str
    base_model: str
    model_path: str | None
    directory: str | None
    model_id: str | None
    created: float


Kind = Literal["weights", "sampler_weights", "external_weights"]


@dataclass(slots=True)
class Checkpoint:
    """Weights on disk with a name.

    Attributes:
        model_id, kind, name: as in tinker://MODEL/KIND/NAME.
        owner: whose it is.
        created: seconds since the epoch.
        size: bytes.
        expires: seconds since the epoch, or None.
        public: whether everyone may read it.
        metadata: the client's own.
    """

    model_id: str
    kind: Kind
    name: str
    owner: str
    created: float
    size: int
    expires: float | None
    public: bool
    metadata: dict[str, str] | None

    @property
    def path(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"

    def is_over(self, now: float) -> bool:
        """Whether it has expired, at a time in seconds since the epoch."""
        return self.expires is not None and self.expires < now


ENDED = asyncio.Event()
"""Set, for all operations that have ended: each one's own would be most of the memory that it takes until it is struck
out, ten minutes after its result was fetched."""
ENDED.set()


@dataclass(slots=True)
class Operation:
    """Something asked for, whose result is fetched later.

    Attributes:
        id: "LINE:NUMBER"; the same request sent again has the same one, and is not done twice.
        owner, session_id: who asked.
        line: model or sampler, whose operations are done in order of their numbers (those of a sampler in any).
        number: its place in the line; the beginning of a model is 0.
        kind: "create", "forward_backward", "forward", "optim_step", "save", "load", "save_sampler", "save_external",
            "sample"; "refused": a number whose request never came or could not be read.
        details: what is asked, but for the payload.
        digest: of all that was sent, to tell a repetition from another request under the same number.
        created: seconds since the epoch.
        status: of it.
        error, category: why it failed, and whose fault that is.
        media: media type of its result.
        finished: set when it is done or has failed.
        deaths: how many workers ended while they were at it.
        is_fetched: whether its result was handed out since the server began.
    """

    id: str
    owner: str
    session_id: str
    line: str
    number: int
    kind: str
    details: dict[str, Any]
    digest: str
    created: float
    status: Status = "waiting"
    error: str | None = None
    category: Category | None = None
    media: str = "application/json"
    finished: asyncio.Event = field(default_factory=asyncio.Event, metadata=_OF_NOW)
    deaths: int = field(default=0, metadata=_OF_NOW)
    is_fetched: bool = field(default=False, metadata=_OF_NOW)
