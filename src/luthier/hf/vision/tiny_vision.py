"""`debug:TYPE` for models that see: their configs, tokenizers and processors, tiny, made without any download.

A picture becomes four tokens or so: the towers read 28 x 28 pixels. The processors are Transformers' own classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedTokenizerFast, ProcessorMixin

from luthier.hf.debug.shrink import HIDDEN, VOCABULARY
from luthier.hf.quiet import quiet

SIDE = 28
"""Pixels of a side of what a debug model's tower reads at a time."""

_TOKENS: dict[str, tuple[str, ...]] = {
    "llava": ("<image>",),
    "idefics3": (
        *("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"),
        *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
    ),
    "gemma3": ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    "qwen2_5_vl": ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    "mllama": ("<|python_tag|>", "<|image|>"),
}
"""Tokens that a type's processor wants beside those of the debug tokenizer, in the order of their ids."""
_TOKENS["smolvlm"] = _TOKENS["idefics3"]
_VOCABULARY = VOCABULARY + 14
"""Of a debug model that sees, more than enough for these."""

_TEXT = {
    "vocab_size": _VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "max_position_embeddings": 2048,
}
_TOWER = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 7,
}


def seeing_types() -> tuple[str, ...]:
    """The types that may stand behind `debug:` and see pictures, in alphabetical order."""
    return tuple(sorted(_TOKENS))


def seeing_config(kind: str, *, layers: int | None = None, **changes: Any) -> PreTrainedConfig:
    """The config of a tiny model that sees.

    Args:
        kind: one of `seeing_types`.
        layers: of its text; as few as show what the type does when left out.
        changes: fields to set otherwise.
    """
    fields = _fields(kind)
    if layers is not None:
        text = fields["text_config"]
        text["num_hidden_layers"] = layers
        if "layer_types" in text:
            text["layer_types"] = [text["layer_types"][number % 2] for number in range(layers)]
    return CONFIG_MAPPING[kind](**{**fields, **changes})


