"""Mistakes that every backend meets, said in the same words by all of them."""

from __future__ import annotations

from collections.abc import Sequence

from luthier.errors import UserError


def duplicate(name: str) -> UserError:
    """A job is submitted under a name that another has."""
    return UserError("there is a job of this name already", where=name, remedy="delete it, or choose another name")


def unknown_job(name: str) -> UserError:
    """There is no such job."""
    return UserError("there is no job of this name", where=name, remedy="list_jobs() has the names of all")


def unknown_step(name: str, step: str, steps: Sequence[str]) -> UserError:
    """The job has no such step."""
    return UserError(f'has no step "{step}"', where=name, remedy=f"it has {', '.join(steps)}")


def has_ended(name: str, status: str) -> UserError:
    """Something is wished of a job that has ended."""
    return UserError(f"has ended ({status})", where=name, remedy="submit it under another name")
