"""Errors that a user can cause and mend: where it is, what is wrong, what to do about it.

The command line prints such an error as one sentence and leaves with exit code 2; a library user catches `UserError`.
"""

from __future__ import annotations

EXIT_USER_ERROR = 2
"""Exit code of every command for a mistake that its user can mend."""


def first_line(error: BaseException) -> str:
    """What an error of somebody else's says, in one line; its type where it says nothing.

    >>> first_line(ValueError("too long\\nby 3")), first_line(KeyboardInterrupt())
    ('too long', 'KeyboardInterrupt')
    """
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class UserError(Exception):
    """A mistake in what the user gave: a config field, a file, a row, a model, a layout.

    Args:
        what: what is wrong, as a clause without a full stop.
        where: the file, row, field or layout at fault ("data.jsonl:3", "adapter.rank").
        remedy: what would work, as a clause without a full stop.
    """

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        self.what = what
        self.where = where
        self.remedy = remedy
        super().__init__(str(self))

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}; {self.remedy}" if self.remedy else text


class ConfigError(UserError):
    """A config that cannot be a run; `where` is the path of the field."""


class DataError(UserError):
    """A source or a row that cannot be read as asked; `where` is "file:line" or the file."""


class ModelError(UserError):
    """A model, tokenizer or adapter that cannot be found, read or used as asked."""


class CheckpointError(UserError):
    """A checkpoint that cannot be resumed from; says what changed or what is missing."""


class NonFiniteError(UserError):
    """A loss or gradient that is NaN or infinite; names the step, the rows and the first tensor at fault."""


class Terminated(SystemExit):
    """SIGTERM came, and nothing is lost by stopping at once: no fault of the code that it came in."""
