"""From Kubeflow's data-set configs to a source of rows in a Luthier YAML."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from luthier.config.faults import shown
from luthier.config.split import parse_split
from luthier.config.suggest import nearest
from luthier.errors import ConfigError
from luthier.jobs.datasets import shipped
from luthier.jobs.spec import DATASET
from luthier.jobs.trainers import (
    CustomDataset,
    DataFormat,
    DatasetConfig,
    TorchTuneChatDataset,
    TorchTuneInstructDataset,
    TorchTuneMultimodalDataset,
)

AT = "trainer.config.dataset_preprocess_config"
CLASS_MODULE = "own_dataset"
"""The module, in the workspace, of a data-set class that travels along."""
INSTRUCT_COLUMNS = ("instruction", "input", "output", "prompt", "completion", "system")
PICTURE_COLUMNS = ("input", "output", "image")
IMAGE_TAG = "<image>"
STYLES = {"openai": "messages", "sharegpt": "conversations"}
"""Style of conversations -> the column that holds them by convention."""

Refuse = Callable[[str, str, str | None], None]


def data_source(dataset: DatasetConfig, config: dict[str, Any], refuse: Refuse) -> dict[str, Any]:
    """The source that a data-set config means.

    Args:
        dataset: the config.
        config: the run so far, which has the path of the rows.
        refuse: takes (where, what, remedy) of all that is wrong.

    Returns:
        a source of `data.train`; beside it under "files" what has to travel along.
    """
    before = (config.get("data", {}).get("train") or [{}])[0]
    source = {name: before[name] for name in ("path", "subset", "rows") if name in before}
    _files(dataset, source, refuse)
    match dataset:
        case TorchTuneInstructDataset():
            source |= _instruct(dataset, refuse)
        case TorchTuneChatDataset():
            source |= _chat(dataset, refuse)
        case CustomDataset():
            source |= _custom(dataset, refuse)
        case TorchTuneMultimodalDataset():
            source |= _pictures(dataset, refuse)
    return source


def _files(dataset: DatasetConfig, source: dict[str, Any], refuse: Refuse) -> None:
    kinds = [kind for kind in DataFormat if dataset.source in (kind, kind.value, kind.name)]
    if dataset.source is not None and not kinds:
        words = [kind.value for kind in DataFormat]
        meant = nearest(str(dataset.source), words)
        what = f"{shown(str(dataset.source))} is not {', '.join(words[:-1])} or {words[-1]}"
        refuse(f"{AT}.source", what, f'did you mean "{meant}"?' if meant else None)
    elif kinds == [DataFormat.XML]:
        refuse(f"{AT}.source", "XML cannot be read", "convert the rows to JSON lines or Parquet")
    elif kinds:
        source["kind"] = kinds[0].value
    if dataset.split is not None:
        try:
            parse_split(dataset.split)
        except ConfigError as error:
            refuse(f"{AT}.split", error.what, error.remedy)
        source["split"] = dataset.split


def _instruct(dataset: TorchTuneInstructDataset, refuse: Refuse) -> dict[str, Any]:
    source = _trained_on(dataset, "instruct")
    columns = dict(dataset.column_map or {})
    for name in columns:
        if name not in INSTRUCT_COLUMNS:
            remedy = f"there are {', '.join(INSTRUCT_COLUMNS)}"
            refuse(f"{AT}.column_map.{name}", "is no column of this format", remedy)
    if dataset.template not in (None, "chat", "plain"):
        refuse(f"{AT}.template", f"{shown(dataset.template)} is neither chat nor plain", None)
    template = dataset.template
    if columns and set(columns) <= {"input", "output", "system"}:
        # torchtune's names: what is asked and what is answered, a turn each
        columns = {{"input": "prompt", "output": "completion"}.get(name, name): to for name, to in columns.items()}
        for name in ("prompt", "completion"):
            columns.setdefault(name, {"prompt": "input", "completion": "output"}[name])
        template = template or "chat"
    if columns:
        source["columns"] = columns
    if template is not None:
        source["options"] = {"template": template}
    return source


def _chat(dataset: TorchTuneChatDataset, refuse: Refuse) -> dict[str, Any]:
    source = _trained_on(dataset, "chat")
    if dataset.conversation_style is not None:
        if dataset.conversation_style not in STYLES:
            meant = nearest(dataset.conversation_style, STYLES)
            what = f"{shown(dataset.conversation_style)} is neither openai nor sharegpt"
            refuse(f"{AT}.conversation_style", what, f'did you mean "{meant}"?' if meant else None)
        else:
            source["column"] = STYLES[dataset.conversation_style]
    if dataset.conversation_column is not None:
        source["column"] = dataset.conversation_column
    return source


def _pictures(dataset: TorchTuneMultimodalDataset, refuse: Refuse) -> dict[str, Any]:
    """Rows with images: a question and an answer where columns are named, else conversations as they are found."""
    source: dict[str, Any] = {}
    columns = dict(dataset.column_map or {})
    for name in columns:
        if name not in PICTURE_COLUMNS:
            refuse(f"{AT}.column_map.{name}", "is no column of this format", f"there are {', '.join(PICTURE_COLUMNS)}")
    if (image := columns.pop("image", None)) is not None:
        source["image_column"] = image
    if columns:
        asked, answered = columns.get("input", "input"), columns.get("output", "output")
        source |= {"format": "instruct", "columns": {"prompt": asked, "completion": answered}}
        source["options"] = {"template": "chat"}
    if dataset.image_tag not in (None, IMAGE_TAG):
        what = f"{shown(dataset.image_tag)} is not {IMAGE_TAG}, which stands for an image in every model's rows"
        refuse(f"{AT}.image_tag", what, f"write {IMAGE_TAG} into the rows, or the model's own tag, and leave it out")
    if dataset.image_dir is not None:
        # beside the rows, wherever these were fetched to
        source["image_root"] = f"{DATASET}/{dataset.image_dir}"
        if dataset.image_dir.startswith("/") or ".." in dataset.image_dir.split("/"):
            refuse(f"{AT}.image_dir", "leads out of the data set", "name a directory in it")
    return source


def _trained_on(dataset: TorchTuneInstructDataset | TorchTuneChatDataset, form: str) -> dict[str, Any]:
    source: dict[str, Any] = {"format": form}
    if dataset.train_on_input is not None:
        source["train_on_input"] = dataset.train_on_input
    if dataset.new_system_prompt is not None:
        source["system_prompt"] = dataset.new_system_prompt
    return source


def _custom(dataset: CustomDataset, refuse: Refuse) -> dict[str, Any]:
    source: dict[str, Any] = {"options": dict(dataset.options)} if dataset.options is not None else {}
    if re.fullmatch(r"[\w.]+:\w+", dataset.name):  # a class that the environment of the nodes has
        return source | {"format": dataset.name}
    try:
        text, name = shipped(dataset.name, f"{AT}.name")
    except ConfigError as error:
        refuse(f"{AT}.name", error.what, error.remedy)
        return source
    return source | {"format": f"{CLASS_MODULE}:{name}", "files": {f"{CLASS_MODULE}.py": text}}
