"""The source of a function or class, by itself: what travels to where a job runs."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from luthier.errors import ConfigError


def source_of(thing: Callable[..., Any] | type, where: str) -> str:
    """Source of a module that defines it, without its decorators.

    Raises:
        ConfigError: it has no source, or it needs variables of what is around it.
    """
    what = "class" if inspect.isclass(thing) else "function"
    name = getattr(thing, "__name__", "")
    if not name.isidentifier():
        raise ConfigError("has no name of its own", where=where, remedy=f"define the {what} with def")
    free = getattr(getattr(thing, "__code__", None), "co_freevars", ())
    if free:
        what = f"uses {', '.join(free)} of the function around it, which does not travel along"
        raise ConfigError(what, where=where, remedy="hand it over as an argument")
    try:
        text = textwrap.dedent(inspect.getsource(thing))
        node = ast.parse(text).body[0]
    except (OSError, TypeError, SyntaxError):
        remedy = "define it in a file or a notebook cell"
        raise ConfigError(f"the source of {name} cannot be found", where=where, remedy=remedy) from None
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
        raise ConfigError(f"{name} is no plain {what}", where=where, remedy="define it with def or class")
    lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
    return "from __future__ import annotations\n\n" + "\n".join(lines) + "\n"
