"""Rows to samples: text, instruct, random, a format of one's own; formats told from columns; what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from luthier.batch import Sample
from luthier.config.sections import DataConfig, SourceConfig
from luthier.data.formats import detect, make_format
from luthier.data.report import BadRow
from luthier.data.rows import build_rows
from luthier.errors import ConfigError, DataError, ModelError, UserError

from .conftest import ids_of, spans, whole

EOS = "<|endoftext|>"


@pytest.mark.parametrize(
    ("columns", "wanted"),
    [
        ("text", "text"),
        ("text id", "text"),
        ("messages", "chat"),
        ("conversations id", "chat"),
        ("messages tools prompt", "chat"),
        ("prompt completion", "instruct"),
        ("instruction input output", "instruct"),
        ("instruction output", "instruct"),
        ("question answer", "instruct"),
        ("prompt response", "instruct"),
    ],
)
def test_formats_are_told_from_columns(columns, wanted):
    assert detect(columns.split(), SourceConfig(path="x")) == wanted


@pytest.mark.parametrize(
    ("columns", "source", "words"),
    [
        ("body title", {}, ["no format fits", "body, title", "messages", "data.*.column"]),
        ("text messages", {}, ["chat and text", "data.*.format"]),
        ("instruction output text", {}, ["instruct and text"]),
        ("body", {"column": "text"}, ["no column 'text'", "body"]),
        ("", {}, ["no format fits"]),
    ],
)
def test_columns_that_tell_nothing(columns, source, words):
    with pytest.raises(DataError) as caught:
        detect(columns.split(), SourceConfig(path="x", **source))
    for word in words:
        assert word in str(caught.value)


def test_columns_of_ones_own(tiny, rows_of):
    assert whole(tiny, rows_of(tiny, [{"body": "a b"}], {"column": "body"})[0]) == "a b" + EOS
    mapped = rows_of(tiny, [{"q": "2+2?", "a": "4"}], {"columns": {"prompt": "q", "completion": "a"}})
    assert spans(tiny, mapped[0]) == ["4" + EOS]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chat = rows_of(tiny, [{"dialog": turns}], {"format": "chat", "column": "dialog"})
    assert spans(tiny, chat[0]) == ["b<|im_end|>"]
    with pytest.raises(ConfigError, match=r"no field 'answer'.*completion"):
        rows_of(tiny, [{"q": "a"}], {"columns": {"answer": "q"}})


def test_the_first_row_may_be_the_bad_one(tiny, rows_of):
    rows = [{"prompt": "a"}, {"prompt": "b", "completion": "c"}]
    with pytest.raises(DataError, match=r":1: there is no column 'completion' \(columns: prompt\)"):
        rows_of(tiny, rows)
    assert len(rows_of(tiny, rows, on_bad_row="skip")) == 1


def test_text_ends_with_one_eos_which_is_trained_on(tiny, smol, rows_of):
    for tokenizer in (tiny, smol):
        rows = rows_of(tokenizer, [{"text": "One."}, {"text": "Two." + tokenizer.eos_token}])
        for sample in (rows[0], rows[1]):
            ids = ids_of(sample)
            assert ids.count(tokenizer.eos_token_id) == 1
            assert ids[-1] == tokenizer.eos_token_id
            assert sample.weights.all()
        assert rows.stop_ids == [tokenizer.eos_token_id]


def test_text_begins_with_the_bos_that_the_tokenizer_adds(tiny, rows_of):
    from tokenizers.processors import TemplateProcessing

    bos = tiny.bos_token
    tiny.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A {bos}", special_tokens=[(bos, tiny.bos_token_id)]
    )
    rows = rows_of(tiny, [{"text": "One."}, {"text": bos + "Two."}])
    assert [whole(tiny, rows[index]) for index in range(2)] == [f"{bos}One.{bos}", f"{bos}Two.{bos}"]
    pair = rows_of(tiny, [{"prompt": "One.", "completion": "Two."}])
    assert whole(tiny, pair[0]) == f"{bos}One.Two.{bos}"
    assert spans(tiny, pair[0]) == ["Two." + bos]


@pytest.mark.parametrize("row", [{"text": None}, {"text": ""}, {"text": " \n"}])
def test_no_eos_alone(tiny, rows_of, row):
    rows = rows_of(tiny, [row, {"text": "kept"}])
    assert (len(rows), rows.report.empty, rows.report.read) == (1, 1, 2)


@pytest.mark.parametrize(
    ("row", "source", "words"),
    [
        ({"text": 3}, {}, "holds int, not text"),
        ({"messages": "nonsense"}, {}, "not JSON"),
        ({"messages": {"role": "user"}}, {}, "no list of messages"),
        ({"messages": ["hello"]}, {}, "no object with role and content"),
        ({"messages": [{"content": "x"}]}, {}, "no role (keys: content)"),
        ({"messages": [{"role": "user", "content": 4}]}, {}, "neither text nor a list of parts"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, {}, "'image'; only text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]}, {}, "are not JSON"),
        ({"messages": [{"role": "assistant", "tool_calls": {"name": "x"}}]}, {}, "no list of objects"),
        ({"messages": [], "tools": "{"}, {}, "'tools' holds text that is not JSON"),
        ({"messages": [], "tools": {"a": 1}}, {}, "no list of tools"),
        # JSON in a column is read as strictly as JSON in a file
        ({"messages": '[{"role": "user", "role": "tool"}]'}, {}, "key 'role' stands there twice"),
        ({"messages": "[" * 9000}, {}, "nested too deeply"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"arguments": '{"a":1,"a":2}'}]}]}, {}, "'a' stands"),
        ({"prompt": "a", "completion": 4}, {}, "'completion' holds int"),
        ({"conversations": [{"from": "function_call", "value": "hm"}]}, {}, "not JSON"),
    ],
)
def test_values_that_cannot_be_used_are_named(tiny, rows_of, row, source, words):
    with pytest.raises(DataError) as caught:
        rows_of(tiny, [{"text": "fine"}, row] if "text" in row else [row], source)
    assert words in str(caught.value)
    assert "rows.jsonl:" in str(caught.value.where)


def test_half_a_surrogate_pair_is_refused_wherever_it_is_used(tiny, rows_of):
    turns = [{"role": "user", "content": "\ud83d"}, {"role": "assistant", "content": "b"}]
    for row in ({"text": "a\udc00"}, {"prompt": "\ud83d", "completion": "b"}, {"messages": turns}):
        with pytest.raises(DataError, match="surrogate"):
            rows_of(tiny, [row])
    unused = rows_of(tiny, [{"text": "a", "id": "\ud83d"}, {"text": "🎻", "id": ""}])
    assert len(unused) == 2


def test_parts_of_text_and_weights_and_calls(tiny, rows_of):
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "now?"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "One."},
    ]
    sample = rows_of(tiny, [{"messages": turns}])[0]
    assert "What now?" in whole(tiny, sample)
    call, answer = spans(tiny, sample)
    assert '"arguments": {"x": 1}' in call
    assert answer == "One.<|im_end|>"


def test_a_template_that_wants_arguments_as_text(tiny, rows_of):
    pasted = "{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}{% for c in m.tool_calls or [] %}"
    tiny.chat_template = (
        "{% for m in messages %}" + pasted + "{{ c.function.name + c.function.arguments }}{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    calls = [{"function": {"name": "f", "arguments": {"x": 1}}}]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    assert spans(tiny, rows_of(tiny, [{"messages": turns}])[0]) == ['f{"x": 1}<|im_end|>']


def test_sharegpt_with_function_calls(tiny, rows_of):
    turns = [
        {"from": "human", "value": "Weather?"},
        {"from": "function_call", "value": '{"name": "w", "arguments": {"city": "C"}}'},
        {"from": "observation", "value": "21"},
        {"from": "gpt", "value": "Warm."},
    ]
    sample = rows_of(tiny, [{"conversations": turns, "system": "Be brief."}])[0]
    text = whole(tiny, sample)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert "<|im_start|>tool\n21<|im_end|>" in text
    assert '"name": "w"' in spans(tiny, sample)[0]


def test_system_prompt_for_rows_that_have_none(tiny, rows_of):
    own = [
        {"role": "system", "content": "Own."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    rows = rows_of(tiny, [{"messages": own}, {"messages": own[1:]}], {"system_prompt": "Given."})
    assert ["Own." in whole(tiny, rows[0]), "Given." in whole(tiny, rows[0])] == [True, False]
    assert "<|im_start|>system\nGiven.<|im_end|>" in whole(tiny, rows[1])
    alpaca = rows_of(tiny, [{"instruction": "a", "output": "b"}], {"system_prompt": "Given."})
    assert whole(tiny, alpaca[0]).startswith("<|im_start|>system\nGiven.<|im_end|>")
    plain = rows_of(tiny, [{"prompt": "a", "completion": "b"}], {"system_prompt": "Given."})
    assert whole(tiny, plain[0]) == "Given.\n\nab" + EOS


@pytest.mark.parametrize(
    ("row", "template", "text", "trained"),
    [
        ({"prompt": "Q:", "completion": " a"}, None, "Q: a" + EOS, [" a" + EOS]),
        ({"prompt": "", "completion": "a b"}, None, "a b" + EOS, [" b" + EOS]),
        (
            {"prompt": "Q", "completion": "a"},
            "chat",
            "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n",
            ["a<|im_end|>"],
        ),
        (
            {"instruction": "Q", "input": None, "output": "a"},
            None,
            "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n",
            ["a<|im_end|>"],
        ),
        (
            {"instruction": "Q", "input": "in", "output": "a"},
            "plain",
            "### Instruction:\nQ\n\n### Input:\nin\n\n### Response:\na" + EOS,
            ["a" + EOS],
        ),
    ],
)
def test_instruct_layouts(tiny, rows_of, row, template, text, trained):
    sample = rows_of(tiny, [row], {"options": {"template": template} if template else {}})[0]
    assert whole(tiny, sample) == text
    assert spans(tiny, sample) == trained
    everything = rows_of(tiny, [row], {"options": {"template": template} if template else {}, "train_on_input": True})
    assert everything[0].weights.all()


def test_prompt_and_completion_as_messages(tiny, rows_of):
    row = {
        "prompt": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ],
        "completion": [{"role": "assistant", "content": "d"}],
    }
    rows = rows_of(tiny, [row, {**row, "completion": []}])
    assert spans(tiny, rows[0]) == ["d<|im_end|>"]
    assert rows.report.empty == 1
    with pytest.raises(DataError, match="no column 'completion'"):
        rows_of(tiny, [row, {"prompt": row["prompt"]}])


def test_chat_needs_a_chat_template(tiny, rows_of):
    tiny.chat_template = None
    with pytest.raises((DataError, ModelError), match="no chat template"):
        rows_of(tiny, [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}])
    with pytest.raises((DataError, ModelError), match="no chat template"):
        rows_of(tiny, [{"prompt": "a", "completion": "b"}], {"options": {"template": "chat"}})
    with pytest.raises(ConfigError, match="neither chat nor plain"):
        rows_of(tiny, [{"prompt": "a", "completion": "b"}], {"options": {"template": "html"}})


class Doubles:
    """A format of one's own: the ids of a column, once as they are and once reversed."""

    def __init__(self, tokenizer, source):
        self.column = source.options["column"]
        self.stop_ids = {7}

    def __call__(self, row):
        ids = row[self.column]
        if not ids:
            return None
        if min(ids) < 0:
            raise ValueError("ids below 0")
        return [Sample.from_ids(ids, [1.0] * len(ids)), Sample.from_ids(ids[::-1], [0.5] * len(ids))]


