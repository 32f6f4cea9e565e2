"""What a model can read: ids of its vocabulary, and rows no longer than its table of positions where it has one.

Beyond either, torch says "index out of range in self", and a GPU stops the whole process.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from luthier.batch import Batch
from luthier.errors import DataError
from luthier.hf.anatomy import text_backbone
from luthier.hf.kinds import sees
from luthier.hf.rows.virtual import virtual_of

_POSITIONS = re.compile(r"(^|\.)(wpe|\w*position\w*)$")


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a model's input.

    Attributes:
        vocabulary: ids are below this.
        positions: rows are no longer than this; None where positions are computed and not looked up.
    """

    vocabulary: int
    positions: int | None

    def check(self, batch: Batch) -> None:
        """Refuse what the model cannot read.

        Args:
            batch: on the CPU, or it is not looked at, since a GPU would have to be waited for.

        Raises:
            DataError: an id is outside the vocabulary, or a document is too long; the row is named.
        """
        if batch.input_ids.device.type != "cpu":
            return
        read = batch.input_ids[0]
        # A target that is not trained on is never looked up, so it may be -100 or whatever its maker likes.
        targets, weights = (values[0].reshape(batch.tokens, -1) for values in (batch.targets, batch.weights))
        looked_up = targets.where(weights != 0, read[:, None])  # [T, targets a position]
        for ids in (read, looked_up.amax(1), looked_up.amin(1)):
            if int(ids.max()) >= self.vocabulary or int(ids.min()) < 0:
                outside = int(((ids >= self.vocabulary) | (ids < 0)).nonzero()[0])
                raise DataError(
                    f"token {int(ids[outside])} is not among the model's {self.vocabulary:,}",
                    where=_row(batch, outside),
                    remedy="use the model's own tokenizer, or a model whose embedding has been resized for this one",
                )
        if self.positions is not None and int(batch.position_ids.max()) >= self.positions:
            outside = int((batch.position_ids[0] >= self.positions).nonzero()[0])
            raise DataError(
                f"the row is longer than the {self.positions:,} positions that the model has",
                where=_row(batch, outside),
                remedy=f"set data.sequence_length to {self.positions} or less",
            )


def limits_of(model: Any) -> Limits:
    """The limits of a loaded model."""
    embedding = model.get_input_embeddings()
    reader = text_backbone(model) if sees(model.config) else model  # eyes have tables of their own
    tables = [
        module.num_embeddings - int(getattr(module, "offset", 0))  # OPT's first two rows stand for padding
        for name, module in reader.named_modules()
        if isinstance(module, nn.Embedding) and module is not embedding and _POSITIONS.search(name)
    ]
    vocabulary = int(getattr(embedding, "vocabulary", embedding.weight.shape[0]))  # rows of new tokens stand beside
    positions = min(tables, default=None)
    if positions is not None and (virtual := virtual_of(model)) is not None:
        positions -= virtual.length
    return Limits(vocabulary, positions)


def _row(batch: Batch, position: int) -> str | None:
    bounds = batch.cu_seqlens.tolist()
    number = sum(1 for end in bounds[1:] if end <= position)
    return batch.origins[number] or None if number < len(batch.origins) else None
