"""Which tokens of a conversation train: templates of the kinds that models have, with and without generation tags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trl

from luthier.config.sections import SourceConfig
from luthier.data.formats.chat import ChatFormat
from luthier.data.mask import Masker
from luthier.data.report import BadRow
from luthier.errors import DataError
from luthier.hf.render import Encoder

from .conftest import ids_of, spans, whole

HEAD = "{{ '<|im_start|>' + m.role + '\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = "{% for m in messages %}" + HEAD + "{{ m.content + '<|im_end|>\n' }}{% endfor %}" + PROMPT
THINKING = (  # Qwen3's way: thinking only in the last turn, and a think block of its own there
    "{% for m in messages %}" + HEAD + "{% set c = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n' + (m.content.split('</think>')[0].split('<think>')[-1]"
    " if '</think>' in m.content else '\n') + '</think>\n\n' }}{% endif %}"
    "{{ c + '<|im_end|>\n' }}{% endfor %}" + PROMPT
)
THINK_FIRST = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ '<|im_end|>' }}{% endif %}"
)
ONLY_AT_THE_END = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% if loop.last and m.role == 'assistant' %}"
    "{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
USER_FIRST = "{% if messages[0].role == 'assistant' %}{{ raise_exception('a user must begin') }}{% endif %}" + CHATML
NEEDS_A_MESSAGE = "{% set first = messages[0].role + '' %}" + CHATML
NO_PROMPT = CHATML.removesuffix(PROMPT)
TRIMMED = CHATML.replace("m.content +", "m.content | trim +")
SPACED = "{% for m in messages %}{{ '[' + m.role + '] ' + m.content + ' ' + eos_token }}{% endfor %}"
SEVERAL = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "First."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Second."},
]
E = "<|im_end|>"


def masked(tokenizer: Any, messages: list[dict[str, Any]], tools: Any = None, **source: Any) -> Any:
    row = {"messages": messages} | ({"tools": tools} if tools else {})
    made = ChatFormat(tokenizer, SourceConfig(path="x", **source))(row)
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (CHATML, ["First." + E, "Second." + E]),
        (TRIMMED, ["First." + E, "Second." + E]),
        (THINKING, ["First." + E, "<think>\n\n</think>\n\nSecond." + E]),
        (THINK_FIRST, ["First." + E, "Second." + E]),
        (PHI, ["First.<|end|>", "Second.<|end|>"]),
        (ONLY_AT_THE_END, ["First.<|user|>", "Second." + E]),
        (USER_FIRST, ["First." + E, "Second." + E]),
        (NEEDS_A_MESSAGE, ["First." + E, "Second." + E]),
        # without a generation prompt the model has to write the header itself when it is asked
        (NO_PROMPT, ["<|im_start|>assistant\nFirst." + E, "<|im_start|>assistant\nSecond." + E]),
        (SPACED, ["[assistant] First. " + E, "[assistant] Second. " + E]),
    ],
    ids=range(10),
)
def test_derived_spans(with_template, template, wanted):
    tokenizer = with_template(template)
    assert spans(tokenizer, masked(tokenizer, SEVERAL)) == wanted


def test_the_rendering_is_that_of_transformers(with_template):
    for template in (CHATML, THINKING, PHI):
        tokenizer = with_template(template)
        plain = tokenizer.apply_chat_template(SEVERAL, tokenize=True, return_dict=True)["input_ids"]
        assert ids_of(masked(tokenizer, SEVERAL)) == list(plain)


def test_a_conversation_that_the_assistant_opens(with_template):
    opening = [{"role": "assistant", "content": "Welcome."}, *SEVERAL]
    for template in (CHATML, NEEDS_A_MESSAGE):
        tokenizer = with_template(template)
        assert spans(tokenizer, masked(tokenizer, opening)) == ["Welcome." + E, "First." + E, "Second." + E]
    tokenizer = with_template(USER_FIRST)
    with pytest.raises(BadRow, match="a user must begin"):
        masked(tokenizer, opening)


def test_content_that_looks_like_a_turn_end(with_template):
    tokenizer = with_template(CHATML)
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": f"Write {E}\n and go on."}]
    assert spans(tokenizer, masked(tokenizer, messages)) == [f"Write {E}\n and go on.{E}"]
    tokenizer = with_template(THINKING)
    with pytest.raises(BadRow, match=r"message 2 .* the very token that ends turns"):
        masked(tokenizer, [*messages, *SEVERAL])


def test_refused_by_name(with_template):
    tokenizer = with_template("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}")
    with pytest.raises(DataError, match="no special token, so generation could never stop"):
        ChatFormat(tokenizer, SourceConfig(path="x"))
    reversed_turns = (
        "{% for m in messages | reverse %}" + HEAD + "{{ m.content + '<|im_end|>\n' }}{% endfor %}" + PROMPT
    )
    tokenizer = with_template(reversed_turns)
    with pytest.raises(BadRow, match=r"message [24] "):
        masked(tokenizer, SEVERAL)
    tokenizer = with_template("{% for m in messages[-1:] %}" + HEAD + "{{ m.content + '<|im_end|>\n' }}{% endfor %}")
    with pytest.raises(BadRow, match=r"leaves out what message 1 \(user\) says"):
        masked(tokenizer, SEVERAL)


CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
OTHER = {"type": "function", "function": {"name": "f", "arguments": {"a": 2}}}
CALLS = "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}"


@pytest.mark.parametrize(
    ("said", "messages", "why"),
    [
        # what is left out also stands elsewhere: looking for its text would find it there
        ("{% if m.role != 'tool' %}{{ m.content }}{% endif %}", [("tool", "42", [])], r"what message 2 \(tool\) says"),
        ("{{ m.content if not m.tool_calls }}" + CALLS, [("assistant", "f", [CALL])], r"message 2 \(assistant\) says"),
        ("{{ m.content }}{{ m.tool_calls[0] if m.tool_calls }}", [("assistant", "a", [CALL, OTHER])], "call 2 of"),
        (
            "{{ m.content }}{% if loop.last %}" + CALLS + "{% endif %}",
            [("assistant", "a", [CALL])],
            "render tool_calls",
        ),
        (
            "{{ m.content }}{% if loop.index == 2 %}" + CALLS + "{% endif %}",
            [("assistant", "a", [CALL]), ("tool", "b", []), ("assistant", "c", [CALL])],
            "render tool_calls",
        ),
    ],
)
def test_nothing_is_lost_because_it_looks_like_something_else(with_template, said, messages, why):
    last = {"role": "assistant", "content": "It is 42, says f."}
    made = [{"role": role, "content": content, "tool_calls": calls} for role, content, calls in messages]
    row = [{"role": "user", "content": "What is f?"}, *made, last]
    body = "{% for m in messages %}" + HEAD + "SAID{{ '<|im_end|>\n' }}{% endfor %}" + PROMPT
    with pytest.raises(BadRow, match=why):
        masked(with_template(body.replace("SAID", said)), row)
    whole_template = with_template(body.replace("SAID", "{{ m.content }}" + CALLS))
    assert spans(whole_template, masked(whole_template, row))[-1] == last["content"] + E


def test_a_template_that_reads_what_is_said_loses_nothing_by_that(with_template):
    """No mark comes out of one that takes a part of what is said, or refuses what is longer."""
    short = "{% if m.content | length > 12 %}{{ raise_exception('too long') }}{% endif %}{{ m.content }}"
    row = [{"role": "user", "content": "yes#or no"}, {"role": "assistant", "content": "no"}]
    for said in (short, "{{ m.content[:3] }}", "{{ m.content.split('#')[0] }}"):
        tokenizer = with_template(CHATML.replace("{{ m.content + '", said + "{{ '"))
        assert spans(tokenizer, masked(tokenizer, row)) == ["no" + E]


TAGGED = (
    "{% for m in messages %}"
    + HEAD
    + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}TAIL{% endgeneration"
    " %}REST{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}" + PROMPT
)


@pytest.mark.parametrize(("inside", "after"), [("{{ '<|im_end|>' }}", "{{ '\n' }}"), ("", "{{ '<|im_end|>\n' }}")])
def test_generation_tags_win_and_the_turn_end_is_always_trained(with_template, inside, after):
    tokenizer = with_template(TAGGED.replace("TAIL", inside).replace("REST", after))
    sample = masked(tokenizer, SEVERAL)
    assert spans(tokenizer, sample) == ["First." + E, "Second." + E]
    left_out = [{**m, "weight": 0} if m["content"] == "First." else m for m in SEVERAL]
    assert spans(tokenizer, masked(tokenizer, left_out)) == ["Second." + E]


def test_generation_tags_around_part_of_what_is_derived(with_template):
    only_last = CHATML.replace(
        "{{ m.content + '<|im_end|>\n' }}",
        (
            "{% if loop.last %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
            "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}"
        ),
    )
    tokenizer = with_template(only_last)
    assert spans(tokenizer, masked(tokenizer, SEVERAL)) == ["Second." + E]
    with pytest.raises(BadRow, match="1 generated spans for 2 assistant messages"):
        masked(tokenizer, [{**m, "weight": 0} if m["content"] == "First." else m for m in SEVERAL])


def test_weights_of_messages(with_template):
    tokenizer = with_template(CHATML)
    for weights, wanted in (
        ((0, 1), ["Second." + E]),
        ((1, 0), ["First." + E]),
        ((None, 0), ["First." + E]),
        ((0.0, 1.0), ["Second." + E]),
    ):
        messages = [dict(message) for message in SEVERAL]
        messages[1]["weight"], messages[3]["weight"] = weights
        assert spans(tokenizer, masked(tokenizer, messages)) == wanted
    for place, weight, words in ((1, 0.5, "neither 0 nor 1"), (0, 1, "only assistant messages")):
        messages = [dict(message) for message in SEVERAL]
        messages[place]["weight"] = weight
        with pytest.raises(BadRow, match=words):
            masked(tokenizer, messages)


@pytest.mark.parametrize("template", [CHATML, "terminator_in_next_turn.jinja"], ids=["own", "next"])
def test_train_on_input(with_template, template):
    tokenizer = with_template(template)
    sample = masked(tokenizer, SEVERAL, train_on_input=True)
    assert ids_of(sample) == ids_of(masked(tokenizer, SEVERAL))
    assert sample.weights.all()
    for turn in (1, 3):
        messages = [dict(message) for message in SEVERAL]
        messages[turn]["weight"] = 0
        sample = masked(tokenizer, messages, train_on_input=True)
        text = "".join(spans(tokenizer, sample))
        assert ("First." in text, "Second." in text) == (turn == 3, turn == 1)
        assert "One?" in text


def test_an_assistant_turn_without_a_word_is_not_trained_on(with_template):
    tokenizer = with_template(CHATML)
    messages = [*SEVERAL[:3], {"role": "assistant", "content": " "}]
    assert spans(tokenizer, masked(tokenizer, messages)) == ["First." + E]
    empty = ChatFormat(tokenizer, SourceConfig(path="x"))
    assert empty({"messages": [SEVERAL[0], {"role": "assistant", "content": ""}]}) is None
    assert empty({"messages": [{"role": "system", "content": "S"}]}) is None


def test_stop_tokens_are_those_that_ended_turns(with_template):
    harmony = (  # earlier turns end otherwise than the last one, and the end of earlier ones stands inside a turn too
        "{% for m in messages %}{{ '<|start|>' + m.role + '<|message|>' + m.content }}"
        "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    tokenizer = with_template(harmony)
    made = ChatFormat(tokenizer, SourceConfig(path="x"))
    sample = made({"messages": SEVERAL})
    assert spans(tokenizer, sample) == ["<|message|>First.<|end|>", "<|message|>Second.<|return|>"]
    assert made.stop_ids == {tokenizer.convert_tokens_to_ids("<|return|>")}


def test_pad_and_eos_are_one_token_and_the_eos_is_trained_on(smol):
    assert smol.pad_token_id == smol.eos_token_id
    assert spans(smol, masked(smol, SEVERAL)) == ["First." + E, "Second." + E]


def test_history_that_the_template_rewrites(with_template):
    # tool turns of earlier questions lose their think block once another question follows
    template = (
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}"
        "{% endif %}{% endfor %}{% for m in messages %}"
        + HEAD
        + "{% if m.role == 'assistant' and loop.index0 > ns.last %}"
        "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}" + PROMPT
    )
    tokenizer = with_template(template)
    messages = [
        *SEVERAL[:2],
        {"role": "tool", "content": "21"},
        {"role": "assistant", "content": "Then."},
        *SEVERAL[2:],
    ]
    found = spans(tokenizer, masked(tokenizer, messages))
    assert found == ["First." + E, "Then." + E, "<think>\n\n</think>\n\nSecond." + E]


TRL_TEMPLATES = Path(trl.__file__).parent / "chat_templates"


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507", "gemma3", "phi3", "llama3", "cohere", "glm4moe"])
def test_against_the_masks_of_trl(with_template, name):
    """TRL carries the templates of many models twice: as they are, and with generation tags put in by hand."""
    plain = with_template((TRL_TEMPLATES / f"{name}.jinja").read_text())
    tagged = with_template((TRL_TEMPLATES / f"{name}_training.jinja").read_text())
    derived = spans(plain, masked(plain, SEVERAL))
    marked = spans(tagged, masked(tagged, SEVERAL))
    assert len(derived) == 2
    # TRL counts a newline of the header in with some models, and an EOS after the end of the turn with others
    assert [text.strip() for text in derived] == [text.strip().removesuffix("\n" + E) for text in marked]


def test_pieces_are_encoded_as_the_whole_is(with_template):
    tokenizer = with_template("terminator_in_next_turn.jinja")
    encoder = Encoder(tokenizer)
    for message in ("  two  spaces", "\n\nlines\n", "ünï🎻", "12345", "", "<|im_end|>x", "a<|user|><|user|> b"):
        text = f"<|user|>\n{message}<|assistant|>{message}"
        assert encoder.encode_rendered(text) == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert encoder.encode_rendered(text) == encoder.encode(text)


def test_a_tokenizer_that_cannot_be_cut_is_not(with_template):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.0), ("a", -1.5), ("▁", -2.0)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    encoder = Encoder(tokenizer)
    for text in ("a</s>a a</s> a", "</s>a", "a"):
        assert encoder.encode_rendered(text) == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_whole_is_what_was_rendered(with_template):
    tokenizer = with_template(CHATML)
    rendered = Masker(Encoder(tokenizer)).text(SEVERAL, None)
    assert whole(tokenizer, masked(tokenizer, SEVERAL)) == rendered
