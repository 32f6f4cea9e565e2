"""From what a user of the SDK gives to a checked `JobSpec`: the same on every backend, and so are its errors."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Sequence
from typing import Any

from luthier.config.faults import raise_all
from luthier.config.presets import Preset
from luthier.errors import ConfigError
from luthier.jobs.asked import Asked
from luthier.jobs.draft import drafted
from luthier.jobs.options import (
    ActiveDeadlineSeconds,
    Annotations,
    InheritEnvironment,
    Labels,
    Name,
    Option,
    RuntimePatch,
    TrainerArgs,
    TrainerCommand,
    patch_object,
)
from luthier.jobs.runtimes import ANY_FUNCTION, ANY_MODEL, find, preset_of
from luthier.jobs.select import select
from luthier.jobs.source import check_arguments, function_source
from luthier.jobs.spec import DATASET, MODEL, Function, JobSpec
from luthier.jobs.trainers import AnyTrainer, BuiltinTrainer, CustomTrainer, CustomTrainerContainer
from luthier.jobs.transfers import dataset_transfer, export_transfer, model_transfer
from luthier.jobs.types import Framework, Initializer, ModelExporter, Runtime, TrainerType
from luthier.jobs.validate import (
    check_annotations,
    check_environment,
    check_labels,
    check_name,
    check_packages,
    check_resources,
    check_types,
)

_MOST = 100_000
"""Nodes, and processes of one: more are a slip of the pen."""
_TITLES = {"local": "this machine", "slurm": "Slurm", "kubernetes": "Kubernetes"}


def build(asked: Asked) -> JobSpec:
    """Check everything that can be checked here.

    Raises:
        ConfigError: all that is wrong, a sentence for each.
    """
    _check_given(asked)
    raise_all(asked.errors)
    runtime, trainer = _runtime_and_trainer(asked)
    spec: dict[str, Any] = {"runtime": runtime.name, "framework": str(_framework(runtime))}
    spec |= _options(asked, trainer)
    match trainer:
        case BuiltinTrainer():
            spec |= _builtin(asked, runtime, trainer)
        case CustomTrainer():
            spec |= _custom(asked, runtime, trainer) | _fetched(asked)
        case CustomTrainerContainer():
            spec |= _container(asked, runtime, trainer) | _fetched(asked)
    if asked.exporter is not None and not isinstance(trainer, BuiltinTrainer):
        asked.refuse("exporter", "is for a BuiltinTrainer's model", "let the function save what it has made itself")
    raise_all(asked.errors)
    return JobSpec(**spec)


def _check_given(asked: Asked) -> None:
    for where, thing in (
        ("initializer", asked.initializer),
        ("trainer", asked.trainer),
        ("exporter", asked.exporter),
    ):
        kinds: Any = {"initializer": Initializer, "trainer": AnyTrainer, "exporter": ModelExporter}[where]
        if thing is None:
            continue
        if not isinstance(thing, kinds):
            names = [kind.__name__ for kind in getattr(kinds, "__args__", (kinds,))]
            told = " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
            asked.refuse(where, f"{type(thing).__name__} is not {told}")
        else:
            check_types(thing, where, asked.errors)
    if not isinstance(asked.options, Sequence) or isinstance(asked.options, str):
        asked.refuse("options", f"{type(asked.options).__name__} is not a list of options")
        return
    for number, option in enumerate(asked.options):
        if not isinstance(option, Option):
            asked.refuse(f"options.{number}", f"{type(option).__name__} is not an option")
        else:
            check_types(option, f"options.{number}", asked.errors)


def _runtime_and_trainer(asked: Asked) -> tuple[Runtime, AnyTrainer]:
    """The runtime that is meant, and a trainer that it takes.

    Raises:
        ConfigError: there is no such runtime, or the trainer is of another kind.
    """
    name = asked.runtime.name if isinstance(asked.runtime, Runtime) else asked.runtime
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"{type(name).__name__} is neither a name nor a Runtime", where="runtime")
    if name is None:
        name = ANY_MODEL if isinstance(asked.trainer, BuiltinTrainer) else ANY_FUNCTION
        if asked.trainer is None:
            raise ConfigError("is missing", where="runtime", remedy="name one, or give a trainer")
    runtime = find(name, asked.runtimes)
    builtin = runtime.trainer is None or runtime.trainer.trainer_type == TrainerType.BUILTIN_TRAINER
    trainer = asked.trainer
    if trainer is None:
        if not builtin:
            what = f"is missing: runtime {runtime.name} has nothing of its own to run"
            raise ConfigError(what, where="trainer", remedy="give a CustomTrainer")
        trainer = BuiltinTrainer()
    if isinstance(trainer, BuiltinTrainer) and not (builtin and _framework(runtime) == Framework.LUTHIER):
        what = f"runtime {runtime.name} runs {_framework(runtime)}, which reads no config of ours"
        raise ConfigError(what, where="runtime", remedy="name one that begins with luthier")
    if not isinstance(trainer, BuiltinTrainer) and builtin:
        what = f"runtime {runtime.name} trains a model itself, and takes a BuiltinTrainer"
        raise ConfigError(what, where="trainer", remedy=f"use runtime {ANY_FUNCTION}")
    return runtime, trainer


def _framework(runtime: Runtime) -> Framework | str:
    return runtime.trainer.framework if runtime.trainer is not None else Framework.LUTHIER


# --- the three kinds of trainers --------------------------------------------------------------------------------------


def _builtin(asked: Asked, runtime: Runtime, trainer: BuiltinTrainer) -> dict[str, Any]:
    preset = preset_of(runtime)
    if preset is not None and preset.pictures:
        what = f"{preset.model} reads pictures, and the catalogue has no layout for it"
        raise ConfigError(what, where="runtime", remedy="use the runtime luthier, and name the model")
    size = _size(asked, runtime, trainer.config, "trainer.config")
    nodes, processes = size["num_nodes"], size["nproc_per_node"]
    ranks = nodes * processes if processes != "auto" else None
    draft = drafted(trainer.config, preset, asked, ranks)
    asked.errors += draft.errors
    adapts = draft.config.get("adapter") is not None  # one that says nothing is an adapter too
    if not asked.errors:
        _check_engine(asked, trainer, draft.config)
    if asked.exporter is not None and asked.exporter.form == "adapter" and not adapts:
        asked.refuse("exporter.form", "there is no adapter", "train one with peft_config, or export merged")
    kind = (draft.config.get("adapter") or {}).get("kind", "lora")
    if asked.exporter is not None and asked.exporter.form == "merged" and kind != "lora":
        asked.refuse("exporter.form", f"there is no weight that {kind} could be merged into", 'set form="adapter"')
    return size | {
        "recipe": select("lora" if adapts else "full", nodes, None if processes == "auto" else processes).recipe,
        "engine": trainer.engine,
        "config": draft.config,
        "files": draft.files,
        "env": _environment(asked, trainer.env),
        **_fetched(asked, preset, draft.config),
    }


def _check_engine(asked: Asked, trainer: BuiltinTrainer, config: dict[str, Any]) -> None:
    from luthier.jobs.engines import engine

    try:
        engine(trainer.engine).check(config)
    except ConfigError as error:
        if error.where is None and "\n" in error.what:  # several at once, each with its field
            asked.errors += [ConfigError(f"trainer.{line}") for line in error.what.splitlines()]
        else:
            asked.refuse(f"trainer.{error.where}" if error.where else "trainer.engine", error.what, error.remedy)


def _custom(asked: Asked, runtime: Runtime, trainer: CustomTrainer) -> dict[str, Any]:
    if trainer.image is not None and asked.backend != "kubernetes":
        asked.refuse("trainer.image", _no_containers(asked), "leave it out")
    try:
        source = function_source(trainer.func, "trainer.func")
        check_arguments(trainer.func, trainer.func_args or {}, "trainer.func_args")
    except ConfigError as error:
        asked.errors.append(error)
        source = ""
    check_packages(trainer.packages_to_install or (), "trainer.packages_to_install", asked.errors)
    arguments = trainer.func_args or {}
    for name, value in arguments.items():
        try:
            if json.loads(json.dumps(value, allow_nan=False)) != value:
                raise ValueError
        except (TypeError, ValueError, RecursionError):
            kind = value if isinstance(value, float) else type(value).__name__
            what = f"{kind} cannot travel as JSON and come back the same"
            asked.refuse(f"trainer.func_args.{name}", what, "use text, numbers, true, false, lists and mappings")
    for number, package in enumerate(trainer.packages_to_install or ()):
        if isinstance(package, str) and not package.strip():
            asked.refuse(f"trainer.packages_to_install.{number}", "is empty", "name a package")
    single = (trainer.pip_index_url,) if trainer.pip_index_url is not None else ()
    function = Function(
        source=source,
        name=getattr(trainer.func, "__name__", ""),
        args=dict(arguments),
        packages=tuple(trainer.packages_to_install or ()),
        pip_index_urls=(*single, *(trainer.pip_index_urls or ())),
    )
    size = _size(asked, runtime, trainer, "trainer")
    return size | {"function": function, "image": trainer.image, "env": _environment(asked, trainer.env)}


def _container(asked: Asked, runtime: Runtime, trainer: CustomTrainerContainer) -> dict[str, Any]:
    if asked.backend != "kubernetes":
        asked.refuse("trainer.image", _no_containers(asked), "use a CustomTrainer, or Kubernetes")
    size = _size(asked, runtime, trainer, "trainer")
    return size | {"image": trainer.image, "env": _environment(asked, trainer.env)}


def _no_containers(asked: Asked) -> str:
    return f"jobs of {_TITLES[asked.backend]} run in no container"


def _size(asked: Asked, runtime: Runtime, given: Any, at: str) -> dict[str, Any]:
    """Nodes and processes: what is said, else one process for each GPU asked for, else what the runtime has."""
    own = runtime.trainer
    for name in ("num_nodes", "num_procs_per_node"):
        if (value := getattr(given, name, None)) is not None and not 1 <= value <= _MOST:
            limit = "at least 1" if value < 1 else f"at most {_MOST:,}"
            asked.refuse(f"{at}.{name}", f"must be {limit}, not {value}")
    nodes = given.num_nodes if given.num_nodes is not None else own.num_nodes if own is not None else 1
    gpus = check_resources(given.resources_per_node, f"{at}.resources_per_node", asked.errors)
    processes = getattr(given, "num_procs_per_node", None)
    if processes is None and gpus is not None:
        processes = max(1, gpus)
    if processes is None and own is not None and str(own.device_count).isdigit():
        processes = int(own.device_count)
    resources = dict(given.resources_per_node) if given.resources_per_node is not None else None
    return {"num_nodes": nodes, "nproc_per_node": processes or "auto", "resources_per_node": resources}


# --- what goes around them --------------------------------------------------------------------------------------------


def _fetched(asked: Asked, preset: Preset | None = None, config: dict[str, Any] | None = None) -> dict[str, Any]:
    """The steps before and after the nodes'."""
    initializer = asked.initializer or Initializer()
    # a run that names its own rows or model has nothing to fetch that nobody asked for
    own_rows = config is not None and not _below(config.get("data", {}).get("train"), DATASET)
    own_model = config is not None and str(config.get("model", "")).split("/")[0] != MODEL
    dataset = dataset_transfer(initializer.dataset, None if own_rows else preset, asked.errors, asked.backend)
    model = model_transfer(initializer.model, None if own_model else preset, asked.errors, asked.backend)
    exporter = export_transfer(asked.exporter, asked.errors) if asked.exporter is not None else None
    return {"dataset": dataset, "model": model, "exporter": exporter}


