"""A text that grows: what was asked, what there is of it so far, and what ends it."""

from __future__ import annotations

from dataclasses import dataclass, field

from luthier.errors import NonFiniteError
from luthier.sampling.choose import Choice
from luthier.sampling.products import Adapter
from luthier.sampling.request import SamplingRequest, SamplingResult
from luthier.sampling.stopping import StopStrings


@dataclass(slots=True)
class Text:
    """A text that grows.

    Attributes:
        number: of its request.
        request: what was asked.
        seed: decides about its tokens.
        stops: ids that end it.
        strings: strings that end it.
        room: how many tokens there may be.
        adapter: of the request; None for what the model itself carries.
        key: what it has in common with those that can share the prompt once it is read.
        result: what there is of it.
        fault: why nothing more can come of it.
        done: nothing is to come.
    """

    number: int
    request: SamplingRequest
    seed: int
    stops: frozenset[int]
    strings: StopStrings | None
    room: int
    adapter: Adapter | None
    key: tuple[Adapter | None, tuple[int, ...], bool]
    result: SamplingResult = field(default_factory=lambda: SamplingResult([], [], "length"))
    fault: NonFiniteError | None = None
    done: bool = False

    def append(self, choice: Choice) -> None:
        """Take a token."""
        result = self.result
        result.tokens.append(choice.token)
        result.logprobs.append(choice.logprob)
        if result.topk is not None:
            result.topk.append(choice.top)
        if choice.token in self.stops or (self.strings is not None and self.strings.met(result.tokens)):
            result.stop_reason, self.done = "stop", True
        self.done = self.done or len(result.tokens) >= self.room

    def fail(self) -> None:
        """End it, since its logits are NaN or infinite."""
        remedy = "look at the training run: its weights are beyond use"
        self.fault = NonFiniteError("the model's logits are not finite", where="sampling", remedy=remedy)
        self.done = True
