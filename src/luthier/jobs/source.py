"""The source of a function or class, by itself: what travels to where a job runs."""

from __future__ import annotations

import ast
import builtins
import inspect
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from luthier.errors import ConfigError


def function_source(function: Callable[..., Any], where: str) -> str:
    """Source of a module that defines a function, without its decorators.

    Raises:
        ConfigError: it is a lambda, a method or an object that can be called; its source cannot be found; it
            yields; or it needs what is around it.
    """
    if not inspect.isfunction(function) or not function.__name__.isidentifier():
        kind = "a method" if inspect.ismethod(function) else "no function with a name of its own"
        raise ConfigError(f"is {kind}", where=where, remedy="define one with def")
    if inspect.isgeneratorfunction(function):
        what = f"{function.__name__} yields, and does nothing when it is called"
        raise ConfigError(what, where=where, remedy="run through it in a function without yield")
    if hasattr(function, "__wrapped__") and function.__code__.co_freevars:
        what = f"{function.__name__} is wrapped by a decorator, which does not travel along"
        raise ConfigError(what, where=where, remedy="leave the decorator out")
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
        ConfigError: it cannot be found, is none of the two, or needs names of the module around it.
    """
    try:
        node = ast.parse(text := textwrap.dedent(inspect.getsource(thing))).body[0]
    except (OSError, TypeError, SyntaxError):
        remedy = "define it in a file or a notebook cell"
        raise ConfigError(f"the source of {thing.__name__} cannot be found", where=where, remedy=remedy) from None
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
        raise ConfigError(f"{thing.__name__} is no plain function or class", where=where, remedy="define it with def")
    lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
    source = "from __future__ import annotations\n\n" + "\n".join(lines) + "\n"
    around = getattr(thing, "__globals__", None) or vars(sys.modules.get(thing.__module__, builtins))
    if missing := [name for name in _names_from_outside(source) if name in around]:
        what = f"uses {', '.join(missing)} of the module around it, which does not travel along"
        raise ConfigError(what, where=where, remedy=f"import or define that inside {thing.__name__}, or hand it over")
    return source


def _names_from_outside(source: str) -> list[str]:
    """Names that a module reads and neither sets nor finds among the built-in ones."""
    tables = list(_tables(symtable.symtable(source, "source", "exec")))
    module = tables[0]
    own = {name.get_name() for name in module.get_symbols() if name.is_assigned() or name.is_imported()}
    for table in tables:
        own |= {name.get_name() for name in table.get_symbols() if name.is_declared_global() and name.is_assigned()}
    read = {
        name.get_name()
        for table in tables
        for name in table.get_symbols()
        if name.is_referenced() and (name.is_global() or table is module)
    }
    return sorted(name for name in read - own if not hasattr(builtins, name) and not name.startswith("__"))


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)