def test_a_format_of_ones_own(tiny, rows_of, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "own_format", type(sys)("own_format"))
    sys.modules["own_format"].Doubles = Doubles
    source = {"format": "own_format:Doubles", "options": {"column": "ids"}}
    rows = rows_of(tiny, [{"ids": [1, 2, 3]}, {"ids": []}, {"ids": [4, 5]}], source)
    assert [ids_of(rows[index]) for index in range(4)] == [[1, 2, 3], [3, 2, 1], [4, 5], [5, 4]]
    assert rows[1].weights.tolist() == [0.5, 0.5]
    assert (rows.report.empty, rows.stop_ids) == (1, [7])
    with pytest.raises(DataError, match=r"rows.jsonl:1: the format refuses the row \(ids below 0\)"):
        rows_of(tiny, [{"ids": [-1]}], source)


@pytest.mark.parametrize(
    ("gives", "words"),
    [
        (lambda row: row["ids"]["no"], r"rows.jsonl:1: format own_format:Own raises TypeError: "),
        (lambda row: row["label"], r"rows.jsonl:1: format own_format:Own raises KeyError: 'label'; mend the format"),
        (lambda row: row, "gives a dict, where a Sample, a list of them or None belongs"),
        (lambda row: [Sample.from_ids([1, 2], [1.0, 1.0]), None], "gives a NoneType, where"),
        (lambda row: Sample.from_ids([1.5, 2.5], [1.0, 1.0]), "refuses the row .ids are float64, not whole numbers"),
        (lambda row: Sample.from_ids([1, 2], [1.0, math.nan]), "weights that are not finite"),
    ],
)
def test_a_format_of_ones_own_that_goes_wrong_is_named_with_the_row(tiny, rows_of, monkeypatch, gives, words):
    import sys

    class Own:
        def __init__(self, tokenizer, source):
            pass

        def __call__(self, row):
            return gives(row)

    monkeypatch.setitem(sys.modules, "own_format", type(sys)("own_format"))
    sys.modules["own_format"].Own = Own
    with pytest.raises(DataError, match=words):
        rows_of(tiny, [{"ids": [1, 2]}], {"format": "own_format:Own"})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("chatml", "no format 'chatml'"),
        ("luthier_no_such:Thing", "cannot be imported"),
        ("luthier.batch:Nothing", "cannot be imported"),
        ("luthier.batch:Sample", "cannot be made"),
        (":Thing", "there is no format ':Thing'"),
        ("luthier.batch:", "there is no format 'luthier.batch:'"),
    ],
)
def test_formats_that_there_are_not(tiny, name, words):
    with pytest.raises(ConfigError, match=words):
        make_format(name, tiny, SourceConfig(path="x"))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"options": {"tempalte": "chat"}}, "format text has no option 'tempalte'"),
        ({"format": "text", "columns": {"prompt": "text"}}, "no column map"),
        ({"format": "instruct", "column": "text"}, "not one column"),
        ({"subset": "a"}, "only a data set of the Hub"),
        ({"split": "test"}, "only a data set of the Hub"),
    ],
)
def test_settings_that_would_not_be_looked_at_are_refused(tiny, rows_of, source, words):
    with pytest.raises(ConfigError, match=words):
        rows_of(tiny, [{"text": "a"}], source)


