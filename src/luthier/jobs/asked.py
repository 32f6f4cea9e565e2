"""What `train` was asked for, and what turned out to be wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from luthier.errors import ConfigError
from luthier.jobs.options import Option
from luthier.jobs.trainers import AnyTrainer
from luthier.jobs.transfers import BackendKind
from luthier.jobs.types import Initializer, ModelExporter, Runtime
from luthier.jobs.validate import Errors


@dataclass
class Asked:
    """What `train` was asked for, with the backend and what it has.

    Attributes:
        runtimes: of the backend.
    """

    backend: BackendKind
    runtimes: Sequence[Runtime]
    runtime: str | Runtime | None = None
    initializer: Initializer | None = None
    trainer: AnyTrainer | None = None
    options: Sequence[Option] = ()
    exporter: ModelExporter | None = None
    errors: Errors = field(default_factory=list)

    def refuse(self, where: str, what: str, remedy: str | None = None) -> None:
        self.errors.append(ConfigError(what, where=where, remedy=remedy))
