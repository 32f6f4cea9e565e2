"""`python -m luthier.jobs.initializers dataset|model|adapters`: a step that fetches files into the workspace.

The environment says what, by Kubeflow's names: `STORAGE_URI`, `IGNORE_PATTERNS` (a comma between two), `ACCESS_TOKEN`
(hf://, gs://, https://), `ENDPOINT`, `ACCESS_KEY_ID`, `SECRET_ACCESS_KEY`, `REGION`, `ROLE_ARN` (s3://). The files come
into `dataset/`, `model/` or `adapters/` below `LUTHIER_WORKSPACE` (/workspace).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from luthier.errors import UserError
from luthier.jobs.initializers.fetch import fetch
from luthier.jobs.initializers.step import run_step, workspace
from luthier.jobs.storage import Access, Place, Source, StorageError, parse
from luthier.jobs.types import WEIGHTS_BESIDE

Kind = Literal["dataset", "model", "adapters"]
_MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.gguf", "*.jinja", "*.py")
"""What is fetched of a Hub repository with the default patterns: no pictures, no exports for other engines."""
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".h5", ".msgpack")


def initialize(kind: Kind, environment: Mapping[str, str], root: Path) -> None:
    """Fetch what the environment names into `root / kind`.

    Raises:
        StorageError: it cannot be had.
    """
    place = parse(environment.get("STORAGE_URI", ""))
    ignore = ignored(kind, environment)
    allow = _MODEL_FILES if place.scheme == "hf" and kind != "dataset" and ignore == WEIGHTS_BESIDE else None

    def check(names: list[str], kept: list[str]) -> None:
        _check(kind, place, names, kept)

    fetch(source_of(place, kind, Access.of(environment)), root / kind, ignore=ignore, allow=allow, check=check)


def ignored(kind: Kind, environment: Mapping[str, str]) -> list[str]:
    """Patterns of `IGNORE_PATTERNS`; set and empty is none, not set is the default of the kind."""
    text = environment.get("IGNORE_PATTERNS")
    if text is None:
        return [] if kind == "dataset" else list(WEIGHTS_BESIDE)
    return [pattern.strip() for pattern in text.split(",") if pattern.strip()]


def source_of(place: Place, kind: Kind, access: Access) -> Source:
    """The source that reads a place."""
    match place.scheme:
        case "hf":
            from luthier.jobs.initializers.hub import Hub

            return Hub(place, access, "dataset" if kind == "dataset" else "model")
        case "s3" | "gs":
            from luthier.jobs.initializers.bucket import Bucket

            return Bucket(place, access)
        case "http" | "https":
            from luthier.jobs.initializers.web import Web

            return Web(place, access)
        case "file":
            from luthier.jobs.initializers.disk import Disk

            return Disk(place)
        case _:
            raise AssertionError(place.scheme)


def _check(kind: Kind, place: Place, names: list[str], kept: list[str]) -> None:
    if not names:
        raise StorageError("there are no files in it", where=place.uri)
    if not kept:
        raise StorageError("IGNORE_PATTERNS leaves out all of its files", where=place.uri, remedy="set fewer")
    if kind == "dataset":
        return
    config = "config.json" if kind == "model" else "adapter_config.json"
    has_config = any(name.rpartition("/")[2] == config for name in kept)
    if not has_config and not any(name.endswith(".gguf") for name in kept):
        either = f"neither a {config} nor a .gguf file" if kind == "model" else f"no {config}"
        raise StorageError(
            f"there is {either} in it", where=place.uri, remedy="name the directory that holds the files"
        )
    if not any(name.endswith(_WEIGHTS) for name in kept):
        others = any(name.endswith(_WEIGHTS) for name in names)
        what = "IGNORE_PATTERNS leaves out all of its weights" if others else "there are no weights in it"
        raise StorageError(what, where=place.uri, remedy="set fewer" if others else None)


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """As a command would be called; returns what to leave with.

    Raises:
        UserError: of all that is wrong.
    """
    kinds = get_args(Kind)
    if len(arguments) != 1 or arguments[0] not in kinds:
        raise UserError("say what to fetch", remedy=f"python -m luthier.jobs.initializers {'|'.join(kinds)}")
    kind: Kind = arguments[0]  # type: ignore[assignment]
    initialize(kind, environment, workspace(environment))
    return 0


if __name__ == "__main__":
    run_step(lambda environment: main(sys.argv[1:], environment))
