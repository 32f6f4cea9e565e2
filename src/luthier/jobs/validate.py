"""What can be said to be wrong with a job before anything starts: one sentence each, with its field's path."""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from luthier.config.faults import shown
from luthier.errors import ConfigError
from luthier.jobs.spec import amount_of, gpus_of, is_gpu
from luthier.jobs.storage import Place, StorageError, parse

NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LONGEST_NAME = 63
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_PREFIX = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LONGEST_PREFIX = 253
_OWN_KEYS, _OTHER_KEY = "jobs.luthier/", "choose another prefix"
"""By keys of ours a job's Secrets are found, to be deleted with it."""
_OWN_VARIABLE = re.compile(r"LUTHIER_(JOB|JOB_FILE|JOB_UID|WORKSPACE|STEPS)")
_REQUIREMENT = re.compile(r"[A-Za-z0-9/.]([^\n\r]*[^\n\r\\])?")  # a backslash would take the next one in
_RESOURCE = re.compile(r"cpu|memory|(ephemeral-)?storage|gpu|(mig|hugepages)-[-a-z0-9.]+", re.IGNORECASE)
"""Resources that go by a short name; others have a maker's before a slash."""
_BYTES = ("memory", "storage", "ephemeral-storage")
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "None"}

Errors = list[ConfigError]


# --- types ----------------------------------------------------------------------------------------------------------


def check_types(thing: Any, path: str, errors: Errors) -> None:
    """Refuse values of another type than their field's. Text is never read as a number, nor 1 as true.

    Args:
        thing: an instance of one of the SDK's data classes.
        path: where it stands ("trainer.config").
        errors: gains a sentence for each.
    """
    cls: Any = type(thing)
    for field, hint in _hints(cls).items():
        _check(getattr(thing, field), hint, f"{path}.{field}", errors)


@cache
def _hints(cls: type) -> dict[str, Any]:
    from luthier.jobs.config import LuthierConfig  # checks itself when it is made

    hints = get_type_hints(cls, localns={"LuthierConfig": LuthierConfig})
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def _check(value: Any, hint: Any, path: str, errors: Errors) -> None:
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    found: Errors = []
    for member in members:
        found = []
        if _fits(value, member, path, found):
            errors.extend(found)
            return
    expected = [words for member in members if (words := _words(member)) and member is not type(None)]
    told = f"{', '.join(expected[:-1])} or {expected[-1]}" if len(expected) > 1 else expected[0]
    errors.append(ConfigError(f"{_summary(value)} is not {told}", where=path))


def _fits(value: Any, kind: Any, path: str, errors: Errors) -> bool:
    """Whether a value is of a kind; what is wrong inside it goes to `errors`."""
    origin = get_origin(kind) or kind
    if origin is Any or origin is object:
        return True
    if origin is Literal:
        return value in get_args(kind)
    if origin is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if origin is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin is Callable:
        return callable(value)
    if origin in (list, Sequence):
        if not isinstance(value, list | tuple):
            return False
        for number, item in enumerate(value):
            _check(item, get_args(kind)[0], f"{path}.{number}", errors)
        return True
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            return False
        for key, item in value.items():
            if not isinstance(key, str):
                errors.append(ConfigError(f"{_summary(key)} is not text", where=path))
            _check(item, get_args(kind)[1], f"{path}.{key}", errors)
        return True
    if not isinstance(value, origin):
        return False
    if isinstance(value, str) and "\0" in value:
        errors.append(ConfigError("holds a NUL, which no path and no variable can", where=path))
    if isinstance(value, str) and re.search("[\ud800-\udfff]", value):
        errors.append(ConfigError("holds half a character, which no file and no variable can", where=path))
    if dataclasses.is_dataclass(value):
        check_types(value, path, errors)
    return True


def _words(kind: Any) -> str:
    origin = get_origin(kind) or kind
    if origin is Literal:
        return " or ".join(map(str, get_args(kind)))
    if origin in (list, Sequence, tuple):
        return "a list"
    if origin in (dict, Mapping):
        return "a mapping of keys to values"
    if isinstance(origin, type) and issubclass(origin, Enum):
        return ""  # its words are text, which is named beside it
    return _KINDS.get(origin) or f"a {getattr(origin, '__name__', origin)}"


