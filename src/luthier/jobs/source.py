"""The source of a function or class, by itself: what travels to where a job runs."""

from __future__ import annotations

import ast
import builtins
import contextlib
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
    missing_source = f"the source of {thing.__name__} cannot be found"
    remedy = "define it in a file or a notebook cell"
    try:
        node, lines = _definition(inspect.getsource(thing))
    except (OSError, TypeError, SyntaxError):
        raise ConfigError(missing_source, where=where, remedy=remedy) from None
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
        raise ConfigError(f"{thing.__name__} is no plain function or class", where=where, remedy="define it with def")
    if node.name != thing.__name__:  # by its line in a file that has been edited since, or another name was set
        what = f"{missing_source}: {node.name} is where it was"
        raise ConfigError(what, where=where, remedy="import it anew")
    source = "from __future__ import annotations\n\n" + "\n".join(lines) + "\n"
    around = getattr(thing, "__globals__", None) or vars(sys.modules.get(thing.__module__, builtins))
    if missing := [name for name in _names_from_outside(source) if _is_own(name, around)]:
        what = f"uses {', '.join(missing)} of the module around it, which does not travel along"
        raise ConfigError(what, where=where, remedy=f"import or define that inside {thing.__name__}, or hand it over")
    if missing := _defaults(node):  # not of the module, so of a function around it
        what = f"uses {', '.join(missing)} of the function around it, which does not travel along"
        raise ConfigError(what, where=where, remedy="hand it over as an argument")
    return source


def _definition(text: str) -> tuple[ast.stmt, list[str]]:
    """A definition, and its lines without decorators: at the margin where that changes nothing of it, else as deep as
    it is, below an `if`. Text over several lines has its own margin, which is part of the value.

    Raises:
        SyntaxError: it cannot be read by itself.
    """
    whole = text if not text[:1].isspace() else f"if True:\n{text}"
    node = ast.parse(whole).body[0]
    if whole is text:
        return node, _lines(text, node)
    assert isinstance(node, ast.If)
    inner, plain = node.body[0], textwrap.dedent(text)
    with contextlib.suppress(SyntaxError):
        if ast.dump(dedented := ast.parse(plain).body[0]) == ast.dump(inner):
            return dedented, _lines(plain, dedented)
    return inner, ["if True:", *_lines(whole, inner)]


def _lines(text: str, node: ast.stmt) -> list[str]:
    # by line feeds alone, as Python counts them: a form feed or U+2028 ends none
    return text.split("\n")[node.lineno - 1 : node.end_lineno]


def _is_own(name: str, around: Mapping[str, Any]) -> bool:
    """Whether a name means something of the module around. What is built in is where it goes too, unless the module
    means something else by its name; a notebook's own `open` and `exit` are the same to their user."""
    if name not in around:
        return False
    meant = getattr(around[name], "__wrapped__", around[name])
    is_notebook = str(getattr(meant, "__module__", "")).startswith(("IPython.", "ipykernel."))
    return not hasattr(builtins, name) or not (meant is getattr(builtins, name) or is_notebook)


def _defaults(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """Names that default values of a function's arguments are made of, which are read where it is defined."""
    if isinstance(node, ast.ClassDef):
        return []
    values = [*node.args.defaults, *(value for value in node.args.kw_defaults if value is not None)]
    names = {name for value in values for name in _names_from_outside(ast.unparse(value))}
    return sorted(name for name in names if not hasattr(builtins, name))


def _names_from_outside(source: str) -> list[str]:
    """Names that a module reads and does not set, built-in ones included."""
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
    return sorted(name for name in read - own if not name.startswith("__"))


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)