def test_random_rows(tiny):
    options = {"minimum": 4, "maximum": 9, "masked": 0.5}
    data = DataConfig(train=[{"path": "random", "format": "random", "rows": 200, "options": options}])
    rows, again = build_rows(data, "train", tiny), build_rows(data, "train", tiny)
    assert len(rows) == 200
    assert set(rows.lengths) == set(range(4, 10))
    for index in (0, 5, 199):
        sample = rows[index]
        assert sample.tokens.max() < len(tiny)
        assert int((sample.weights == 0).sum()) == len(sample) // 2
        np.testing.assert_array_equal(sample.tokens, again[index].tokens)
    for bad in ({"minimum": 1}, {"masked": 1.0}, {"colour": 1}, {"maximum": "many"}):
        with pytest.raises(UserError):
            make_format("random", tiny, SourceConfig(path="x", options=bad))


@pytest.mark.parametrize(
    ("policy", "lengths", "counts"),
    [
        ("truncate", [2, 4, 4], {"truncated": 2, "cut_tokens": 3, "kept": 3}),
        ("drop", [2], {"dropped": 2, "kept": 1}),
        ("split", [2, 4, 1, 4, 2], {"split": 2, "kept": 5}),
    ],
)
def test_length_policies(tiny, rows_of, policy, lengths, counts):
    texts = ["ab", "abcde", "abcdef"]
    tiny.backend_tokenizer.model.dropout = 1.0  # one token a byte
    rows = rows_of(tiny, [{"text": text} for text in texts], sequence_length=4, too_long=policy)
    assert list(rows.lengths) == lengths
    for name, count in counts.items():
        assert getattr(rows.report, name) == count
    assert rows.report.tokens == sum(lengths)
    if policy == "split":
        pieces = [rows[index] for index in range(1, 3)]
        joined = np.concatenate([piece.targets for piece in pieces])
        assert tiny.decode(joined) == "bcde" + EOS
    told = "\n".join(rows.report.lines())
    assert "2 rows" in told
    assert "rows.jsonl:2" in told