def _fields(kind: str) -> dict[str, Any]:
    first = VOCABULARY  # the first id after the debug tokenizer's own
    match kind:
        case "llava":
            tower = {**_TOWER, "model_type": "clip_vision_model", "patch_size": 14, "projection_dim": HIDDEN}
            text = {**_TEXT, "model_type": "llama"}
            return {"text_config": text, "vision_config": tower, "image_token_index": first, "image_seq_length": 4}
        case "idefics3" | "smolvlm":
            text = {**_TEXT, "model_type": "llama"}
            return {"text_config": text, "vision_config": _TOWER, "image_token_id": first, "scale_factor": 2}
        case "gemma3":
            layers = ["full_attention", "sliding_attention", "full_attention"]  # what each does shows in the next
            text = {**_TEXT, "head_dim": HIDDEN // 4, "sliding_window": 16, "layer_types": layers}
            text["num_hidden_layers"] = len(layers)
            tower = {**_TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
            return {
                "text_config": text,
                "vision_config": tower,
                "image_token_index": first,
                "boi_token_index": first + 1,
                "eoi_token_index": first + 2,
                "mm_tokens_per_image": 4,
            }
        case "qwen2_5_vl":
            rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
            tower = {
                "depth": 2,
                "hidden_size": HIDDEN,
                "intermediate_size": 2 * HIDDEN,
                "num_heads": 4,
                "patch_size": 7,
                "window_size": SIDE,
                "out_hidden_size": HIDDEN,
                "fullatt_block_indexes": [1],
            }
            return {
                "text_config": {**_TEXT, "rope_parameters": rope},
                "vision_config": tower,
                "image_token_id": first,
                "video_token_id": first + 1,
                "vision_start_token_id": first + 2,
                "vision_end_token_id": first + 3,
            }
        case "mllama":
            tower = {
                "hidden_size": HIDDEN,
                "intermediate_size": 2 * HIDDEN,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "attention_heads": 4,
                "vision_output_dim": 2 * HIDDEN,
                "image_size": SIDE,
                "patch_size": 14,
                "max_num_tiles": 4,
                "intermediate_layers_indices": [0],
            }
            # the picture's token is the first of the eight that the embedding has and the head has not
            text = {**_TEXT, "vocab_size": first + 1, "num_hidden_layers": 3, "cross_attention_layers": [1]}
            return {"text_config": text, "vision_config": tower, "image_token_index": first + 1}
    raise AssertionError(kind)


CHAT_TEMPLATE = (
    "{%- macro said(content) %}{%- if content is string %}{{ content }}{%- else %}{%- for part in content or [] %}"
    "{%- if part.type == 'image' %}{{ 'PICTURE' }}{%- else %}{{ part.text }}{%- endif %}{%- endfor %}{%- endif %}"
    "{%- endmacro %}START"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + said(message.content) + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
"""ChatML whose contents are texts or lists of parts."""


def seeing_tokenizer(kind: str, make: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    """The debug tokenizer as a type's processor wants it: with its tokens, and a template that takes pictures.

    Args:
        kind: one of `seeing_types`.
        make: `tiny.debug_tokenizer`.
    """
    tag = {"gemma3": "<start_of_image>", "mllama": "<|image|>"}.get(kind, _TOKENS[kind][0])
    shown = f"<|vision_start|>{tag}<|vision_end|>" if kind == "qwen2_5_vl" else tag
    start = "{{ bos_token }}" if kind == "mllama" else ""  # as its processor insists
    named = {}
    if kind == "gemma3":  # its processor asks the tokenizer
        named = {"image_token": _TOKENS[kind][0], "boi_token": _TOKENS[kind][1], "eoi_token": _TOKENS[kind][2]}
    template = CHAT_TEMPLATE.replace("PICTURE", shown).replace("START", start)
    return make(more=_TOKENS[kind], chat_template=template, **named)


def seeing_processor(kind: str, tokenizer: Any) -> ProcessorMixin:
    """The processor of a tiny model that sees.

    Args:
        kind: one of `seeing_types`.
        tokenizer: of `with_eyes`.
    """
    import transformers.models.gemma3.image_processing_pil_gemma3 as gemma3
    import transformers.models.idefics3.image_processing_pil_idefics3 as idefics3
    import transformers.models.llava.image_processing_pil_llava as llava
    import transformers.models.mllama.image_processing_pil_mllama as mllama
    import transformers.models.qwen2_vl.image_processing_pil_qwen2_vl as qwen2_vl
    from transformers import Gemma3Processor, Idefics3Processor, LlavaProcessor, MllamaProcessor, Qwen2_5_VLProcessor

    from luthier.hf.vision.processor import NoVideos, without_videos

    square = {"height": SIDE, "width": SIDE}
    template = {"chat_template": tokenizer.chat_template}
    with quiet():
        match kind:
            case "llava":
                llavas = llava.LlavaImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=square)
                # one token for CLIP's own, which the strategy "default" leaves out again
                return LlavaProcessor(
                    llavas,
                    tokenizer,
                    patch_size=14,
                    vision_feature_select_strategy="default",
                    num_additional_image_tokens=1,
                    **template,
                )
            case "idefics3" | "smolvlm":  # SmolVLM's own differs in what it does with videos, and needs them
                idefics = idefics3.Idefics3ImageProcessorPil(
                    size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE}
                )
                return Idefics3Processor(idefics, tokenizer, image_seq_len=4, **template)
            case "gemma3":
                gemmas = gemma3.Gemma3ImageProcessorPil(size=square)
                return Gemma3Processor(gemmas, tokenizer, image_seq_length=4, **template)
            case "qwen2_5_vl":
                qwens = qwen2_vl.Qwen2VLImageProcessorPil(patch_size=7, min_pixels=14 * 14, max_pixels=4 * 28 * 28)
                return without_videos(Qwen2_5_VLProcessor)(qwens, tokenizer, NoVideos(), **template)
            case "mllama":
                mllamas = mllama.MllamaImageProcessorPil(size=square, max_image_tiles=4)
                return MllamaProcessor(mllamas, tokenizer, **template)
    raise AssertionError(kind)
