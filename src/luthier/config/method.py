"""What every way of training has, whatever it minimises."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from luthier.config.kinds import Kind
from luthier.config.sections import Section

if TYPE_CHECKING:
    from luthier.config.run import RunConfig


class Method(Section):
    """A way of training."""

    rows: ClassVar[Kind] = "documents"
    """What a row of the data has to be."""

    def refused_degree(self, name: str) -> str | None:
        """Why this way of training has no more than one rank of a degree, as a sentence; None where it may.

        Args:
            name: of a degree of `parallel`.
        """
        return None

    def check(self, run: RunConfig) -> None:
        """Refuse what this way of training cannot go with.

        Raises:
            ValueError: of what does not go together.
        """
