"""Format `text`: a column of text, every token trained on, an EOS at the end."""

from __future__ import annotations

from luthier.batch import Sample
from luthier.config.sections import SourceConfig
from luthier.data.formats.base import Row, Samples, closed, text_of
from luthier.errors import ConfigError
from luthier.hf.render import Tokenizer
from luthier.hf.vision.sight import encoder_of


class TextFormat:
    """Text as it is, with the BOS that the tokenizer adds by itself (if any) and one EOS, which is trained on too;
    `options.eos: false` leaves the EOS out.

    Raises:
        ConfigError: the option is neither true nor false.
    """

    def __init__(self, tokenizer: Tokenizer, source: SourceConfig) -> None:
        self._encoder = encoder_of(tokenizer)
        self._column = source.column or "text"
        self._ends = source.options.get("eos", True)
        if not isinstance(self._ends, bool):
            raise ConfigError(f"{self._ends!r} is neither true nor false", where="data.*.options.eos")
        self.stop_ids = set() if self._encoder.eos is None else {self._encoder.eos}

    def __call__(self, row: Row) -> Samples:
        text = text_of(row, self._column)
        if text is None:
            return None
        ids = self._encoder.encode_document(text)
        ids = closed(self._encoder, ids) if self._ends else ids
        return Sample.from_ids(ids, [1.0] * len(ids)) if len(ids) > 1 else None
