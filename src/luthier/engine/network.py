"""Network: a model that can be run, on one process or laid out over many, and what is known about running it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from luthier.batch import Batch
from luthier.errors import ModelError
from luthier.hf.rows.virtual import virtual_of
from luthier.parallel import context
from luthier.parallel.rules import check_pictures

if TYPE_CHECKING:
    from luthier.adapters import AdapterReport
    from luthier.engine.balance import Balance
    from luthier.engine.logprobs import Head
    from luthier.hf.limits import Limits
    from luthier.hf.source import ModelSource
    from luthier.parallel.mesh import Mesh
    from luthier.parallel.pipeline import Pipeline


@dataclass(kw_only=True)
class Network:
    """A model with its head; `engine.build` makes it."""

    model: Any
    """A Transformers model with adapters in place; on a layout, this rank's part of it."""
    head: Head
    """How hidden states become log-probabilities."""
    device: torch.device
    source: ModelSource
    """Where the weights came from."""
    mesh: Mesh | None = None
    """The groups of a run on several ranks; None in one process."""
    pipeline: Pipeline | None = None
    """Runs the stages of all ranks, of which the model here is some; None where every rank has all layers."""
    lora: AdapterReport | None = None
    """What was adapted, in the whole model; None in full fine-tuning."""
    row_multiple: int = 1
    """Microbatches are padded to a multiple of this many positions while they train."""
    packing_fault: str = ""
    """Why several documents cannot stand in one microbatch of this architecture; empty where they can."""
    prefix_fault: str | None = None
    """Why prompts that answers share are run with each of them; empty where they are run once, None: not asked yet."""
    picture_fault: str | None = None
    """Why several documents with pictures cannot stand in one microbatch; empty where they can, None until asked."""
    limits: Limits | None = None
    """Which ids and how long rows the model can read; None = not known, so not checked."""
    balance: Balance | None = None
    """Keeps experts equally busy; None where nothing is to be done about it."""
    parameters: int = 0
    """Of the whole model, tied ones once."""

    outline: Any = None
    """The whole model, as it was before it was laid out: on meta, or in one process the model itself."""

    def __post_init__(self) -> None:
        self.outline = self.outline if self.outline is not None else self.model

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that speaks and writes for all."""
        return self.mesh is None or self.mesh.rank == 0


def held(network: Network, row: Batch) -> Batch:
    """What this rank runs of a row: its part under context parallelism, else the row."""
    if network.mesh is None or network.mesh.cp is None:
        return row
    return context.cut(row, network.mesh.cp)


def whole(network: Network, values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[T, ...] of a batch from what was found for the part of its padded row that `held` gave; all ranks call it.

    Differentiable in this rank's part alone.
    """
    if network.mesh is None or network.mesh.cp is None:
        return values[: batch.tokens].clone()  # FSDP wants no views from what it calls
    return context.join(values, network.mesh.cp, batch.tokens)


def counted(row: Batch) -> torch.Tensor:
    """int64 [n]: positions of a row whose weight is not 0, of several targets at least one's."""
    return (row.weights[0] != 0).reshape(row.tokens, -1).any(1).nonzero().squeeze(-1)


def summed(network: Network, value: torch.Tensor) -> torch.Tensor:
    """The sum of a number over the parts of a row; all ranks call it. Differentiable in this rank's part alone."""
    if network.mesh is None or network.mesh.cp is None:
        return value
    return context.total(value, network.mesh.cp)


def require_readable(network: Network, batch: Batch) -> None:
    """Refuse a batch that the model cannot read, or whose documents it would mix: wrong numbers without a word.

    Raises:
        ModelError: it holds more than one document and `network.packing_fault` says why that cannot be, or images where
            virtual tokens are.
        ConfigError: it holds images, which the layout cannot cut.
        DataError: of a token or a length that the model does not have (`hf.limits`).
    """
    if network.limits is not None:
        network.limits.check(batch)
    if batch.sights is not None:
        if network.mesh is not None:
            check_pictures(network.mesh.layout)
        if virtual_of(network.model) is not None:
            what = "tokens before a document move it from where its images are expected"
            raise ModelError(what, where="batch", remedy="run documents with images without virtual tokens")
    fault = network.packing_fault or (network.picture_fault if batch.sights is not None else "")
    if fault and batch.documents > 1:
        raise ModelError(
            f"{type(network.model).__name__} cannot run {batch.documents} documents in one batch: {fault}",
            where="batch",
            remedy="give each document a batch of its own (luthier.pack does)",
        )
