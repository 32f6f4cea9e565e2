"""The law of the house: a room imports only from rooms on lower floors; rooms of one floor do not know each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "luthier"

FLOORS = [
    ["config", "batch", "errors", "launch", "own_code"],
    ["hf", "losses", "optim"],
    ["data", "adapters", "parallel"],
    ["engine", "sampling", "report"],
    ["recipes", "tinker", "verify", "estimate"],
    ["cli"],
    ["__main__"],
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

BESIDE = {"jobs": {"config", "launch", "errors"}}
"""Rooms beside the house, and all that they may import; of the house the command's front door knows them."""

NO_CODE = {"demo"}
"""Directories that hold data."""

FACADE = {"__init__"}
"""`import luthier` may hand out anything, lazily."""

TRANSFORMERS = ("hf/", "verify/reference")
NO_TORCH = ("config/", "errors.py", "launch/__init__", "jobs/", "cli/main.py", "cli/border.py", "cli/frame.py")
NO_TORCH += ("cli/__init__", "__init__")
CEILING = 450

FILES = sorted(SOURCE.rglob("*.py"))
ROOMS = sorted(path for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__")


def name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path, *, lazy: bool = True) -> Iterator[tuple[int, str]]:
    """Line and full name of every import; without `lazy`, only of those that run when the file is imported."""
    tree = parsed(path)
    package = ["luthier", *path.relative_to(SOURCE).parts[:-1]]
    nodes = list(ast.walk(tree)) if lazy else list(at_import(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from at_import(child)


def within(names: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    for line, full in names:
        parts = full.split(".")
        if parts[0] == "luthier" and len(parts) > 1:
            yield line, parts[1]


def of(top: str, names: Iterator[tuple[int, str]]) -> list[int]:
    return [line for line, full in names if full.split(".")[0] == top]


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_go_down(path: Path) -> None:
    home = room(path)
    if home in FACADE:
        return
    assert home in FLOOR or home in BESIDE, f"{home} has no floor"
    for line, other in within(imports(path)):
        if other == home or other not in {*FLOOR, *BESIDE}:
            assert other == home or other == "__version__", f"{name(path)}:{line} imports {other}, which has no floor"
            continue
        if home in BESIDE:
            assert other in BESIDE[home], f"{name(path)}:{line}: {home} may not import {other}"
        else:
            below = (other in FLOOR and FLOOR[other] < FLOOR[home]) or (other in BESIDE and home == "cli")
            ground = FLOOR.get(other) == 0 == FLOOR[home] and other == "errors"
            assert below or ground, f"{name(path)}:{line}: {home} may not import {other}"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_only_hf_knows_transformers(path: Path) -> None:
    if not name(path).startswith(TRANSFORMERS):
        assert of("transformers", imports(path)) == []


@pytest.mark.parametrize("path", [path for path in FILES if name(path).startswith(NO_TORCH)], ids=name)
def test_the_start_is_light(path: Path) -> None:
    """Nothing that the command's start, the config or the jobs import brings torch along."""
    seen: set[Path] = set()
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        for heavy in ("torch", "transformers", "datasets", "numpy"):
            assert of(heavy, imports(file, lazy=False)) == [], f"{name(path)} imports {heavy} by way of {name(file)}"
        for _, full in imports(file, lazy=False):
            waiting.extend(files_of(full))


def files_of(full: str) -> Iterator[Path]:
    """The files that run when `luthier.a.b` is imported."""
    parts = full.split(".")
    if parts[0] != "luthier":
        return
    for length in range(len(parts)):
        place = SOURCE.joinpath(*parts[1 : length + 1])
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.is_file():
                yield file


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_are_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= CEILING, f"{name(path)} has {lines} lines: it has more than one reason to change"


@pytest.mark.parametrize("path", ROOMS, ids=name)
def test_every_room_has_a_sign(path: Path) -> None:
    assert (path / "README.md").is_file(), f"{name(path)} needs a README.md: what is here, who calls it, where to add"
    assert path.name in {*FLOOR, *BESIDE, *NO_CODE}, f"{name(path)} has no floor"
