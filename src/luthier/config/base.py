"""What all sections of a run's YAML have in common."""

from __future__ import annotations

import os.path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


def path_text(value: str) -> str:
    """A text that may name a file, with the home directory for a leading `~`."""
    if "\0" in value:
        raise ValueError("holds a NUL, which no path can")
    return os.path.expanduser(value)


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PathText = Annotated[str, Field(min_length=1), AfterValidator(path_text)]
"""Text that may name a file: a leading `~` is the home directory; relative paths start at the working directory."""


class Section(BaseModel):
    """Unknown keys are errors, and so are values of another type than the field's."""

    model_config = ConfigDict(
        extra="forbid", strict=False, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    shorthand: ClassVar[str | None] = None
    """The key that is meant when a bare text or list stands where this section is expected."""

    @model_validator(mode="before")
    @classmethod
    def _long_form(cls, value: Any) -> Any:
        return {cls.shorthand: value} if cls.shorthand and isinstance(value, str | list) else value


def one_or_many(value: Any) -> Any:
    """A list may be written as its only item."""
    return [value] if isinstance(value, str | dict | Section) else value
