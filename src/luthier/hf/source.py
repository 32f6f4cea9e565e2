"""What a model string means: a Hub id, a directory, a .gguf file, a file in an installed package, or a debug model.

`resolve` looks at the string and at the disk only. Nothing is downloaded before someone asks for a file, and
`load_config` asks for `config.json` alone.
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers import AutoConfig, PreTrainedConfig

from luthier.errors import ModelError, UserError
from luthier.hf.gguf_quick import quick_gguf

EXPORT_MARK = "luthier_export.json"
"""The file that says a directory is an export of ours: it may be replaced, and names its tokenizer's fingerprint."""

_FORMS = "give a Hub id (owner/name), a directory, a .gguf file, package:NAME/FILE, or debug:TYPE"
_MODEL_FILES = ("config.json", "adapter_config.json")
_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "config.json")
"""Any of these makes a directory one of a model, or of a tokenizer."""
_CONFIG_FILES = ("*.json", "*.jinja", "*.model", "*.txt")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from.

    Attributes:
        kind: which of the five forms the string had.
        text: the string as the user gave it.
        path: the directory that holds the files; None for a Hub id and a debug model.
        repo: the Hub id; None unless `kind` is "hub".
        revision: branch, tag or commit of a Hub model.
        gguf_file: name of the file in `path`, for kinds "gguf" and "package".
        name: what to call the model in a sentence.
    """

    kind: Literal["hub", "directory", "gguf", "package", "debug"]
    text: str
    path: Path | None = None
    repo: str | None = None
    revision: str | None = None
    gguf_file: str | None = None
    name: str = ""

    @property
    def location(self) -> str:
        """What Transformers takes as `pretrained_model_name_or_path`."""
        return str(self.path) if self.path is not None else self.repo or self.text

    @property
    def hub_arguments(self) -> dict[str, Any]:
        """Keyword arguments that every `from_pretrained` of this source needs."""
        return {"revision": self.revision} if self.repo is not None and self.revision is not None else {}


def resolve(model: str, *, revision: str | None = None, where: str = "model") -> ModelSource:
    """Tell what a model string means.

    Args:
        model: a Hub id (hf:// in front is allowed), a directory, a .gguf file, `package:NAME/FILE`, or `debug:TYPE`.
        revision: branch, tag or commit; only a Hub id has one.
        where: the field that names it; of a directory that "tokenizer" names, the tokenizer's files are enough.

    Raises:
        ModelError: there is no such file, directory, package or model type.
    """
    text = model.strip()
    try:
        source = _resolve(text, revision, _TOKENIZER_FILES if where == "tokenizer" else _MODEL_FILES)
    except ModelError as error:
        raise named_by(error, where) from None
    if revision is not None and source.kind != "hub":
        what = f"{text!r} is not a model of the Hub and has no revisions"
        raise named_by(ModelError(what, where="revision", remedy="leave revision out"), where)
    return source


def named_by(error: ModelError, where: str) -> ModelError:
    """The same error, told of the field that names the model ("model" where errors do not know), or its revision."""
    told = {"model": where, "revision": "revision" if where == "model" else f"{where}_revision"}
    return ModelError(error.what, where=told.get(str(error.where), error.where), remedy=error.remedy)


@contextmanager
def named_in(where: str) -> Iterator[None]:
    """What cannot be read within is told of the field that names it: a second model is not what `model` names."""
    try:
        yield
    except ModelError as error:
        raise named_by(error, where) from error


def _resolve(text: str, revision: str | None, enough: Sequence[str]) -> ModelSource:
    if not text:
        raise ModelError("no model is named", where="model", remedy=_FORMS)
    if text.startswith("debug:"):
        from luthier.hf.debug.tiny import known_type  # here, since tiny models need most of Transformers

        return ModelSource("debug", text, name=known_type(text.removeprefix("debug:")))
    if text.startswith("package:"):
        file = package_file(text)
        return _file(text, file, "package")
    if text.startswith("hf://"):
        return _hub(text, text.removeprefix("hf://"), revision)
    path = Path(text).expanduser()
    if path.is_file():
        return _file(text, path, "gguf")
    if path.is_dir():
        if not any((path / name).is_file() for name in enough):
            raise ModelError(
                f"the directory {text!r} has no {enough[0]}",
                where="model",
                remedy=f"did you mean {text.rstrip('/')}/export?"
                if (path / "export" / enough[0]).is_file()
                else "name the directory that was exported or downloaded with the model's files in it",
            )
        return ModelSource("directory", text, path=path.resolve(), name=path.resolve().name)
    if path.suffix == ".gguf" or text.startswith(("/", "./", "../", "~")) or text.count("/") > 1:
        raise ModelError(f"there is no file or directory {text!r}", where="model", remedy=_FORMS)
    return _hub(text, text, revision)


def _file(text: str, path: Path, kind: Literal["gguf", "package"]) -> ModelSource:
    if path.suffix != ".gguf":
        remedy = "name a .gguf file, or the directory that holds the model's config.json"
        raise ModelError(f"{text!r} is a file, but no .gguf file", where="model", remedy=remedy)
    return ModelSource(kind, text, path=path.resolve().parent, gguf_file=path.name, name=path.stem)


def _hub(text: str, repo: str, revision: str | None) -> ModelSource:
    repo, _, at = repo.partition("@")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repo):
        raise ModelError(f"{text!r} is neither a file nor a Hub id", where="model", remedy=_FORMS)
    return ModelSource("hub", text, repo=repo, revision=revision or at or None, name=repo)


def package_file(text: str) -> Path:
    """The file that `package:NAME/FILE` names, inside the installed Python package NAME.

    Raises:
        ModelError: the package is not installed, has no such file, or the path leads out of it.
    """
    package, _, inside = text.removeprefix("package:").partition("/")
    if not re.fullmatch(r"[A-Za-z_][\w.]*", package) or not inside:
        raise ModelError(f"{text!r} is not of the form package:NAME/FILE", where="model", remedy=_FORMS)
    spec = importlib.util.find_spec(package)
    roots = list(spec.submodule_search_locations or []) if spec is not None else []
    if not roots:
        remedy = f"install it (pip install {_distribution(package)})"
        raise ModelError(f"the Python package {package!r} is not installed", where=text, remedy=remedy)
    for root in roots:
        base = Path(root).resolve()
        file = (base / inside).resolve()
        if not file.is_relative_to(base):
            raise ModelError("the path leads out of the package", where=text, remedy="name a file inside it")
        if file.is_file():
            return file
    held = sorted(file.name for root in roots for file in Path(root).rglob("*.gguf"))
    remedy = f"it holds {', '.join(held)}" if held else "it holds no .gguf file"
    raise ModelError(f"the Python package {package!r} has no file {inside!r}", where=text, remedy=remedy)


def _distribution(package: str) -> str:
    """The name under which a package is installed, as well as it can be told without having it."""
    return next(iter(importlib.metadata.packages_distributions().get(package, [])), package.replace("_", "-"))


def load_config(source: ModelSource, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The model's config; of a Hub model nothing else is fetched.

    Raises:
        ModelError: it is not there, cannot be read, or needs the repository's own code.
    """
    if source.kind == "debug":
        from luthier.hf.debug.tiny import debug_config

        return debug_config(source.name)
    if source.gguf_file and source.path is not None:
        return copy.deepcopy(_gguf_config(source, (source.path / source.gguf_file).stat().st_mtime_ns))
    return _read_config(source, trust_remote_code)


def config_from_fields(fields: Mapping[str, Any]) -> PreTrainedConfig:
    """A config from its fields, `model_type` among them; what is left out is the type's default."""
    return AutoConfig.for_model(**fields)


@functools.lru_cache(maxsize=4)
def _gguf_config(source: ModelSource, changed: int) -> PreTrainedConfig:
    """Kept, since Transformers reads the whole vocabulary of the file (seconds) to make a config of it."""
    return _read_config(source, False)


def _read_config(source: ModelSource, trust_remote_code: bool) -> PreTrainedConfig:
    refuse_remote_code(source, trust_remote_code)
    arguments = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    try:
        with quick_gguf(source.gguf_file):
            return AutoConfig.from_pretrained(
                source.location, trust_remote_code=trust_remote_code, **arguments, **source.hub_arguments
            )
    except Exception as error:
        raise explain(source, error, "config.json") from error


def refuse_remote_code(source: ModelSource, trust_remote_code: bool) -> None:
    """Refuse, before Transformers would ask on the terminal, a model that only its repository's code can build.

    Raises:
        ModelError: `config.json` names code of the repository and its model type is not one of Transformers' own.
    """
    if trust_remote_code or source.gguf_file or source.kind == "debug":
        return
    try:
        config, _ = PreTrainedConfig.get_config_dict(source.location, **source.hub_arguments)
    except Exception as error:
        raise explain(source, error, "config.json") from error
    if source.path is not None and not (source.path / "config.json").is_file():
        raise ModelError(
            f"{source.text!r} holds adapters, not a model",
            where="model",
            remedy="name their base as the model, and this directory with --adapter, or as adapter.start_from to train",
        )
    if not isinstance(config, dict):
        remedy = "restore it from where it came"
        raise ModelError(f"config.json of {source.name} is no map of fields", where=source.text, remedy=remedy)
    from transformers import CONFIG_MAPPING

    model_type = config.get("model_type")
    if model_type in CONFIG_MAPPING:
        return
    if config.get("auto_map"):
        raise ModelError(
            f"{source.name} (type {model_type!r}) can only be built by Python code that its repository brings along",
            where="model",
            remedy="read that code, then set trust_remote_code: true",
        )
    raise ModelError(
        f"Transformers does not know the model type {model_type!r} of {source.name}",
        where="model",
        remedy="install a Transformers that does, or choose another model",
    )


def fetch(source: ModelSource, *, weights: bool) -> Path:
    """The directory with a model's files, downloaded from the Hub if need be.

    Args:
        source: a model that is not a debug model.
        weights: also the weights: safetensors if the repository has any, else .bin.

    Raises:
        ModelError: there is no such repository or revision, or the Hub is out of reach and the files are not cached.
    """
    if source.path is not None:
        return source.path
    assert source.repo is not None  # debug models have no files
    patterns = list(_CONFIG_FILES)
    if weights:
        patterns.append("*.safetensors" if _has_safetensors(source) else "*.bin")
    try:
        ignored = ["*/*", "consolidated*", "original*"]
        return Path(
            snapshot_download(source.repo, revision=source.revision, allow_patterns=patterns, ignore_patterns=ignored)
        )
    except Exception as error:
        raise explain(source, error, "files") from error


def _has_safetensors(source: ModelSource) -> bool:
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, has_file

    assert source.repo is not None
    return any(
        has_file(source.repo, name, revision=source.revision, local_files_only=constants.HF_HUB_OFFLINE)
        for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    )


def explain(source: ModelSource, error: BaseException, what: str) -> UserError:
    """Turn what Transformers or the Hub raised for a model into one sentence with a remedy."""
    if isinstance(error, UserError):  # raised by ourselves, so it says what is wrong already
        return error
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    if source.kind == "hub":
        return _explain_hub(source, chain, what)
    if any(isinstance(link, json.JSONDecodeError) for link in chain):
        return ModelError(f"{what} is not valid JSON", where=source.text, remedy="restore it from where it came")
    return ModelError(f"{what} of {source.name} cannot be read: {_first_line(error)}", where=source.text)


def _explain_hub(source: ModelSource, chain: list[BaseException], what: str) -> ModelError:
    def any_of(*kinds: type[BaseException]) -> bool:
        return any(isinstance(link, kinds) for link in chain)

    if any_of(GatedRepoError):
        remedy = "ask for access on its page and log in (hf auth login)"
        return ModelError(f"{source.repo} is open only to those it has let in", where="model", remedy=remedy)
    if any_of(RevisionNotFoundError):
        return ModelError(f"{source.repo} has no revision {source.revision!r}", where="revision")
    if any_of(RepositoryNotFoundError, HFValidationError):
        remedy = "check the spelling; a private one needs a login (hf auth login)"
        return ModelError(f"the Hub has no model {source.repo!r}", where="model", remedy=remedy)
    unreachable = any_of(LocalEntryNotFoundError, HfHubHTTPError, ConnectionError, OSError) and not any_of(
        EntryNotFoundError
    )
    if constants.HF_HUB_OFFLINE or unreachable or any_of(LocalEntryNotFoundError):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hub cannot be reached"
        return ModelError(
            f"{source.repo!r} is no file or directory here and not in the Hub cache, and {why}",
            where="model",
            remedy="go online once to fetch it, or name a directory, a .gguf file, or debug:TYPE",
        )
    return ModelError(f"{what} of {source.repo} cannot be read: {_first_line(chain[0])}", where="model")


def _first_line(error: BaseException) -> str:
    """What an error says in one line: with the next one where the first only announces it, and in words where it is
    but a key that is not found.

    >>> _first_line(ValueError("field 'vocab_size':\\n    must be positive.")), _first_line(KeyError("swish9"))
    ("field 'vocab_size': must be positive", "there is no 'swish9'")
    """
    if isinstance(error, KeyError) and len(error.args) == 1:
        return f"there is no {error.args[0]!r}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    announced = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return (announced or type(error).__name__).rstrip(".")
