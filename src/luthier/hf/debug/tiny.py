"""`debug:TYPE`: a tiny model of any causal type that Transformers knows, with a tokenizer, made without any download.

The type's own default config is shrunk (`hf.debug.shrink`), for the vocabulary of the debug tokenizer.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedTokenizerFast

from luthier.errors import ModelError
from luthier.hf.debug.shrink import shrink
from luthier.hf.kinds import never_causal
from luthier.hf.quiet import quiet
from luthier.hf.vision.tiny_vision import seeing_config, seeing_tokenizer, seeing_types


def causal_types() -> tuple[str, ...]:
    """Every type of text models that may stand behind `debug:`, in alphabetical order."""
    return tuple(sorted(filter(_is_causal, CONFIG_MAPPING.keys())))


def _is_causal(model_type: str) -> bool:
    """Imports the config of this one type."""
    return model_type in CONFIG_MAPPING and CONFIG_MAPPING[model_type] in MODEL_FOR_CAUSAL_LM_MAPPING


def known_type(model_type: str) -> str:
    """The type itself.

    Raises:
        ModelError: Transformers has no causal language model of this type; names the nearest one.
    """
    if model_type in seeing_types() or _is_causal(model_type):
        return model_type
    known = tuple(sorted({*causal_types(), *seeing_types()}))  # imports the configs of all
    near = difflib.get_close_matches(model_type, known, n=1, cutoff=0.3)
    remedy = f"did you mean debug:{near[0]}?" if near else f"there are {len(known)}, debug:llama among them"
    raise ModelError(f"Transformers has no causal model type {model_type!r}", where="model", remedy=remedy)


def debug_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """The config of a tiny model of this type, for the debug tokenizer's vocabulary.

    Args:
        model_type: a name that Transformers' config registry knows ("qwen3").
        changes: fields to set otherwise.

    Raises:
        ModelError: no such type, or its config cannot be shrunk.
    """
    kind = known_type(model_type)
    if kind in seeing_types():
        return seeing_config(kind, **changes)
    cls = CONFIG_MAPPING[kind]
    try:
        with quiet():
            config = shrink(cls(), grouped=True, **changes)
    except Exception as error:
        if (what := never_causal(kind)) is not None:
            raise ModelError(f"{kind} is {what}", where=f"debug:{kind}") from error
        reason = " ".join(str(error).split())
        remedy = "debug:llama, debug:qwen3 and debug:mixtral do"
        raise ModelError(f"no tiny {kind} can be made: {reason}", where=f"debug:{kind}", remedy=remedy) from error
    config.architectures = None
    return config


_TEXT = """
The model reads the text and answers in the form that it was shown. A question is asked, an answer is given, and the
next question follows. What is the name of the town by the river? The name of the town is written on the old stone
bridge. How many people live there? About three thousand people live there, and most of them work in the mill, in the
school or on the land. When the water is high the road is closed and they go over the hill. You are a helpful assistant.
I do not know that, but I can tell you where to look: ask at the station, or read the book that the teacher wrote.
Numbers such as 1, 2, 10, 12, 100 and 2024 stand in the text, and so do names like Anna, Ben, Clara and David.
"""

CHAT_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}"
    "Tools: {{ tools | tojson }}<|im_end|>\n"
    "{%- elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}{%- if not (loop.first and message.role == 'system') %}"
    "{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] %}{{ '\n<tool_call>' + (call | tojson) + '</tool_call>' }}{%- endfor %}"
    "{{ '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
"""ChatML with tools, without generation tags: what most models' templates look like."""


def debug_tokenizer(
    kind: str = "", *, more: Sequence[str] = (), chat_template: str = CHAT_TEMPLATE, **named: str
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of about 500 tokens with a ChatML template; every call makes a new, equal one.

    Any text survives the way there and back. It adds no BOS by itself; "<|im_end|>" ends turns, "<|endoftext|>" texts.

    Args:
        kind: the model's type; one that sees pictures gets a few tokens and a template for them.
        more: special tokens beside its own.
        chat_template: its template.
        named: special tokens that have a name of their own ("boi_token").
    """
    if kind in seeing_types():
        return seeing_tokenizer(kind, debug_tokenizer)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend()),
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>", *more],
        chat_template=chat_template,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        **named,
    )


@functools.cache
def _backend() -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=508,  # the text above gives no more than `VOCABULARY`
        show_progress=False,
        special_tokens=["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    backend.train_from_iterator(_TEXT.split("\n"), trainer)
    return str(backend.to_str())