def _below(sources: Any, directory: str) -> bool:
    return any(str(source.get("path", "")).split("/")[0] == directory for source in sources or ())


def _environment(asked: Asked, env: Any) -> dict[str, str]:
    check_environment(env or {}, "trainer.env", asked.errors)
    return dict(env or {})


def _options(asked: Asked, trainer: AnyTrainer) -> dict[str, Any]:
    spec: dict[str, Any] = {"name": secrets.choice(string.ascii_lowercase) + secrets.token_hex(6)[:11]}
    words: dict[str, list[str]] = {}
    seen: set[type] = set()
    for number, option in enumerate(asked.options):
        at = f"options.{number}"
        if type(option) in seen and not isinstance(option, RuntimePatch):
            asked.refuse(at, f"{type(option).__name__} has been given before", "make them one")
        seen.add(type(option))
        match option:
            case Name():
                check_name(option.name, f"{at}.name", asked.errors)
                spec["name"] = option.name
            case Labels():
                check_labels(option.labels, f"{at}.labels", asked.errors)
                spec["labels"] = dict(option.labels)
            case Annotations():
                check_annotations(option.annotations, f"{at}.annotations", asked.errors)
                spec["annotations"] = dict(option.annotations)
            case ActiveDeadlineSeconds():
                if option.seconds < 1:
                    asked.refuse(f"{at}.seconds", f"must be at least 1, not {option.seconds}")
                spec["active_deadline_seconds"] = option.seconds
            case TrainerCommand():
                words["command"] = list(option.command)
            case TrainerArgs():
                words["args"] = list(option.args)
            case InheritEnvironment():
                if asked.backend != "local":
                    asked.refuse(at, "only a job of this machine can inherit its environment", "use the trainer's env")
                spec["inherit_environment"] = True
            case RuntimePatch():
                if asked.backend != "kubernetes":
                    asked.refuse(at, f"{_TITLES[asked.backend]} has no pods to patch", "leave it out")
                spec["runtime_patches"] = (*spec.get("runtime_patches", ()), patch_object(option))
    if words and not isinstance(trainer, CustomTrainerContainer):
        what = "is for a CustomTrainerContainer: other trainers have a command of their own"
        asked.refuse("options", f"Trainer{'Command' if 'command' in words else 'Args'} {what}", "leave it out")
    spec |= {name: tuple(given) for name, given in words.items()}
    return spec
