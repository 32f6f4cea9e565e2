"""Every row of tests/cases/README.md."""

from __future__ import annotations

import re

import pytest

from luthier.errors import DataError

from .conftest import CASES, ids_of, spans, whole

IM_END = "<|im_end|>"


def test_every_case_has_a_test() -> None:
    own = (CASES.parent / "data" / "test_cases.py").read_text()
    readme = (CASES / "README.md").read_text()
    for name in re.findall(r"(?:data|templates)/([\w.]+)", readme):
        assert name in own


def test_byte_order_mark_carriage_returns_and_blank_lines(smol, rows_of):
    rows = rows_of(smol, "bom_crlf_blank.jsonl")
    texts = [whole(smol, rows[index]) for index in range(len(rows))]
    assert texts == [
        "Tune the third string." + IM_END,
        "Plane the top to 2.8 mm." + IM_END,
        "Glue, clamp, wait." + IM_END,
    ]
    assert [rows[index].origin.rpartition(":")[2] for index in range(3)] == ["1", "3", "5"]


@pytest.mark.parametrize(
    ("file", "line", "words", "kept"),
    [
        ("broken_line.jsonl", 3, ["not JSON"], 3),
        ("latin1.jsonl", 2, ["UTF-8", "Latin-1", "0xe9"], 2),
        ("lone_surrogate.jsonl", 2, ["surrogate", "\\ud83d"], 1),
        ("missing_column.jsonl", 2, ["'completion'"], 1),
    ],
)
def test_a_bad_row_is_named_or_skipped_and_counted(smol, rows_of, file, line, words, kept):
    with pytest.raises(DataError) as caught:
        rows_of(smol, file)
    assert caught.value.where == f"{CASES / 'data' / file}:{line}"
    for word in words:
        assert word in str(caught.value)
    rows = rows_of(smol, file, on_bad_row="skip")
    assert len(rows) == kept
    assert rows.report.skipped_rows == 1
    assert rows.report.read == kept + 1
    told = "\n".join(rows.report.lines())
    assert "1 row skipped" in told
    assert f"{file}:{line}" in told
    assert "\ufffd" not in "".join(whole(smol, rows[index]) for index in range(kept))


@pytest.mark.parametrize("file", ["empty.jsonl", "only_blank.jsonl"])
def test_no_rows(smol, rows_of, file):
    with pytest.raises(DataError, match=rf"no rows in .*{file}"):
        rows_of(smol, file)


def test_unicode_separators_stay_inside_the_text(smol, rows_of):
    rows = rows_of(smol, "u2028.jsonl")
    assert len(rows) == 2
    assert whole(smol, rows[0]) == "line\u2028separator\u0085inside" + IM_END


@pytest.mark.parametrize(("file", "empty"), [("null_text.jsonl", 2), ("empty_messages.jsonl", 1)])
def test_empty_rows_are_counted(smol, rows_of, file, empty):
    rows = rows_of(smol, file)
    assert len(rows) == 1
    assert rows.report.empty == empty
    assert "empty" in "\n".join(rows.report.lines())


def test_a_column_nobody_asked_for_changes_nothing(smol, rows_of):
    rows = rows_of(smol, "big_integer.jsonl")
    assert [whole(smol, rows[index]) for index in range(2)] == ["a" + IM_END, "b" + IM_END]


TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_each_row_keeps_its_own_tools(rows_of, with_template):
    tokenizer = with_template(TOOLS_TEMPLATE)
    rows = rows_of(tokenizer, "tools_mixed_schema.jsonl")
    first, second = (whole(tokenizer, rows[index]) for index in range(2))
    assert '"arguments": {"city": "Cremona"}}' in first
    assert '"arguments": {"a": 2, "b": 3}}' in second
    assert '"properties": {"city": {"type": "string"}}, "required": ["city"]' in first
    assert '"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}' in second
    for text in (first, second):
        assert "null" not in text
        assert "None" not in text
    call, answer = spans(tokenizer, rows[0])
    assert call.startswith('{"type": "function"')
    assert call.endswith("}" + IM_END)
    assert answer == "21 degrees." + IM_END


def test_tools_that_the_template_drops_are_refused_by_name(smol, rows_of):
    with pytest.raises(DataError, match="does not render tools"):
        rows_of(smol, "tools_mixed_schema.jsonl")


def test_sharegpt_roles(smol, rows_of):
    rows = rows_of(smol, "sharegpt.json")
    assert whole(smol, rows[0]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nName a wood.<|im_end|>\n"
        "<|im_start|>assistant\nMaple.<|im_end|>\n"
    )
    assert spans(smol, rows[0]) == ["Maple." + IM_END]