def _summary(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a mapping of keys to values"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if dataclasses.is_dataclass(value):
        return f"a {type(value).__name__}"
    return shown(value)


# --- names, labels, environment, resources --------------------------------------------------------------------------


def check_name(name: str, where: str, errors: Errors) -> None:
    """Names of jobs are those that Kubernetes takes."""
    if len(name) > LONGEST_NAME:
        errors.append(ConfigError(f"has {len(name)} characters, and may have {LONGEST_NAME}", where=where))
    elif not NAME.fullmatch(name):
        proper = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789")
        remedy = f'"{proper}" would be' if proper else None
        rule = "lower-case letters, digits and hyphens, a letter first"
        errors.append(ConfigError(f"{shown(name)} is not a name of {rule}", where=where, remedy=remedy))


def check_labels(labels: Mapping[str, str], where: str, errors: Errors) -> None:
    """Labels by Kubernetes' rules, so that a job means the same on every backend."""
    for key, value in labels.items():
        if not _is_key(key):
            errors.append(ConfigError(f"{shown(key)} is not a key of a label", where=where))
        elif key.startswith(_OWN_KEYS):
            errors.append(ConfigError("is set by Luthier itself", where=f"{where}.{key}", remedy=_OTHER_KEY))
        elif len(value) > LONGEST_NAME or not _LABEL.fullmatch(value):
            what = f"{shown(value)} is not a value of a label"
            remedy = "use an annotation for longer texts"
            errors.append(ConfigError(what, where=f"{where}.{key}", remedy=remedy))


def check_annotations(annotations: Mapping[str, str], where: str, errors: Errors) -> None:
    """Annotations by Kubernetes' rules: their keys are those of labels."""
    for key in annotations:
        if not _is_key(key):
            errors.append(ConfigError(f"{shown(key)} is not a key of an annotation", where=where))
        elif key.startswith(_OWN_KEYS):
            errors.append(ConfigError("is set by Luthier itself", where=f"{where}.{key}", remedy=_OTHER_KEY))


def _is_key(key: str) -> bool:
    prefix, slash, name = key.rpartition("/")
    proper = not slash or (len(prefix) <= _LONGEST_PREFIX and _PREFIX.fullmatch(prefix))
    return bool(proper and name and len(name) <= LONGEST_NAME and _LABEL.fullmatch(name))


def check_environment(env: Mapping[str, str], where: str, errors: Errors) -> None:
    """Names of variables, but not those by which nodes find each other and their job."""
    for name in env:
        if not _VARIABLE.fullmatch(name):
            errors.append(ConfigError(f"{shown(name)} is not a name of a variable", where=where))
        elif name.startswith("PET_"):
            remedy = "leave it out, and say num_nodes and num_procs_per_node"
            errors.append(ConfigError("is set by whoever starts the nodes", where=f"{where}.{name}", remedy=remedy))
        elif _OWN_VARIABLE.fullmatch(name):
            remedy = "leave it out, or choose another name"
            errors.append(ConfigError("is set by whoever starts the nodes", where=f"{where}.{name}", remedy=remedy))


def check_packages(packages: Sequence[str], where: str, errors: Errors) -> None:
    """Requirements, one each: pip would read anything else as options."""
    for number, package in enumerate(packages):
        remedy = "let pip find it by an index of pip_index_urls, which are kept as secrets"
        # over SSH a name alone is no secret: the key is
        if re.search(r"://[^/]*@", re.sub(r"\bssh://[\w.-]+@", "ssh://", package)):
            errors.append(ConfigError("has credentials in its address", where=f"{where}.{number}", remedy=remedy))
        elif re.search(r"://[^\s#]*\?", package):
            what = "has a query in its address, which may be a signature"
            errors.append(ConfigError(what, where=f"{where}.{number}", remedy=remedy))
        elif package.strip() and (not _REQUIREMENT.fullmatch(package) or len(package.splitlines()) > 1):
            remedy = 'write one each, as "peft==0.18.0"; pip_index_urls says where they are'
            errors.append(ConfigError(f"{package!r} is no requirement", where=f"{where}.{number}", remedy=remedy))


def check_resources(resources: Mapping[str, Any] | None, where: str, errors: Errors) -> int | None:
    """Quantities by Kubernetes' rules. Returns how many GPUs a node asks for; None where it does not say."""
    sound = True
    for name, value in (resources or {}).items():
        what = remedy = None
        if not (_RESOURCE.fullmatch(name) or ("/" in name and _is_key(name))):
            what, remedy = "is not a resource", "there are cpu, memory, gpu, and devices as nvidia.com/gpu"
        elif amount_of(value) is None:
            what, remedy = f"{_summary(value)} is not a quantity", 'write 8 or "64Gi"'
        elif name.lower() in _BYTES and str(value)[-1] in "num":
            what, remedy = f"{shown(value)} is a part of a byte", f'"{str(value)[:-1]}Mi" is so many MiB'
        elif is_gpu(name) and not str(value).isdecimal():
            what = f"{shown(value)} is not a whole number of GPUs"
        if what is not None:
            sound = False
            errors.append(ConfigError(what, where=f"{where}.{name}", remedy=remedy))
    if len(names := [name for name in resources or {} if is_gpu(name)]) > 1:
        errors.append(ConfigError("names GPUs a second time", where=f"{where}.{names[1]}", remedy="leave it out"))
    short = [name.lower() for name in resources or {}]
    if twice := next((name for name in resources or {} if not is_gpu(name) and short.count(name.lower()) > 1), None):
        errors.append(ConfigError("is there a second time", where=f"{where}.{twice}", remedy="leave one out"))
    return gpus_of(resources) if sound else None


# --- places -----------------------------------------------------------------------------------------------------------

_SCHEMES = ("hf", "s3", "gs", "https", "file")


def place_of(
    uri: str, where: str, errors: Errors, schemes: Sequence[str] = _SCHEMES, *, default: str | None = None
) -> Place | None:
    """Read a URI as the step that gets it will; None after an error, which shows nothing of it that may be a secret.

    Args:
        uri: the URI.
        where: its field.
        errors: gains what is wrong.
        schemes: those that will do here.
        default: the scheme of a URI without one.
    """
    scheme, separator, _ = uri.partition("://")
    if not separator:
        if default is None or not uri:
            remedy = "write " + ", ".join(f"{known}://..." for known in schemes)
            errors.append(ConfigError(f"{shown(uri)} has no scheme", where=where, remedy=remedy))
            return None
        scheme, uri = default, f"{default}://{uri}"
    if scheme not in schemes:
        told = ", ".join(f"{known}://" for known in schemes)
        errors.append(ConfigError(f"{scheme}:// is not {' or '.join(told.rsplit(', ', 1))}", where=where))
        return None
    try:
        place = parse(uri, where=where)
        if scheme == "hf" and "/" not in place.repo:
            raise StorageError(f"{shown(uri)} names no owner", remedy="write hf://owner/name")
        if scheme == "https" and not place.path.rpartition("/")[2]:
            raise StorageError(f"{place.uri} names no file", remedy="end it with a file's name")
    except StorageError as error:
        errors.append(ConfigError(error.what, where=where, remedy=error.remedy))
        return None
    return place


# --- layouts ----------------------------------------------------------------------------------------------------------

_DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")


def check_layout(parallel: Mapping[str, Any], ranks: int | None, where: Callable[[str], str], errors: Errors) -> None:
    """Refuse degrees that no such number of processes has.

    Args:
        parallel: degrees as the YAML has them, whole numbers.
        ranks: processes in all; None where that is not known yet.
        where: path of a degree.
        errors: gains what is wrong.
    """
    degrees = {name: parallel.get(name, -1 if name == "dp_shard" else 1) for name in _DEGREES}
    if ranks is None or not all(isinstance(degree, int) for degree in degrees.values()):
        return
    open_ones = [name for name, degree in degrees.items() if degree == -1]
    if len(open_ones) > 1 and "dp_shard" in open_ones and "dp_shard" not in parallel:  # its default gives way
        degrees["dp_shard"] = 1
        open_ones.remove("dp_shard")
    if len(open_ones) > 1:
        what = f"{' and '.join(open_ones)} cannot both be whatever is left"
        errors.append(ConfigError(what, where=where(open_ones[-1]), remedy="give one of them a number"))
        return
    experts = degrees.pop("ep")
    fixed = math.prod(degree for degree in degrees.values() if degree != -1)
    is_open = -1 in degrees.values()
    told = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree not in (1, -1)) or "one process"
    if (is_open and ranks % fixed) or (not is_open and fixed != ranks):
        at = next((name for name in degrees if name in parallel and degrees[name] not in (1, -1)), "dp_shard")
        count = "1 process" if ranks == 1 else f"{ranks} processes"
        verb = "does not divide" if is_open else f"takes {fixed}, not"
        remedy = "change the degrees, or num_nodes and num_procs_per_node"
        errors.append(ConfigError(f"{told} {verb} {count}", where=where(at), remedy=remedy))
        return
    degrees = {name: ranks // fixed if degree == -1 else degree for name, degree in degrees.items()}
    whole = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    if experts > 1 and (experts % degrees["tp"] or whole % experts):
        what = f"ep {experts} is no multiple of tp {degrees['tp']} that divides dp_shard x cp x tp = {whole}"
        errors.append(ConfigError(what, where=where("ep")))
