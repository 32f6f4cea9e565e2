"""Strings that end a text, wherever the borders of its tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SLACK = 8
"""Tokens that a look at the end of a text goes back further than a string can reach: at the start of a piece some
tokenizers drop a space, and a character may be cut."""


class StopStrings:
    """Tells when one of some strings has been written.

    Args:
        strings: at least one, none empty.
        tokenizer: of Transformers; special tokens are read as their names.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        self._strings = tuple(strings)
        self._tokenizer = tokenizer
        # each token writes at least a byte
        self._window = max(len(string.encode()) for string in strings) + _SLACK

    def met(self, tokens: Sequence[int]) -> bool:
        """Whether one of the strings is there since the last token, which was asked about last."""
        text = self._tokenizer.decode(
            list(tokens[-self._window :]), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(string in text for string in self._strings)
