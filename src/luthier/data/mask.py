"""Which tokens of a conversation train, and why.

The template's own generation tags win. Without them the trained span of every assistant turn is derived: it begins
where the full rendering and the rendering of what comes before the turn, with the generation prompt, part (token by
token, since tokens merge across borders), and it ends with the token that ends the turn. That token is the last thing
the model has to say, so it is always trained on, also where only the beginning of the next turn ends this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from luthier.data.report import BadRow
from luthier.errors import DataError, UserError
from luthier.hf.render import Encoder
from luthier.hf.tokenizer import has_generation_tags, render_text, render_with_mask, require_template

Message = Mapping[str, Any]
_SENTINEL = "Zq7x"
_REMEDY = "use a template with generation tags (data.chat_template), or end the conversation at this turn"


@dataclass(frozen=True, slots=True)
class Masked:
    """A rendered conversation.

    Attributes:
        ids: [n] token ids.
        weights: [n] weight of each token as something to be predicted.
        stops: ids that ended a trained turn.
    """

    ids: list[int]
    weights: list[float]
    stops: frozenset[int]


@dataclass(slots=True)
class _Ends:
    """How the template ends an assistant turn, learnt from two short conversations.

    Attributes:
        own: the token that the turn itself ends with, or None where only the next turn's marker ends it.
        marker: the token that begins a user turn after an assistant turn; the end where `own` is None.
        known: every token seen to end a turn.
    """

    own: int | None = None
    marker: int | None = None
    known: set[int] = field(default_factory=set)


class Masker:
    """Renders conversations and says which tokens train.

    Args:
        encoder: the tokenizer.

    Raises:
        ModelError: the tokenizer has no chat template.
        DataError: the template ends an assistant turn with no token that generation could stop on.
    """

    def __init__(self, encoder: Encoder) -> None:
        require_template(encoder.tokenizer)
        self._encoder = encoder
        # with pictures in it a text's tokens are not those that the template's own marks are told by
        self._tags = has_generation_tags(encoder.tokenizer) and not encoder.sees
        self._ends = self._learn_ends()

    @property
    def stops(self) -> frozenset[int]:
        """The token that ends the last turn, as the template has it: its own end, else the next user turn's marker."""
        end = self._ends.own if self._ends.own is not None else self._ends.marker
        return frozenset() if end is None else frozenset((end,))

    def __call__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        weights: Sequence[float],
        everything: bool = False,
    ) -> Masked:
        """Render a conversation.

        Args:
            messages: role and content, and what else the template reads.
            tools: tool descriptions, handed to the template.
            weights: a weight per message; those of other roles than assistant are not looked at.
            everything: train on all tokens, only assistant turns of weight 0 left out.

        Raises:
            BadRow: the template refuses the conversation, or the trained span cannot be told from it.
        """
        trained = self._by_tags(messages, tools, weights) if self._tags else self._derived(messages, tools, weights)
        if not everything:
            return trained
        size = len(trained.ids)
        silent = [1.0 - weight for weight in weights]
        quiet = [0.0] * size
        if any(silent[turn] for turn in _assistants(messages)):
            # a rendering that closes the last turn with a marker is one token longer than one that leaves it open
            quiet = [*self._derived(messages, tools, silent).weights, 0.0][:size]
        return Masked(trained.ids, [1.0 - weight for weight in quiet], trained.stops)

    def text(self, messages: Sequence[Message], tools: Sequence[Any] | None, prompt: bool = False) -> str:
        """The rendering as text.

        Raises:
            BadRow: the template refuses the conversation.
        """
        try:
            shaped = self._encoder.shaped(messages)
            return render_text(self._encoder.tokenizer, shaped, tools, add_generation_prompt=prompt)
        except UserError as error:
            raise BadRow(error.what, reason="refused by the chat template") from error

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[int]:
        """The rendering with the generation prompt at its end, as ids."""
        return self._encoder.encode_rendered(self.text(messages, tools, prompt=True))

    def changed_content(self, messages: Sequence[Message], text: str) -> set[str]:
        """Roles whose content does not stand in a rendering as it is."""
        return {
            message["role"]
            for message in messages
            if isinstance(content := message.get("content"), str)
            and not all(said.strip() in text for said in self._encoder.texts(content))
        }

    def _by_tags(self, messages: Sequence[Message], tools: Sequence[Any] | None, weights: Sequence[float]) -> Masked:
        try:
            ids, mask = render_with_mask(self._encoder.tokenizer, messages, tools)
        except UserError as error:
            raise BadRow(error.what, reason="refused by the chat template") from error
        spans = _runs(mask or [])
        turns = _assistants(messages)
        counted = [weights[turn] for turn in turns]
        if len(spans) != len(turns):
            if any(weight != 1.0 for weight in counted):
                raise BadRow(
                    f"the template marks {len(spans)} generated spans for {len(turns)} assistant messages, so a "
                    "message of weight 0 cannot be found",
                    reason="mask not derivable",
                )
            counted = [1.0] * len(spans)
        trained = [0.0] * len(ids)
        stops = set()
        for (start, end), weight in zip(spans, counted, strict=True):
            if not weight:
                continue
            close = self._closed(ids, start, end)
            if close > len(ids) and self._ends.marker is not None:
                ids, trained = [*ids, self._ends.marker], [*trained, 0.0]
            close = min(close, len(ids))
            trained[start:close] = [weight] * (close - start)
            stops |= self._counted_stop(ids[close - 1]) & self._encoder.added
        return Masked(ids, trained, frozenset(stops))

    def _closed(self, ids: list[int], start: int, end: int) -> int:
        """Where a tagged span ends, the token that ends the turn counted in; len + 1 if it is yet to be added."""
        last = end - 1
        while last > start and self._encoder.is_blank(ids[last]):
            last -= 1
        if ids[last] in self._ends.known:
            return last + 1
        following = end
        while following < len(ids) and self._encoder.is_blank(ids[following]):
            following += 1
        if following == len(ids):
            return len(ids) + 1 if self._ends.own is None else end
        # a span that ends with a control token of its own is closed, unless the usual one follows
        closing = self._ends.known if ids[last] in self._encoder.special else self._encoder.special
        return following + 1 if ids[following] in closing else end

    def _derived(self, messages: Sequence[Message], tools: Sequence[Any] | None, weights: Sequence[float]) -> Masked:
        text = self.text(messages, tools)
        ids = self._encoder.encode_rendered(text)
        trained = [0.0] * len(ids)
        stops: set[int] = set()
        reached = 0
        for turn in _assistants(messages):
            if not weights[turn]:
                continue
            start = self._start(messages, tools, turn, text, ids)
            last = turn == len(messages) - 1
            until = text if last else self.text(messages[: turn + 1], tools)
            end, stop = self._end(messages[turn], turn, until, text, ids, start)
            if end > len(ids):
                ids, trained = [*ids, stop], [*trained, 0.0]
            if not reached <= start < end:
                raise _inconsistent(turn, "its tokens cannot be told from its neighbours'")
            trained[start:end] = [float(weights[turn])] * (end - start)
            stops |= self._counted_stop(stop)
            reached = end
        return Masked(ids, trained, frozenset(stops))

    def _counted_stop(self, stop: int) -> set[int]:
        # Where the last turn ends with a token of its own, another one that ends earlier turns stands in the middle of
        # what the model says (thinking, then the answer), so generation must not stop on it.
        own = self._ends.own
        return {stop} if own is None or stop == own or stop not in self._ends.known else set()

    def _start(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, turn: int, text: str, ids: list[int]
    ) -> int:
        """Index of the first trained token of a turn."""
        try:
            prompt = self.text(messages[:turn], tools, prompt=True)
        except BadRow:
            # e.g. a template that wants a user first, and a conversation that the assistant opens: what does not
            # change with the turn's content is its header
            return self._header_end(messages, tools, turn, ids)
        if not text.startswith(prompt):
            before = self.text(messages[:turn], tools)
            if not text.startswith(before):
                return self._start_after_rewriting(messages, tools, turn, text, ids, prompt.removeprefix(before))
        return _common(ids, self._encoder.encode_rendered(prompt))

    def _header_end(self, messages: Sequence[Message], tools: Sequence[Any] | None, turn: int, ids: list[int]) -> int:
        start = _common(ids, self._encoder.encode_rendered(self._with_other_content(messages, tools, turn)))
        if start >= len(ids):
            raise _inconsistent(turn, "the template leaves its content out")
        return start

    def _start_after_rewriting(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        turn: int,
        text: str,
        ids: list[int],
        header: str,
    ) -> int:
        """The start of a turn whose past the template renders otherwise once later turns follow (thinking taken out).

        The turn is where the rendering changes with its content; it starts where the generation prompt before that
        place ends.
        """
        changes = _common(text, self._with_other_content(messages, tools, turn))
        first = self._encoder.first_special(header)
        anchor = text.rfind(first, 0, changes) if first else -1
        if anchor < 0 or not header.startswith(first):
            raise _inconsistent(turn, "the template renders earlier turns otherwise once later ones follow")
        given = text[: anchor + _common(text[anchor:], header)]
        return _common(ids, self._encoder.encode_rendered(given))

    def _with_other_content(self, messages: Sequence[Message], tools: Sequence[Any] | None, turn: int) -> str:
        content = messages[turn].get("content")
        other = "Q" if isinstance(content, str) and content.lstrip()[:1] != "Q" else "Z"
        changed = {"role": messages[turn]["role"], "content": other + _SENTINEL}
        return self.text([*messages[:turn], changed, *messages[turn + 1 :]], tools)

    def _end(self, message: Message, turn: int, until: str, text: str, ids: list[int], start: int) -> tuple[int, int]:
        """Index after the token that ends a turn, and that token; the index is len(ids) + 1 if it is to be added."""
        upto = self._encoder.encode_rendered(until)
        shared = _common(ids, upto)
        if self._ends.own is None and self._ends.marker is not None:
            return self._end_at_marker(message, turn, until, text, ids, max(start, shared))
        stop_at = self._terminator(upto, start)
        if stop_at is None:
            raise _inconsistent(turn, "the template ends it with no token that generation could stop on")
        if stop_at < shared:
            return stop_at + 1, ids[stop_at]
        # the template renders this turn otherwise once later ones follow (thinking taken out, another end)
        return self._first_end(message, turn, ids, max(start, shared))

    def _end_at_marker(
        self, message: Message, turn: int, until: str, text: str, ids: list[int], place: int
    ) -> tuple[int, int]:
        if text == until:
            assert self._ends.marker is not None
            return len(ids) + 1, self._ends.marker
        if not text.startswith(until):
            return self._first_end(message, turn, ids, place)
        rest = text[len(until) :].lstrip()
        following = next((index for index in range(place, len(ids)) if ids[index] in self._encoder.special), None)
        if following is None or not rest.startswith(self._encoder.token_text(ids[following])):
            raise _inconsistent(turn, "the next turn begins with no token that generation could stop on")
        return following + 1, ids[following]

    def _first_end(self, message: Message, turn: int, ids: list[int], place: int) -> tuple[int, int]:
        content = message.get("content")
        if isinstance(content, str) and self._ends.known.intersection(self._encoder.encode(content)):
            raise _inconsistent(turn, "its content holds the very token that ends turns")
        for index in range(place, len(ids)):
            if ids[index] in self._ends.known:
                return index + 1, ids[index]
        raise _inconsistent(turn, "its end is not in the full rendering")

    def _terminator(self, upto: list[int], start: int) -> int | None:
        """Index of the token that ends the turn, in the rendering that ends with it; only white space may follow."""
        fallback = None
        for index in range(len(upto) - 1, start - 1, -1):
            token = upto[index]
            if token in self._ends.known:
                return index
            if token in self._encoder.special:
                fallback = index if fallback is None else fallback
            elif not self._encoder.is_blank(token):
                break
        return fallback

    def _learn_ends(self) -> _Ends:
        ends = _Ends()
        opening = [{"role": "user", "content": "P"}, {"role": "assistant", "content": _SENTINEL}]
        for before in ([], [{"role": "system", "content": "S"}]):
            try:
                ends.own = self._first_control(self.text([*before, *opening], None))
            except BadRow:
                continue
            try:
                ends.marker = self._first_control(self.text([*before, *opening, opening[0]], None))
            except BadRow:
                ends.marker = None
            ends.known = {token for token in (ends.own, ends.marker) if token is not None}
            if not ends.known:
                raise DataError(
                    "the chat template ends an assistant turn with no special token, so generation could never stop",
                    where="data.chat_template",
                    remedy="end assistant turns with the tokenizer's eos_token in a template of your own",
                )
            break
        return ends

    def _first_control(self, text: str) -> int | None:
        ids = self._encoder.encode(text.rpartition(_SENTINEL)[2])
        special = next((token for token in ids if token in self._encoder.special), None)
        if special is not None:
            return special
        return next((t for t in ids if t in self._encoder.added and not self._encoder.is_blank(t)), None)


def _assistants(messages: Sequence[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if message.get("role") == "assistant"]


def _runs(mask: Sequence[int]) -> list[tuple[int, int]]:
    edges = [0, *mask, 0]
    starts = [index for index in range(1, len(edges)) if edges[index] and not edges[index - 1]]
    ends = [index for index in range(1, len(edges)) if not edges[index] and edges[index - 1]]
    return [(start - 1, end - 1) for start, end in zip(starts, ends, strict=True)]


def _common(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Length of the common prefix of two lists, or of two texts."""
    size = min(len(left), len(right))
    return next((index for index in range(size) if left[index] != right[index]), size)


def _inconsistent(turn: int, why: str) -> BadRow:
    what = f"which tokens of message {turn + 1} (assistant) are trained on cannot be told from the chat template: {why}"
    return BadRow(what, reason="mask not derivable", remedy=_REMEDY)
