"""Templates, stop tokens, one BOS at most, and a hash that tells tokenizers apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import processors
from transformers import GenerationConfig, PreTrainedTokenizerFast

from luthier.errors import ModelError
from luthier.hf.debug.tiny import debug_tokenizer
from luthier.hf.source import resolve
from luthier.hf.tokenizer import (
    encode_text,
    fingerprint,
    load_tokenizer,
    render,
    render_with_mask,
    stop_token_ids,
)

TALK = [{"role": "user", "content": "How are you?"}, {"role": "assistant", "content": "Fine — thanks."}]
TAGGED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
)


def with_bos() -> PreTrainedTokenizerFast:
    """The debug tokenizer made to put a BOS in front and an EOS behind, as Llama's and T5's do."""
    tokenizer = debug_tokenizer()
    bos, eos = ("<|im_start|>", 2), ("<|endoftext|>", 0)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|endoftext|>", special_tokens=[bos, eos]
    )
    tokenizer.bos_token = "<|im_start|>"
    return tokenizer


def test_debug_tokenizer_keeps_every_text() -> None:
    tokenizer = debug_tokenizer()
    for text in ("Hällo, wörld!\n\n", "日本語 🙂", "\x00\u2028 tab\t", ""):
        assert tokenizer.decode(encode_text(tokenizer, text)) == text


def test_text_gets_a_bos_only_from_the_tokenizer_and_never_two() -> None:
    bare = encode_text(debug_tokenizer(), "the town")
    tokenizer = with_bos()
    assert encode_text(tokenizer, "the town") == [2, *bare]
    assert encode_text(tokenizer, "<|im_start|>the town") == [2, *bare]


def test_a_conversation_is_what_the_template_writes() -> None:
    tokenizer = with_bos()
    tokenizer.chat_template = TAGGED
    ids = render(tokenizer, TALK)
    assert ids.count(2) == 1
    assert tokenizer.decode(ids) == "<|im_start|>How are you?\nFine — thanks.<|im_end|>"


def test_generation_tags_give_a_mask() -> None:
    tokenizer = debug_tokenizer()
    assert render_with_mask(tokenizer, TALK)[1] is None
    tokenizer.chat_template = TAGGED
    ids, mask = render_with_mask(tokenizer, TALK)
    assert mask is not None
    trained = [token for token, inside in zip(ids, mask, strict=True) if inside]
    assert tokenizer.decode(trained) == "Fine — thanks.<|im_end|>"


def test_what_a_template_refuses_is_said_in_its_words() -> None:
    tokenizer = debug_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ModelError, match="roles must alternate"):
        render(tokenizer, TALK)


def test_no_template_names_the_remedy(tmp_path: Path) -> None:
    tokenizer = debug_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match=r"data\.chat_template"):
        render(tokenizer, TALK)
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0].content }}")
    mine = load_tokenizer(resolve("debug:llama"), chat_template=str(file))
    assert mine.decode(render(mine, TALK)) == "How are you?"
    with pytest.raises(ModelError, match=r"absent\.jinja"):
        load_tokenizer(resolve("debug:llama"), chat_template=str(tmp_path / "absent.jinja"))


def test_generation_stops_on_all_of_them_once() -> None:
    tokenizer = debug_tokenizer()
    assert stop_token_ids(tokenizer) == [0]
    assert stop_token_ids(tokenizer, GenerationConfig(eos_token_id=[0, 7]), turn_ends=[3]) == [3, 0, 7]


def test_fingerprint_is_of_the_content() -> None:
    first, second = debug_tokenizer(), debug_tokenizer()
    second(["a", "longer one"], padding=True, truncation=True, max_length=4)
    assert fingerprint(first) == fingerprint(second)
    second.chat_template = "{{ messages }}"
    assert fingerprint(first) != fingerprint(second)
    third = debug_tokenizer()
    third.add_tokens(["<new>"])
    assert fingerprint(first) != fingerprint(third)


def test_the_gguf_brings_tokenizer_and_template(smollm2: str) -> None:
    tokenizer = load_tokenizer(resolve(smollm2))
    text = tokenizer.decode(render(tokenizer, TALK))
    assert text.endswith("<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\nFine — thanks.<|im_end|>\n")
    assert stop_token_ids(tokenizer) == [tokenizer.convert_tokens_to_ids("<|im_end|>")]


def test_a_directory_of_a_tokenizer_alone(tmp_path: Path) -> None:
    debug_tokenizer().save_pretrained(str(tmp_path))
    assert not (tmp_path / "config.json").exists()
    loaded = load_tokenizer(resolve("debug:llama"), tokenizer=str(tmp_path))
    assert loaded("Hello there")["input_ids"] == debug_tokenizer()("Hello there")["input_ids"]
    with pytest.raises(ModelError, match=r"^model: the directory .* has no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"^tokenizer: the directory .* has no tokenizer_config\.json"):
        load_tokenizer(resolve("debug:llama"), tokenizer=str(tmp_path / "empty"))
    with pytest.raises(ModelError, match=r"^tokenizer: "):
        load_tokenizer(resolve("debug:llama"), tokenizer="./none/such/place")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        ("{% for m in messages %}\n{{ m.content }}", "is not Jinja: Unexpected end of template"),
        ("{{ messages[0 }}", "is not Jinja"),
        ("{% nonsense %}", "is not Jinja: Encountered unknown tag 'nonsense', in line 1"),
    ],
)
def test_a_template_that_is_none_is_refused_before_any_row(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "t.jinja"
    path.write_text(text)
    with pytest.raises(ModelError, match=r"^data\.chat_template: ") as caught:
        load_tokenizer(resolve("debug:llama"), chat_template=str(path))
    assert told in str(caught.value)
    path.write_text(TAGGED + "{% for m in messages %}{% break %}{% endfor %}")
    assert load_tokenizer(resolve("debug:llama"), chat_template=str(path)).chat_template == path.read_text()