def test_a_row_too_long_raises_by_name(tiny, rows_of):
    tiny.backend_tokenizer.model.dropout = 1.0  # one token a byte
    with pytest.raises(DataError, match=r"rows.jsonl:2: the row has 8 tokens, more than the sequence length 4"):
        rows_of(tiny, [{"text": "a"}, {"text": "abcdefgh"}], sequence_length=4, too_long="raise")


def test_rows_whose_trained_tokens_are_all_cut_are_counted(tiny, rows_of):
    rows = [
        {"prompt": "many words in the prompt of this row " * 3, "completion": "x"},
        {"prompt": "a", "completion": "b"},
    ]
    made = rows_of(tiny, rows, sequence_length=8)
    assert (len(made), made.report.untrained, made.report.truncated) == (1, 1, 1)
    assert "no trained tokens left" in "\n".join(made.report.lines())
    with pytest.raises(DataError, match=r"no rows are left to be used .*no trained tokens left"):
        rows_of(tiny, rows[:1], sequence_length=8)


def test_bad_row_says_where(tiny):
    fault = BadRow("is wrong", reason="wrong", remedy="mend it").at("a.jsonl:3")
    assert str(fault) == "a.jsonl:3: is wrong; mend it"
    assert fault.reason == "wrong"


def test_roles_in_any_case(tiny, rows_of):
    rows = rows_of(tiny, [{"messages": [{"role": "Human", "content": "a"}, {"role": "ASSISTANT", "content": "b"}]}])
    assert spans(tiny, rows[0]) == ["b<|im_end|>"]
    rows = rows_of(tiny, [{"conversations": [{"from": "Human", "value": "a"}, {"from": "GPT", "value": "b"}]}])
    assert spans(tiny, rows[0]) == ["b<|im_end|>"]
    assert "<|im_start|>user" in whole(tiny, rows[0])


