"""Code that a user brings along, a format, a reward or a metric: how it is imported, and what is said when it fails."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from luthier.errors import Terminated, UserError, first_line

_RAISED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    StopIteration,
    SyntaxError,
    SystemExit,
    TypeError,
    ValueError,
)
"""What Python raises in such code. It is told with the code's name; whatever else that code raises on purpose is its
own affair. Leaving is not: a run would end unfinished as if it were done."""


@contextmanager
def own_code(fault: Callable[[BaseException], UserError]) -> Iterator[None]:
    """Within, what a user brings along is run. Errors of ours and SIGTERM are no fault of it, and pass.

    Args:
        fault: what is raised in the place of an error of that code.
    """
    try:
        yield
    except Terminated:
        raise
    except _RAISED as error:
        raise fault(error) from error


def module_of(place: str) -> ModuleType:
    """A module by its name, beside the working directory too as with `python -m`, or a FILE.py.

    A file is executed once as long as it is not edited: a notebook goes on after an edit. Dataclasses, and whatever
    else asks for the module by its name, need it to be there before it is executed.
    """
    if not place.endswith(".py"):
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(place)
    path = Path(place).resolve()
    mark = hashlib.blake2b(f"{path}\n".encode() + path.read_bytes(), digest_size=8).hexdigest()
    name = f"luthier_own_{path.stem}_{mark}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    with ExitStack() as undone:
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        undone.callback(sys.modules.pop, name)
        spec.loader.exec_module(module)
        undone.pop_all()
    return module


def told_of(error: BaseException) -> str:
    """What such code does, in one line.

    >>> told_of(ValueError("too long\\nby 3")), told_of(SystemExit())
    ('raises ValueError: too long', 'exits: it raises SystemExit')
    """
    said = f"raises {kind_and_words(error)}"
    return f"exits: it {said}" if isinstance(error, SystemExit) else said


def kind_and_words(error: BaseException) -> str:
    """An error of somebody else's in one line, its type in front.

    >>> kind_and_words(ValueError("too long\\nby 3")), kind_and_words(SystemExit())
    ('ValueError: too long', 'SystemExit')
    """
    name = type(error).__name__
    return f"{name}: {first_line(error)}" if str(error).strip() else name


def number_of(value: Any) -> float:
    """What such code gave, as a float; an integer that none can hold is infinite.

    Raises:
        TypeError, ValueError: it is no number.

    >>> number_of(3), number_of(-(10**400))
    (3.0, -inf)
    """
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
