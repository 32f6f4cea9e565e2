"""What kind of model stands behind a config: one that writes text from left to right, or one that cannot be trained so.

Transformers lists 196 types as causal language models. Some of those are the decoder half of a translator, or an
encoder that has learnt to be called one; trained on rows of text they would learn something else than they are for.
"""

from __future__ import annotations

from transformers import CONFIG_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, PreTrainedConfig

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


def never_causal(model_type: str) -> str | None:
    """What a type is instead of a causal language model, where its name alone tells; as `not_causal`."""
    return _READS_OTHERS.get(model_type)


def not_causal(config: PreTrainedConfig) -> str | None:
    """Why a model of this type is not trained as a causal language model; None where it can be.

    Args:
        config: of the model.

    Returns:
        the reason as what the model is: "an encoder, whose positions see those after them".
    """
    kind = config.model_type
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
