"""Text to ids for rows of data: what BOS and EOS do, which ids are special, and a cache for texts that share parts.

Deriving which tokens train renders the same conversation many times, each a little longer. Special tokens cut a text
before anything else happens to it, so each piece between them is encoded once and then looked up.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from luthier.hf.tokenizer import encode_text

Tokenizer = PreTrainedTokenizerBase
"""Name for the type in rooms that do not import Transformers."""

_PIECES, _LONGEST = 4096, 20_000
_PROBES = ("assistant\nOne, two:\n three 45", " a\n\n", "Ab cd", "  x")


class Encoder:
    """A tokenizer as rows need it.

    Attributes:
        tokenizer: the tokenizer itself.
        bos: ids that the tokenizer puts before plain text by itself: one BOS, or nothing.
        eos: id that ends a text, or None.
        special: ids of control tokens, which no ordinary text encodes to.
        added: ids of every token beside the vocabulary proper, control tokens among them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        bare = self.encode("a")
        framed = encode_text(tokenizer, "a")
        self.bos: list[int] = framed[: len(framed) - len(bare)]
        eos = tokenizer.eos_token_id
        self.eos: int | None = eos if isinstance(eos, int) else None
        added = tokenizer.added_tokens_decoder
        self.special = frozenset(tokenizer.all_special_ids) | {index for index, token in added.items() if token.special}
        self.added = self.special | set(added)
        self._pieces: OrderedDict[str, list[int]] = OrderedDict()
        cutting = [
            str(token)
            for token in added.values()
            if token.special and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
        ]
        self._ids = {text: self.encode(text) for text in cutting}
        pattern = "|".join(re.escape(text) for text in sorted(cutting, key=len, reverse=True))
        self._special_text = re.compile(pattern or r"(?!)")
        self._cut: re.Pattern[str] | None = re.compile(f"({pattern})") if pattern and self._can_cut(cutting) else None

    def encode(self, text: str) -> list[int]:
        """Ids of a text, nothing added.

        Raises:
            UnicodeEncodeError: the text holds half a surrogate pair.
        """
        text.encode("utf-8")
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def encode_document(self, text: str) -> list[int]:
        """Ids of a text that stands alone: with the BOS that the tokenizer adds, if any, once."""
        ids = self.encode(text)
        return ids if ids[: len(self.bos)] == self.bos else self.bos + ids

    def encode_rendered(self, text: str) -> list[int]:
        """What `encode` gives, quicker for texts that share their pieces with texts seen before."""
        return self.encode(text) if self._cut is None else self._by_pieces(text)

    @property
    def sees(self) -> bool:
        """Whether texts may have pictures in them (`hf.vision.sight`)."""
        return False

    def shaped(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Messages as the chat template takes them."""
        return messages

    def texts(self, content: str) -> list[str]:
        """What a message says in words."""
        return [content]

    def is_blank(self, token: int) -> bool:
        """Whether a token is nothing but white space."""
        return token not in self.special and not self.token_text(token).strip()

    def token_text(self, token: int) -> str:
        """The text of one token, control tokens as they are written."""
        return str(self.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def first_special(self, text: str) -> str:
        """The first control token in a text as it is written there; an empty text if there is none."""
        found = self._special_text.search(text)
        return found.group() if found else ""

    def _by_pieces(self, text: str) -> list[int]:
        assert self._cut is not None
        ids: list[int] = []
        for index, piece in enumerate(self._cut.split(text)):
            if not piece:
                continue
            part = self._ids[piece] if index % 2 else self._pieces.get(piece)
            if part is None:
                part = self.encode(piece)
                self._keep(piece, part)
            ids += part
        return ids

    def _can_cut(self, cutting: list[str]) -> bool:
        # tokenizers that treat the first word of a text in a way of its own cannot be cut
        if any(len(ids) != 1 for ids in self._ids.values()):
            return False
        mark = cutting[0]
        parts = [self.encode(probe) for probe in _PROBES]
        joined = [token for part in parts for token in (*self._ids[mark], *part)]
        return self.encode("".join(mark + probe for probe in _PROBES)) == joined

    def _keep(self, piece: str, ids: list[int]) -> None:
        if len(piece) > _LONGEST:
            return
        self._pieces[piece] = ids
        if len(self._pieces) > _PIECES:
            self._pieces.popitem(last=False)
