"""What every way of training has, whatever it minimises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from luthier.config.kinds import Kind
from luthier.config.sections import Section

if TYPE_CHECKING:
    from luthier.config.run import RunConfig


class Method(Section):
    """A way of training."""

    rows: ClassVar[Kind] = "documents"
    """What a row of the data has to be."""
    only_speed: ClassVar[frozenset[str]] = frozenset()
    """Fields that change how fast a loss is found, not which."""

    def deciding(self) -> dict[str, Any]:
        """Which loss is minimised, as JSON: a run that goes on has these fields as they were."""
        return self.model_dump(mode="json", exclude={"name", *self.only_speed})

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
