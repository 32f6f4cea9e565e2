"""The image's Dockerfile names what there is. (No container is built here.)"""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

from luthier import __version__
from luthier.jobs.manifests import GROUP_OF_IMAGE
from luthier.jobs.runtimes import IMAGE

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "docker/luthier-trainer/Dockerfile").read_text(encoding="utf-8")


def test_it_is_of_this_version() -> None:
    assert f"{IMAGE}:{__version__}" in DOCKERFILE


def test_its_user_may_write_into_the_workspace() -> None:
    assert f"USER 1000:{GROUP_OF_IMAGE}" in DOCKERFILE


def test_its_extras_and_modules_are_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    match = re.search(r"/opt/luthier\[([\w,]+)\]", DOCKERFILE)
    assert match is not None
    assert set(match[1].split(",")) <= set(extras)
    modules = re.findall(r"luthier\.jobs\.\w+", DOCKERFILE)
    assert modules == ["luthier.jobs.tune", "luthier.jobs.pod"]
    assert all(importlib.util.find_spec(module) is not None for module in modules)


def test_it_copies_what_it_is_given() -> None:
    given = (ROOT / "docker/luthier-trainer/Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    copied = [word for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.M) for word in line.split()]
    assert sorted(f"!{word}" for word in copied) == sorted(line for line in given if line.startswith("!"))
    assert all((ROOT / word).exists() for word in copied)
