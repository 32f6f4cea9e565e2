"""Tokenizers: loading one with its chat template, rendering conversations to ids, stop tokens, and a content hash.

A sequence begins with one BOS at most. Plain text gets one only if the tokenizer adds it by itself (`encode_text`);
a conversation gets what its template writes and nothing more (`render`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from luthier.errors import ModelError
from luthier.hf.gguf_quick import quick_gguf
from luthier.hf.source import EXPORT_MARK, ModelSource, explain, named_by, refuse_remote_code, resolve

Message = Mapping[str, Any]


def load_tokenizer(
    source: ModelSource,
    *,
    tokenizer: str | None = None,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, or another one that the user names.

    Args:
        source: the model.
        tokenizer: another tokenizer, named as a model is.
        chat_template: a Jinja file that replaces the tokenizer's own template.
        trust_remote_code: run Python code that the repository brings along.

    Raises:
        ModelError: the model has no tokenizer, or it or the template cannot be read.
    """
    if tokenizer is not None:
        source = resolve(tokenizer, where="tokenizer")
    if source.kind == "debug":
        from luthier.hf.debug.tiny import debug_tokenizer

        loaded: PreTrainedTokenizerBase = debug_tokenizer(source.name)
    else:
        field = "tokenizer" if tokenizer is not None else "model"
        arguments = {"gguf_file": source.gguf_file} if source.gguf_file else {}
        try:
            if source.path is None or (source.path / "config.json").is_file():  # a tokenizer alone has none
                refuse_remote_code(source, trust_remote_code)
            with quick_gguf(source.gguf_file):
                loaded = AutoTokenizer.from_pretrained(
                    source.location, trust_remote_code=trust_remote_code, **arguments, **source.hub_arguments
                )
        except Exception as error:
            reason = explain(source, error, "the tokenizer")
            remedy = reason.remedy or "name another tokenizer (tokenizer: NAME)"
            raise named_by(ModelError(reason.what, where=reason.where, remedy=remedy), field) from error
        loaded = _as_exported(source, loaded)
    if chat_template is not None:
        loaded.chat_template = read_template(chat_template)
    return loaded


