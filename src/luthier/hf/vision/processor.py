"""The processor of a model that sees pictures: what turns pictures into numbers, and their tags into tokens."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from transformers import AutoImageProcessor, AutoProcessor, BaseImageProcessor, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.auto.processing_auto import processor_class_from_name
from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME

from luthier.errors import ModelError
from luthier.hf.kinds import sees
from luthier.hf.quiet import quiet
from luthier.hf.raised import RAISED_BY_MODELS
from luthier.hf.source import ModelSource, explain, fetch, load_config
from luthier.hf.vision.sight import be_blind, give_sight, sight_of

_FILES = (PROCESSOR_NAME, IMAGE_PROCESSOR_NAME)


class NoVideos(BaseImageProcessor):
    """Stands where a processor wants one for videos, which without torchvision Transformers has not."""

    num_frames, fps = None, None


def without_videos(cls: type[ProcessorMixin]) -> type[ProcessorMixin]:
    """A processor class that takes `NoVideos`; in all else, and by name, the class itself."""

    def check(self: Any, name: str, argument: Any) -> Any:
        return None if isinstance(argument, NoVideos) else cls.check_argument_for_proper_class(self, name, argument)

    members = {"__module__": cls.__module__, "check_argument_for_proper_class": check}
    return type(cls.__name__, (cls,), {**members, "__init__": cls.__init__})  # whose signature names its parts


def load_processor(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """A model's own processor around a tokenizer that has been loaded already.

    Args:
        source: the model.
        tokenizer: takes the place of the processor's own; if it has no chat template it gets the processor's.

    Raises:
        ModelError: the model has no processor, or it cannot be read.
    """
    if source.kind == "debug":
        from luthier.hf.vision.tiny_vision import seeing_processor

        return seeing_processor(source.name, tokenizer)
    try:
        with quiet():
            loaded: Any = _load(source, tokenizer)
    except (OSError, *RAISED_BY_MODELS) as error:
        raise explain(source, error, "the processor") from error
    if getattr(loaded, "image_processor", None) is None or getattr(loaded, "image_token", None) is None:
        raise ModelError(f"the processor of {source.name} reads no pictures by tags in the text", where="model")
    if not tokenizer.chat_template:
        tokenizer.chat_template = loaded.chat_template
    loaded.tokenizer, loaded.chat_template = tokenizer, tokenizer.chat_template
    return loaded


def _load(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> Any:
    if importlib.util.find_spec("torchvision") is not None:
        return AutoProcessor.from_pretrained(source.location, **source.hub_arguments)
    # without torchvision Transformers has no processors for videos, and so none for models that see these too
    pictures = AutoImageProcessor.from_pretrained(source.location, **source.hub_arguments)
    fields, _ = ProcessorMixin.get_processor_dict(source.location, **source.hub_arguments)
    older, _ = BaseImageProcessor.get_image_processor_dict(source.location, **source.hub_arguments)
    name = fields.pop("processor_class", None) or older.get("processor_class")
    cls: Any = processor_class_from_name(name) if name else None
    if cls is None:
        return AutoProcessor.from_pretrained(source.location, **source.hub_arguments)
    parts = {"image_processor": pictures, "tokenizer": tokenizer, "video_processor": NoVideos()}
    named = [parts.get(part, part) for part in cls.get_attributes()]
    return without_videos(cls).from_args_and_dict(named, fields)


def open_eyes(source: ModelSource, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool = False) -> None:
    """Let rows have images, if the model sees and there is what reads them: its processor, and pillow.

    Args:
        source: the model.
        tokenizer: of the rows.
        trust_remote_code: run Python code that the repository brings along.
    """
    if source.gguf_file or not sees(load_config(source, trust_remote_code=trust_remote_code)):
        return
    if importlib.util.find_spec("PIL") is None:
        be_blind(tokenizer, "pillow is not installed, which opens images", "pip install 'luthier[vision]'")
    elif source.kind != "debug" and not any((fetch(source, weights=False) / name).is_file() for name in _FILES):
        be_blind(tokenizer, f"{source.name} brings no processor along", "name the model as it was published")
    else:
        give_sight(tokenizer, load_processor(source, tokenizer))


def save_reader(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write what turns rows into tokens: a tokenizer, or the processor that it is a part of."""
    sight = sight_of(tokenizer)
    if sight is None:
        tokenizer.save_pretrained(str(directory))
    else:
        save_processor(sight.processor, directory)


def save_processor(processor: ProcessorMixin, directory: Path) -> None:
    """Write a processor, its tokenizer among it, so that AutoProcessor opens it."""
    processor.save_pretrained(str(directory))
    file = directory / PROCESSOR_NAME
    if isinstance(getattr(processor, "video_processor", None), NoVideos) and file.is_file():
        content = json.loads(file.read_text(encoding="utf-8"))
        content.pop("video_processor", None)  # where there is torchvision, the type's own
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        (directory / IMAGE_PROCESSOR_NAME).write_text(processor.image_processor.to_json_string(), encoding="utf-8")
