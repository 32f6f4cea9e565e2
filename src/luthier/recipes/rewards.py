"""Rewards: Python functions that say how good answers are, called as TRL calls them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from luthier.data.formats.unpaired import SAMPLED
from luthier.errors import ConfigError, DataError
from luthier.own_code import kind_and_words, module_of, number_of, own_code, told_of

Function = Callable[..., Any]
_WHERE = "method.rewards"


def load_rewards(names: Sequence[str]) -> dict[str, Function]:
    """Functions by the names that metrics have for them.

    Args:
        names: package.module:function, also of a module beside the config file, or FILE.py:function.

    Raises:
        ConfigError: one cannot be imported, or two have one name.
    """
    found: dict[str, Function] = {}
    for name in names:
        place, colon, function = name.rpartition(":")
        if not colon or not place or not function:
            remedy = "write package.module:function or FILE.py:function"
            raise ConfigError(f"{name!r} names no function", where=_WHERE, remedy=remedy)
        with own_code(partial(_unimportable, name)):
            reward = getattr(module_of(place), function, None)
        if not callable(reward):
            raise ConfigError(f"{place} has no function {function!r}", where=_WHERE)
        if function in found:
            raise ConfigError(f"two rewards are called {function!r}, as metrics name them", where=_WHERE)
        found[function] = reward
    return found


def _unimportable(name: str, error: BaseException) -> ConfigError:
    what = f"{name!r} cannot be imported ({kind_and_words(error)})"
    return ConfigError(what, where=_WHERE, remedy="relative paths start at the working directory")


def call_reward(
    name: str,
    function: Function,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[list[int]],
    columns: Mapping[str, list[Any]],
    origins: Sequence[str],
) -> list[float]:
    """What a reward function says about answers.

    Args:
        name: of the function, for messages.
        function: called with keywords alone.
        prompts: texts, or lists of messages.
        completions: texts, or for a prompt of messages a list of one message each.
        completion_ids: the tokens of each.
        columns: every other column of the answers' rows.
        origins: where each answer's row stands, for messages.

    Returns:
        a number each, NaN where it says None.

    Raises:
        DataError: it raises, or gives something else than a finite number or None for each; names the row.
    """
    where = f"reward {name}"
    if taken := [key for key in SAMPLED if key in columns]:  # rows of a format of one's own
        what = f"column {taken[0]!r} has the name of what is sampled (of rows {origins[0]} and on)"
        raise DataError(what, where=where, remedy="let the format call it something else")
    arguments = {key: list(values) for key, values in columns.items()}
    arguments |= {
        "prompts": list(prompts),
        "completions": list(completions),
        "completion_ids": [list(ids) for ids in completion_ids],
    }
    rows = f"rows {', '.join(dict.fromkeys(origins))}"[:400]

    def fault(error: BaseException) -> DataError:
        what = f"it {told_of(error)} (of {rows})"
        return DataError(what, where=where, remedy="mend the function; it is given every column by name")

    with own_code(fault):
        told = function(**arguments)
    if isinstance(told, str | Mapping) or not hasattr(told, "__len__") or not hasattr(told, "__iter__"):
        raise DataError(f"it gives {type(told).__name__}, not a list of numbers", where=where)
    values = list(told)
    if len(values) != len(completions):
        what = f"it gives {len(values)} numbers for {len(completions)} answers"
        raise DataError(what, where=where, remedy="give one for each of `completions`")
    return [_number(value, where, origin) for value, origin in zip(values, origins, strict=True)]


def _number(value: Any, where: str, origin: str) -> float:
    if value is None:
        return math.nan
    try:
        number = number_of(value)
    except (TypeError, ValueError):
        raise DataError(f"it gives {value!r}, which is no number", where=f"{where}, {origin}") from None
    if not math.isfinite(number):
        raise DataError(f"it gives {number}", where=f"{where}, {origin}", remedy="give None for an answer without one")
    return number