def test_alpaca(smol, rows_of):
    rows = rows_of(smol, "alpaca.json")
    first, second = (whole(smol, rows[index]) for index in range(2))
    assert "<|im_start|>user\nName the tool.\n\nIt bends ribs.<|im_end|>" in first
    assert "<|im_start|>user\nName a glue.<|im_end|>" in second
    assert spans(smol, rows[0]) == ["A bending iron." + IM_END]
    assert spans(smol, rows[1]) == ["Hide glue." + IM_END]


def test_alpaca_without_a_chat_template(rows_of, with_template):
    tokenizer = with_template("{{ '' }}")
    tokenizer.chat_template = None
    rows = rows_of(tokenizer, "alpaca.json")
    first, second = (whole(tokenizer, rows[index]) for index in range(2))
    assert "It bends ribs." in first
    assert "Input" in first
    assert "Input" not in second
    assert "\n\n\n" not in second
    assert spans(tokenizer, rows[1]) == ["Hide glue." + IM_END]


def test_tokens_that_merge_across_the_border(smol, rows_of):
    rows = rows_of(smol, "prompt_boundary.jsonl")
    for index, (prompt, completion) in enumerate([("The answer is 12", "34 steps"), ("Say ", " hello")]):
        both = smol(prompt + completion, add_special_tokens=False)["input_ids"]
        alone = smol(prompt, add_special_tokens=False)["input_ids"]
        part = next(i for i in range(len(both)) if i >= len(alone) or alone[i] != both[i])
        ids, sample = ids_of(rows[index]), rows[index]
        assert ids == [*both, smol.eos_token_id]
        assert [i for i in range(1, len(ids)) if sample.weights[i - 1]] == list(range(part, len(ids)))
        assert completion.strip() in spans(smol, sample)[0]


def test_semicolons_doubled_quotes_and_a_newline_in_a_field(smol, rows_of):
    columns = {"prompt": "question", "completion": "answer"}
    for source in ({}, {"columns": columns}):
        rows = rows_of(smol, "odd_columns.csv", source)
        assert len(rows) == 1
        assert whole(smol, rows[0]).startswith('What is "purfling"?An inlaid line;\nnear the edge.')


def test_gzipped_text_with_a_nul(smol, rows_of):
    rows = rows_of(smol, "text.txt.gz")
    texts = [whole(smol, rows[index]) for index in range(len(rows))]
    assert texts == ["First paragraph." + IM_END, "Second paragraph with a NUL \0 byte." + IM_END]


def test_a_directory_with_a_dot_in_its_name(smol, rows_of):
    rows = rows_of(smol, "dir_v1.0")
    assert whole(smol, rows[0]) == "a directory whose name holds a dot" + IM_END


def test_multi_turn_and_chatml(rows_of, with_template):
    tokenizer = with_template("chatml.jinja")
    rows = rows_of(tokenizer, "multi_turn.jsonl")
    assert spans(tokenizer, rows[0]) == ["Choose the wood." + IM_END, "Join the plates." + IM_END]
    assert rows.stop_ids == [tokenizer.convert_tokens_to_ids(IM_END)]


def test_terminator_in_next_turn(rows_of, with_template):
    tokenizer = with_template("terminator_in_next_turn.jinja")
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    rows = rows_of(tokenizer, "multi_turn.jsonl")
    assert spans(tokenizer, rows[0]) == ["Choose the wood.<|user|>", "Join the plates.<|user|>"]
    assert ids_of(rows[0])[-1] == user
    assert rows.stop_ids == [user]


@pytest.mark.parametrize("file", ["multi_turn.jsonl", "sharegpt.json"])
def test_bos_in_template_stands_once(rows_of, with_template, file):
    tokenizer = with_template("bos_in_template.jinja")
    tokenizer.bos_token = "<|endoftext|>"
    rows = rows_of(tokenizer, file)
    ids = ids_of(rows[0])
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
    assert all(span.endswith(IM_END) for span in spans(tokenizer, rows[0]))
    # this template has no place for a system message, which is said
    assert "system text that the chat template leaves out" in "\n".join(rows.report.lines())


def test_default_system_stands_once_and_is_not_trained_on(rows_of, with_template):
    tokenizer = with_template("default_system.jinja")
    for file, system in (("multi_turn.jsonl", "You build violins."), ("empty_messages.jsonl", "You are a helpful")):
        sample = rows_of(tokenizer, file)[0]
        assert whole(tokenizer, sample).count("<|im_start|>system") == 1
        assert system in whole(tokenizer, sample)
        assert not any("<|im_start|>" in span or "You" in span for span in spans(tokenizer, sample))
