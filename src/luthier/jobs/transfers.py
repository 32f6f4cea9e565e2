"""Initializers and exporters as steps, and where a run finds what they have fetched."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from luthier.config.presets import Preset
from luthier.errors import ConfigError
from luthier.jobs.spec import MODEL, Transfer
from luthier.jobs.storage import Place
from luthier.jobs.types import (
    DatasetInitializer,
    HuggingFaceDatasetInitializer,
    HuggingFaceModelInitializer,
    ModelExporter,
    ModelInitializer,
    S3DatasetInitializer,
    S3ModelInitializer,
)
from luthier.jobs.validate import Errors, place_of

_URI = "STORAGE_URI"
_EXPORTS = ("hf", "s3", "gs", "file")
_SECRET = ("access_token", "access_key_id", "secret_access_key")
_OPEN = ("endpoint", "region", "role_arn")
BackendKind = Literal["local", "slurm", "kubernetes"]
Given = DatasetInitializer | S3DatasetInitializer | ModelInitializer | S3ModelInitializer | None


def dataset_transfer(given: Given, preset: Preset | None, errors: Errors, backend: BackendKind) -> Transfer | None:
    """The step that fetches the data set: the one asked for, else the preset's."""
    if given is None:
        return _default(HuggingFaceDatasetInitializer, preset.dataset) if preset is not None else None
    return _initializer(given, "initializer.dataset", errors, backend)


def model_transfer(given: Given, preset: Preset | None, errors: Errors, backend: BackendKind) -> Transfer | None:
    """The step that fetches the model: the one asked for, else the preset's."""
    if given is None:
        return _default(HuggingFaceModelInitializer, preset.model) if preset is not None else None
    return _initializer(given, "initializer.model", errors, backend)


def export_transfer(given: ModelExporter, errors: Errors) -> Transfer | None:
    """The step that takes the result elsewhere."""
    place = place_of(given.storage_uri, "exporter.storage_uri", errors, _EXPORTS)
    if place is not None and place.scheme == "hf" and place.path:
        remedy = "leave the path out: a model has a repository of its own"
        errors.append(ConfigError("names a path in a repository", where="exporter.storage_uri", remedy=remedy))
    if place is not None and place.repo_type == "dataset":
        remedy = "write hf://owner/name"
        errors.append(ConfigError("names a data set of the Hub", where="exporter.storage_uri", remedy=remedy))
    if place is None:
        return None
    env = {_URI: place.uri, "EXPORT_FORM": given.form}
    return Transfer(env | _said(given, _OPEN), _credentials(given, "exporter", errors))


def fetched_to(given: Given, directory: str) -> str:
    """Where a run finds what an initializer has fetched, relative to the workspace.

    >>> fetched_to(DatasetInitializer("hf://tatsu-lab/alpaca/data"), "dataset")
    'dataset/data'
    >>> fetched_to(ModelInitializer("s3://bucket/models/tiny.gguf"), "model")
    'model/tiny.gguf'
    """
    place = _place(given, "", []) if given is not None else None
    if place is None:
        return directory
    if place.scheme == "hf":
        return f"{directory}/{place.path}" if place.path else directory
    # a directory's files lie there themselves; of a model that is one file the name is needed
    is_file = directory == MODEL and place.path.endswith(".gguf")
    return f"{directory}/{posixpath.basename(place.path)}" if is_file else directory


def repository_of(given: Given) -> str | None:
    """The Hub repository that an initializer fetches; None for any other place."""
    place = _place(given, "", []) if given is not None else None
    return place.repo if place is not None and place.scheme == "hf" else None


def local_path(given: Given) -> Path | None:
    """The file or directory of this machine that an initializer copies; None for any other place."""
    place = _place(given, "", []) if given is not None else None
    return Path(place.path) if place is not None and place.scheme == "file" else None


def _place(given: Any, where: str, errors: Errors) -> Place | None:
    schemes: Sequence[str] = ("hf", "s3", "gs", "https", "file")
    default = None
    if isinstance(given, HuggingFaceDatasetInitializer | HuggingFaceModelInitializer):
        schemes, default = ("hf",), "hf"
    elif isinstance(given, S3DatasetInitializer | S3ModelInitializer):
        schemes = ("s3",)
    return place_of(given.storage_uri, where, errors, schemes, default=default)


def _initializer(given: Any, at: str, errors: Errors, backend: BackendKind) -> Transfer | None:
    place = _place(given, f"{at}.storage_uri", errors)
    if place is None:
        return None
    if backend == "local" and place.scheme == "file" and not Path(place.path).exists():
        errors.append(ConfigError(f"there is no {place.path}", where=f"{at}.storage_uri"))
    env, secrets = {_URI: place.uri}, _credentials(given, at, errors)
    if place.scheme == "https" and given.storage_uri != place.uri:
        if place.sha256 is None or "?" in given.storage_uri:  # a query may be a signature
            secrets[_URI] = given.storage_uri
        else:
            env[_URI] = given.storage_uri
    if _URI in secrets and backend == "kubernetes":
        what = f"{place.uri} came with a query, which whoever may read the TrainJob would see"
        errors.append(
            ConfigError(what, where=f"{at}.storage_uri", remedy="leave it out and give access_token, or s3://")
        )
    if given.ignore_patterns is not None:
        for number, pattern in enumerate(given.ignore_patterns):
            if "," in pattern:
                where = f"{at}.ignore_patterns.{number}"
                errors.append(ConfigError("has a comma, which stands between patterns", where=where))
        env["IGNORE_PATTERNS"] = ",".join(given.ignore_patterns)
    return Transfer(env | _said(given, _OPEN), secrets)


def _default(kind: type[DatasetInitializer] | type[ModelInitializer], repository: str) -> Transfer | None:
    where = "initializer.dataset" if kind is HuggingFaceDatasetInitializer else "initializer.model"
    return _initializer(kind(f"hf://{repository}"), where, [], "kubernetes")


def _credentials(given: Any, at: str, errors: Errors) -> dict[str, str]:
    """What nobody else may read. One half of a key opens nothing."""
    said = _said(given, _SECRET)
    halves = "access_key_id", "secret_access_key"
    if len(missing := [name for name in halves if not said.get(name.upper())]) == 1 and _said(given, halves):
        there = halves[1 - halves.index(missing[0])]
        errors.append(ConfigError("is missing", where=f"{at}.{missing[0]}", remedy=f"it goes with {there}"))
    return said


def _said(given: Any, names: Sequence[str]) -> dict[str, str]:
    """By Kubeflow's rule: the field's name in capitals."""
    return {name.upper(): value for name in names if (value := getattr(given, name, None)) is not None}
