"""Processors of models that see, with and without what Transformers wants for videos."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import SmolVLMProcessor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from luthier.errors import ModelError
from luthier.hf.debug.tiny import debug_config, debug_tokenizer
from luthier.hf.source import resolve
from luthier.hf.vision.processor import NoVideos, load_processor, open_eyes, save_processor, without_videos
from luthier.hf.vision.sight import Sight, sight_of
from luthier.hf.vision.tiny_vision import seeing_processor, seeing_types


def saved(kind: str, directory: Path) -> Path:
    debug_config(kind).save_pretrained(directory)
    save_processor(seeing_processor(kind, debug_tokenizer(kind)), directory)
    return directory


@pytest.mark.parametrize("kind", seeing_types())
def test_a_saved_processor_makes_the_same_of_images(kind: str, tmp_path: Path) -> None:
    tokenizer = debug_tokenizer(kind)
    before = Sight(seeing_processor(kind, tokenizer))
    after = Sight(load_processor(resolve(str(saved(kind, tmp_path / kind))), tokenizer))
    assert type(before.processor).__name__ == type(after.processor).__name__
    images = [Image.effect_noise((40, 30), 80).convert("RGB"), Image.effect_noise((20, 50), 80).convert("RGB")]
    assert before.expansions(images) == after.expansions(images)
    ids = [tokenizer("".join(before.expansions(images)), add_special_tokens=False, return_tensors="np")["input_ids"][0]]
    left, right = before.inputs(images, ids), after.inputs(images, ids)
    assert left.keys() == right.keys()
    assert all((left[name] == right[name]).all() for name in left)


def test_a_processor_that_wants_videos_does_without(tmp_path: Path) -> None:
    debug_config("smolvlm").save_pretrained(tmp_path)
    tokenizer = debug_tokenizer("smolvlm")
    reader = SmolVLMImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    own: Any = without_videos(SmolVLMProcessor)
    save_processor(own(reader, tokenizer, NoVideos(), image_seq_len=4, chat_template=tokenizer.chat_template), tmp_path)
    loaded = load_processor(resolve(str(tmp_path)), tokenizer)
    assert isinstance(loaded, SmolVLMProcessor)
    image = [Image.new("RGB", (40, 30))]
    assert Sight(loaded).expansions(image) == Sight(seeing_processor("smolvlm", tokenizer)).expansions(image)


def test_a_model_without_a_processor_reads_text(tmp_path: Path) -> None:
    debug_config("gemma3").save_pretrained(tmp_path)
    tokenizer = debug_tokenizer("gemma3")
    open_eyes(resolve(str(tmp_path)), tokenizer)
    assert sight_of(tokenizer) is None
    (tmp_path / "processor_config.json").write_text("{")
    with pytest.raises(ModelError, match="the processor"):
        open_eyes(resolve(str(tmp_path)), tokenizer)
