"""The run of a job with a built-in trainer: its runtime's preset, what was fetched, and the config over both."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from luthier.config.presets import Method, Preset
from luthier.config.split import parse_split
from luthier.errors import ConfigError
from luthier.jobs.asked import Asked
from luthier.jobs.columns import check_columns, check_template
from luthier.jobs.convert import AT, Draft, carry_template, convert
from luthier.jobs.spec import DATASET, MODEL, OUTPUT
from luthier.jobs.trainers import TorchTuneConfig
from luthier.jobs.transfers import fetched_to, local_path, repository_of
from luthier.jobs.types import Initializer
from luthier.jobs.validate import check_layout

if TYPE_CHECKING:
    from luthier.jobs.config import LuthierConfig

_EITHER_OR: dict[tuple[str, ...], str] = {("train", "epochs"): "steps", ("train", "steps"): "epochs"}
_EITHER_OR |= {("train", "rows_per_step"): "tokens_per_step", ("train", "tokens_per_step"): "rows_per_step"}
"""Fields that exclude each other: one that is given takes the place of the other."""


def drafted(config: TorchTuneConfig | LuthierConfig, preset: Preset | None, asked: Asked, ranks: int | None) -> Draft:
    """The whole run as plain data, with all that is wrong with it.

    Args:
        ranks: processes in all; None where that is not known yet.
    """
    initializer = asked.initializer or Initializer()
    here = asked.backend != "kubernetes"
    if isinstance(config, TorchTuneConfig):
        method: Method = "lora" if config.peft_config is not None else "full"
        draft = convert(config, _base(preset, method, ranks, initializer))
        _settle(draft, draft.config, "tokenizer", f"{AT}.tokenizer", here=here)
    else:
        given = config.given()
        method = "lora" if given.get("adapter") is not None else "full"
        draft = Draft(_base(preset, method, ranks, initializer))
        _settle_all(draft, given, initializer, here=here)
        _lay_over(draft, given)
    _check_present(draft, preset, initializer)
    train = draft.config.setdefault("train", {})
    if train.get("epochs") is None and train.get("steps") is None and not draft.errors:
        train["epochs"] = 1  # so that whoever follows the run knows where it ends
    if not draft.errors:
        _check(draft, ranks)
    if not draft.errors and asked.backend == "local":
        check_columns(draft, local_path(initializer.dataset))
        check_template(draft, local_path(initializer.model))
    return draft


def _base(preset: Preset | None, method: Method, ranks: int | None, initializer: Initializer) -> dict[str, Any]:
    base: dict[str, Any] = preset.config(method, ranks) if preset is not None else {}
    base["output"] = OUTPUT
    if initializer.model is not None or preset is not None:
        base["model"] = fetched_to(initializer.model, MODEL)
    if initializer.dataset is not None or preset is not None:
        source = {"path": fetched_to(initializer.dataset, DATASET)}
        usual = preset is not None and (
            initializer.dataset is None or repository_of(initializer.dataset) == preset.dataset
        )
        if preset is not None and usual:
            source["format"] = preset.format
        base.setdefault("data", {})["train"] = [source]
    return base


def _check_present(draft: Draft, preset: Preset | None, initializer: Initializer) -> None:
    if not draft.config.get("model"):
        draft.refuse("initializer.model", "is missing: the runtime brings no model", "give one, or name its runtime")
        draft.config["model"] = MODEL
    if not draft.config.get("data", {}).get("train"):
        draft.refuse("initializer.dataset", "is missing: the runtime brings no data set", "give one")


def _check(draft: Draft, ranks: int | None) -> None:
    """Read the run as its engine will; every fault is said at the field that its user has written."""
    from luthier.config.load import check_config

    config, faults = check_config(draft.config)
    for fault in faults:
        draft.refuse(_origin(draft, ".".join(fault.path)), fault.what, fault.remedy)
    for part in ("train", "validation"):
        for number, source in enumerate((getattr(config.data, part) if config is not None else None) or ()):
            try:
                if not source.path.startswith("hf://"):  # the Hub's library reads more
                    parse_split(source.split)
            except ConfigError as error:
                draft.refuse(_origin(draft, f"data.{part}.{number}.split"), error.what, error.remedy)
    if not faults:
        parallel = draft.config.get("parallel", {})
        check_layout(parallel, ranks, lambda name: _origin(draft, f"parallel.{name}"), draft.errors)


def _origin(draft: Draft, path: str) -> str:
    """The path of what set a field, or a section around it; the field's own below the trainer's config else."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        if found := draft.origins.get(".".join(parts[:length])):
            return ".".join([found, *parts[length:]]) if found == f"{AT}.{'.'.join(parts[:length])}" else found
    return f"{AT}.{path}" if path else AT


# --- LuthierConfig ----------------------------------------------------------------------------------------------------


def _lay_over(draft: Draft, given: dict[str, Any]) -> None:
    """Put what was given over what the runtime says."""
    if "output" in given:
        remedy = "leave it out, and take the result elsewhere with an exporter"
        draft.refuse(f"{AT}.output", "is the workspace's output/ for every job", remedy)
    if "parallel" in given:
        draft.config.pop("parallel", None)  # one's own layout does not mix with the catalogue's
    _merge(draft.config, given, ())
    if template := draft.config.get("data", {}).get("chat_template"):
        carry_template(template, f"{AT}.data.chat_template", draft)


def _merge(base: dict[str, Any], given: Mapping[str, Any], path: tuple[str, ...]) -> None:
    for key, value in given.items():
        base.pop(_EITHER_OR.get((*path, key), ""), None)
        if isinstance(value, Mapping) and isinstance(base.get(key), dict) and (*path, key) != ("adapter",):
            _merge(base[key], value, (*path, key))
        else:
            base[key] = value


def _settle_all(draft: Draft, given: dict[str, Any], initializer: Initializer, *, here: bool) -> None:
    """Let all paths that were given mean what they mean where the job is submitted; those of what is fetched aside."""
    fetched = {DATASET: initializer.dataset is not None, MODEL: initializer.model is not None}
    places = [(given, "model", "model"), (given, "tokenizer", "tokenizer")]
    places += [(given.get("adapter") or {}, "start_from", "adapter.start_from")]
    for part in ("train", "validation"):
        sources = given.get("data", {}).get(part) or ()
        for key in ("path", "image_root"):
            places += [(source, key, f"data.{part}.{number}.{key}") for number, source in enumerate(sources)]
    for section, key, where in places:
        if not fetched.get(str(section.get(key)).split("/")[0]):
            _settle(draft, section, key, f"{AT}.{where}", here=here)


def _settle(draft: Draft, section: dict[str, Any], key: str, where: str, *, here: bool) -> None:
    """Make a path of this machine absolute, since nodes start in the workspace.

    Args:
        here: whether the nodes see the files of this machine.
    """
    path = section.get(key)
    if not isinstance(path, str) or "://" in path:
        return
    if not _is_there(path):
        # data that nodes, which start in the workspace, cannot find either; a model may be a name on the Hub
        if here and key == "path" and not os.path.isabs(path):
            draft.refuse(where, f'there is no "{path}" here', "check the spelling, or write hf://owner/name")
        return
    if here:
        section[key] = os.path.abspath(path)
    elif not os.path.isabs(path):
        remedy = "upload it, and name it in an initializer"
        draft.refuse(where, f'"{path}" is a file of this machine, which pods do not see', remedy)


def _is_there(path: str) -> bool:
    return os.path.exists(path) or (glob.has_magic(path) and bool(glob.glob(path)))