def _as_exported(source: ModelSource, loaded: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer that an export of ours was written with.

    For some model types Transformers builds a class of its own from the vocabulary, whatever tokenizer.json says about
    cutting text. That is right for the models of the Hub, and wrong for an export that has another tokenizer.
    """
    if source.kind != "directory" or source.path is None or not (source.path / EXPORT_MARK).is_file():
        return loaded
    written = json.loads((source.path / EXPORT_MARK).read_text(encoding="utf-8")).get("tokenizer")
    if written is None or fingerprint(loaded) == written or not (source.path / "tokenizer.json").is_file():
        return loaded
    plain: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(source.location)
    return plain if fingerprint(plain) == written else loaded


def read_template(path: str) -> str:
    """The text of a Jinja file.

    Raises:
        ModelError: it is not there, or is no text.
    """
    where = "data.chat_template"
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        what = f"the chat template {path!r} cannot be read ({error.strerror})"
        raise ModelError(what, where=where, remedy="name a Jinja file") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"the chat template {path!r} is not UTF-8 text", where=where) from error
    if not text.strip():
        raise ModelError(f"the chat template {path!r} is empty", where=where, remedy="name another Jinja file")
    try:
        # the tags that Transformers adds to Jinja are tags of its own there, and plain ones for this check
        plain = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", text)
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except jinja2.TemplateSyntaxError as error:
        what = f"the chat template {path!r} is not Jinja: {str(error.message).rstrip('.')}, in line {error.lineno}"
        raise ModelError(what, where=where, remedy="mend it") from error
    return text


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of plain text, with a BOS in front only if the tokenizer adds one by itself, and no EOS.

    The text's own bytes are never read as special tokens by accident of normalisation: what it encodes to is what
    the tokenizer makes of it. An EOS that some tokenizers append is taken off, so that callers decide where texts end.
    """
    ids = list(tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"])
    bare = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    if ids == bare:
        return bare
    front = ids[: len(ids) - len(bare)] if ids[len(ids) - len(bare) :] == bare else ids[:1]
    front = [token for token in front if token == tokenizer.bos_token_id][:1]
    # a text that itself begins with the BOS keeps that one and gets no second
    return bare if not front or bare[:1] == front else front + bare


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
) -> str:
    """The text that the chat template makes of a conversation, without the end of its last turn if that is to go on.

    Raises:
        ModelError: there is no template, or it refuses the conversation; its own words are in the message.
    """
    require_template(tokenizer)
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
        )
    except Exception as error:  # a template raises what it likes
        raise _refused(error) from error
    return str(text)


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = False,
) -> list[int]:
    """Ids of a conversation: what the template writes, special tokens included, and nothing added.

    Raises:
        ModelError: there is no template, or it refuses the conversation.
    """
    text = render_text(tokenizer, messages, tools, add_generation_prompt)
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def render_with_mask(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[Any] | None = None
) -> tuple[list[int], list[int] | None]:
    """Ids of a conversation and which of them lie within the template's generation tags.

    Returns:
        ids [n], and a mask [n] of 0 and 1, or None if the template has no generation tags.

    Raises:
        ModelError: there is no template, it refuses the conversation, or this tokenizer cannot tell characters from
            tokens.
    """
    ids = render(tokenizer, messages, tools)
    if not has_generation_tags(tokenizer):
        return ids, None
    if not tokenizer.is_fast:
        remedy = "leave the tags out of the template; the trained tokens are then found by rendering prefixes"
        raise ModelError("generation tags need a fast tokenizer", where="data.chat_template", remedy=remedy)
    try:
        made: Any = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools) if tools else None,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
    except Exception as error:
        raise _refused(error) from error
    with_mask, mask = list(made["input_ids"]), list(made["assistant_masks"])
    if with_mask != ids:
        raise ModelError("the chat template renders otherwise with generation tags", where="data.chat_template")
    return ids, mask


def has_generation_tags(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template marks what the model is to write ({% generation %})."""
    template = chat_template_of(tokenizer)
    return template is not None and any(
        tag in template for tag in ("{% generation", "{%- generation", "{%generation", "{%-generation")
    )


def chat_template_of(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The template that conversations without tools are rendered with, or None."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        return template.get("default")
    return template


def require_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer without a chat template.

    Raises:
        ModelError: it has none.
    """
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template",
            where="data.chat_template",
            remedy="name a Jinja file there, or use rows of format text or instruct",
        )


def _refused(error: Exception) -> ModelError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return ModelError(f"the chat template refuses this conversation: {reason}", where="data.chat_template")


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase,
    generation_config: GenerationConfig | None = None,
    turn_ends: Iterable[int] = (),
) -> list[int]:
    """Every token at which generation stops, each once, in this order.

    Args:
        tokenizer: gives its EOS.
        generation_config: gives the model's own list.
        turn_ends: tokens with which the chat template ends an assistant turn; the trained ones come first.
    """
    of_config = generation_config.eos_token_id if generation_config is not None else None
    own = of_config if isinstance(of_config, list) else [of_config]
    ids = [*turn_ends, tokenizer.eos_token_id, *own]
    return list(dict.fromkeys(int(token) for token in ids if isinstance(token, int) and token >= 0))


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of everything that decides which ids a row becomes: vocabulary, special tokens, template. 64 hex digits."""
    if tokenizer.is_fast:
        # padding and truncation are settings of the last call, not of the tokenizer
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        backend.pop("padding", None)
        backend.pop("truncation", None)
    else:
        backend = [type(tokenizer).__qualname__, sorted(tokenizer.get_vocab().items()), str(tokenizer.init_kwargs)]
    content = {
        "backend": backend,
        "special": {name: str(value) for name, value in sorted(tokenizer.special_tokens_map.items())},
        "added": {str(index): str(token) for index, token in sorted(tokenizer.added_tokens_decoder.items())},
        "template": tokenizer.chat_template,
    }
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
