"""The source of a function or class, by itself: what travels to where a job runs."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from luthier.errors import ConfigError


def function_source(function: Callable[..., Any], where: str) -> str:
    """Source of a module that defines a function, without its decorators.

    Raises:
        ConfigError: it is a lambda, a method or an object that can be called; its source cannot be found; or it needs
            variables of a function around it.
    """
    if not inspect.isfunction(function) or not function.__name__.isidentifier():
        kind = "a method" if inspect.ismethod(function) else "no function with a name of its own"
        raise ConfigError(f"is {kind}", where=where, remedy="define one with def")
    if free := function.__code__.co_freevars:
        what = f"uses {', '.join(free)} of the function around it, which does not travel along"
        raise ConfigError(what, where=where, remedy="hand it over as an argument")
    return source_of(function, where)


def check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any], where: str) -> None:
    """Refuse arguments that a function does not take, and such as it lacks.

    Raises:
        ConfigError: says which.
    """
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"do not fit {function.__name__}: {error}", where=where) from None


def source_of(thing: Callable[..., Any] | type, where: str) -> str:
    """Source of a module that defines a function or class, without its decorators.

    Raises:
        ConfigError: it cannot be found, or is none of the two.
    """
    try:
        node = ast.parse(text := textwrap.dedent(inspect.getsource(thing))).body[0]
    except (OSError, TypeError, SyntaxError):
        remedy = "define it in a file or a notebook cell"
        raise ConfigError(f"the source of {thing.__name__} cannot be found", where=where, remedy=remedy) from None
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
        raise ConfigError(f"{thing.__name__} is no plain function or class", where=where, remedy="define it with def")
    lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
    return "from __future__ import annotations\n\n" + "\n".join(lines) + "\n"
