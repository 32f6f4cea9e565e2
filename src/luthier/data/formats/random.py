"""Format `random`: rows of random tokens, for measuring speed. No file is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from luthier.batch import Sample
from luthier.config.sections import SourceConfig
from luthier.data.formats.base import Row, Samples
from luthier.errors import ConfigError
from luthier.hf.render import Tokenizer

ROWS = 1000
_DEFAULTS: dict[str, Any] = {"minimum": 16, "maximum": 512, "masked": 0.0, "vocabulary": 0, "seed": 0}


def random_rows(source: SourceConfig) -> Iterator[dict[str, Any]]:
    """The numbers of the rows; what is in them follows from number and seed."""
    return ({"number": number} for number in range(source.rows or ROWS))


class RandomFormat:
    """Rows of `options.minimum` to `options.maximum` tokens; the first share `options.masked` of each is given only.

    `options.vocabulary` is the number of different tokens (all that the tokenizer has when left out), `options.seed`
    the seed.

    Raises:
        ConfigError: an option that there is not, or that makes no sense.
    """

    def __init__(self, tokenizer: Tokenizer, source: SourceConfig) -> None:
        unknown = sorted(set(source.options) - set(_DEFAULTS))
        if unknown:
            known = ", ".join(_DEFAULTS)
            raise ConfigError(f"there is no option {unknown[0]!r}", where="data.*.options", remedy=f"there are {known}")
        options = {**_DEFAULTS, **source.options}
        try:
            self._minimum, self._maximum = int(options["minimum"]), int(options["maximum"])
            self._masked, self._seed = float(options["masked"]), int(options["seed"])
            self._vocabulary = int(options["vocabulary"]) or len(tokenizer)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"an option is no number: {error}", where="data.*.options") from error
        if not 2 <= self._minimum <= self._maximum or not 0.0 <= self._masked < 1.0 or self._vocabulary < 1:
            remedy = "2 <= minimum <= maximum and 0 <= masked < 1 must hold"
            raise ConfigError("the lengths or the masked share make no sense", where="data.*.options", remedy=remedy)

    def __call__(self, row: Row) -> Samples:
        draw = np.random.default_rng([self._seed, row["number"]])
        length = int(draw.integers(self._minimum, self._maximum + 1))
        ids = draw.integers(0, self._vocabulary, size=length + 1)
        weights = np.ones(length + 1, dtype=np.float32)
        weights[: 1 + int(self._masked * length)] = 0.0
        return Sample.from_ids(ids, weights)