def test_what_a_message_says_under_another_name_is_not_taken_for_nothing(tiny, rows_of):
    for row in (
        {"conversations": [{"from": "human", "text": "a"}, {"from": "gpt", "text": "b"}]},
        {"messages": [{"role": "user", "value": "a"}, {"role": "assistant", "value": "b"}]},
    ):
        with pytest.raises(DataError, match=r"message 1 of column '\w+' has no content \(keys: "):
            rows_of(tiny, [row])
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(DataError, match="'messages' and 'conversations' both hold messages; say which with data"):
        rows_of(tiny, [{**row, "conversations": row["messages"]}])
    assert len(rows_of(tiny, [{**row, "conversations": None}])) == 1


def test_calls_as_openai_once_wrote_them(tiny, rows_of):
    call = {"name": "f", "arguments": '{"a": 1}'}
    old = {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "function_call": call},
            {"role": "assistant", "content": "c", "function_call": None},
        ],
        "functions": [{"name": "f", "parameters": {}}],
    }
    new = {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]},
            {"role": "assistant", "content": "c"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    }
    assert ids_of(rows_of(tiny, [old])[0]) == ids_of(rows_of(tiny, [new])[0])
    with pytest.raises(DataError, match="the function_call of message 1 has no name"):
        rows_of(tiny, [{"messages": [{"role": "assistant", "function_call": "f"}]}])


def test_reasoning_that_the_template_leaves_out_is_said(tiny, rows_of):
    asked = {"role": "user", "content": "a"}
    rows = rows_of(tiny, [{"messages": [asked, {"role": "assistant", "content": "b", "reasoning_content": "since"}]}])
    assert rows.report.remarks == {"with reasoning that the chat template leaves out": 1}
    assert spans(tiny, rows[0]) == ["b<|im_end|>"]
    # nothing but reasoning, and that left out: the turn would teach the model to stop at once
    with pytest.raises(DataError, match="no trained tokens left"):
        rows_of(tiny, [{"messages": [asked, {"role": "assistant", "content": "", "reasoning_content": "since"}]}])


def test_instruct_rows_with_columns_of_several_data_sets(tiny, rows_of):
    rows = rows_of(tiny, [{"prompt": "a", "completion": "b", "response": "c"}])
    assert whole(tiny, rows[0]) == f"ab{EOS}"
    rows = rows_of(tiny, [{"instruction": "a", "context": "ctx", "response": "b"}])
    assert "a\n\nctx<|im_end|>" in whole(tiny, rows[0])
    row = {"instruction": "a", "output": "b"}
    assert len(rows_of(tiny, [{**row, "history": []}])) == 1
    with pytest.raises(DataError, match="column 'history' holds earlier turns"):
        rows_of(tiny, [{**row, "history": [["x", "y"]]}])
    with pytest.raises(DataError, match="chat if it holds messages"):
        rows_of(tiny, [{"talk": [{"role": "user", "content": "a"}]}], {"column": "talk"})
