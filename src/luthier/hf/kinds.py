"""What kind of model stands behind a config: one that writes text from left to right, or one that cannot be trained so.

Transformers lists 196 types as causal language models. Some of those are the decoder half of a translator, or an
encoder that has learnt to be called one; trained on rows of text they would learn something else than they are for.
"""

from __future__ import annotations

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, PreTrainedConfig

READS_PICTURES = ("gemma3", "idefics3", "llava", "mllama", "qwen2_5_vl", "smolvlm")
"""Types that are trained on pictures as well as on text; each has been compared with Transformers' own step."""

_READS_OTHERS = {
    "bert-generation": "an encoder, whose positions see those after them",
    "xlnet": "an encoder, whose positions are predicted in any order",
    "emu3": "a model of pictures, whose text part Transformers opens only within it",
    "gemma3n": "a model with eyes and ears that only timm can build (its text model is gemma3n_text)",
    "gemma4_assistant": "a drafting model, which reads the hidden states of another model",
    "gemma4_unified_assistant": "a drafting model, which reads the hidden states of another model",
    "git": "a model that writes of pictures, and needs them",
    "got_ocr2": "a model that reads pictures, and needs them",
    "mllama": "a model that reads pictures, whose text part Transformers opens only within it",
    "moshi": "a model that speaks, and needs sound",
    "moss_transcribe_diarize": "a model that writes down speech, and needs sound",
    "trocr": "a model that reads pictures, and needs them",
}
"""What no mapping of Transformers tells."""


def sees(config: PreTrainedConfig) -> bool:
    """Whether a model of this config reads pictures."""
    kind = config.model_type
    return kind in READS_PICTURES and type(config) is CONFIG_MAPPING[kind]


def reads_text_alone(config: PreTrainedConfig) -> bool:
    """Whether a model that sees is a causal language model of Transformers as well."""
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and never_causal(config.model_type) is None


def crosses(config: PreTrainedConfig) -> bool:
    """Whether its text looks at pictures by cross attention, instead of reading them as tokens."""
    return bool(getattr(config.get_text_config(), "cross_attention_layers", None))


def never_causal(model_type: str) -> str | None:
    """What a type is instead of a causal language model of text alone, where its name tells; as `not_causal`."""
    return _READS_OTHERS.get(model_type)


def not_causal(config: PreTrainedConfig) -> str | None:
    """Why a model of this type is not trained as a causal language model; None where it can be.

    Args:
        config: of the model.

    Returns:
        the reason as what the model is: "an encoder, whose positions see those after them".
    """
    kind = config.model_type
    if sees(config):
        return None
    if kind in _READS_OTHERS:
        return _READS_OTHERS[kind]
    if kind not in CONFIG_MAPPING:
        return None  # of code that a repository brings along
    known = CONFIG_MAPPING[kind]  # a lazy mapping, whose .get knows only what has been used before
    if type(config) is not known:
        return None
    if known.is_encoder_decoder or config.is_encoder_decoder:
        return "an encoder-decoder, whose writing half reads what its other half has read"
    if known in MODEL_FOR_MASKED_LM_MAPPING:
        return "an encoder, whose positions see those after them"
    return None
