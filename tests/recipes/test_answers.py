"""Answers to held-out rows: what is asked, how answers are counted, and two models beside each other."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from lm_eval.tasks.tydiqa.utils import exact_match_score, f1_score

from luthier.cli.main import main
from luthier.config import DataConfig
from luthier.data.loader import build_rows
from luthier.hf.source import resolve
from luthier.hf.tokenizer import load_tokenizer, render
from luthier.recipes.answer_metrics import exact_match, f1, find_metrics
from luthier.recipes.answers import questions_of

TALK = [
    {"role": "user", "content": "Which way is north?"},
    {"role": "assistant", "content": "Up."},
    {"role": "user", "content": "And south?"},
    {"role": "assistant", "content": "Down, <of course> & surely."},
]
PAIRS = [
    ("The Cat, sat.", "cat sat"),
    ("in Paris", "Paris"),
    ("", "something"),
    ("a b b c", "b b d"),
    ("an apple", "the apple!"),
]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in (TALK, TALK[:2])))
    return path


def test_a_question_is_what_the_model_was_trained_on_before_its_last_answer(rows: Path) -> None:
    tokenizer = load_tokenizer(resolve("debug:llama"))
    found = questions_of(build_rows(DataConfig(validation=str(rows)), "validation", tokenizer), tokenizer)  # type: ignore[arg-type]
    assert [list(question.ids) for question in found] == [
        render(tokenizer, TALK[:3], add_generation_prompt=True),
        render(tokenizer, TALK[:1], add_generation_prompt=True),
    ]
    assert [question.expected for question in found] == ["Down, <of course> & surely.", "Up."]
    assert [question.origin for question in found] == [f"{rows}:1", f"{rows}:2"]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_answers_are_counted_as_squad_counts_them(pair: tuple[str, str]) -> None:
    said, expected = pair
    assert exact_match(said, expected) == exact_match_score(said, expected, "en")
    assert f1(said, expected) == pytest.approx(f1_score(said, expected, "en"))


def luthier(rows: Path, *arguments: str) -> int:
    how = ["generation.max_new_tokens=8", "--json"]
    return main(["evaluate", "--model", "debug:llama", "--data", str(rows), *arguments, *how])


@pytest.mark.parametrize("suffix", ["html", "md", "jsonl"])
def test_two_models_beside_each_other(
    rows: Path, tmp_path: Path, suffix: str, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out" / f"answers.{suffix}"
    metrics = "f1,rougeL,tests.recipes.test_answers:length"
    # another tiny model: of the same vocabulary, with other weights
    assert luthier(rows, "--metrics", metrics, "--side-by-side", str(file), "--base", "debug:qwen3") == 0
    told = json.loads(capfd.readouterr().out)["answers"]
    assert told["rows"] == 2
    assert {"f1", "rougeL", "tests.recipes.test_answers:length"} < told.keys()
    text = file.read_text()
    if suffix == "jsonl":
        lines = [json.loads(line) for line in text.splitlines()]
        assert [line["expected"] for line in lines] == ["Down, <of course> & surely.", "Up."]
        mean = sum(line["scores"]["base"]["f1"] for line in lines) / 2
        assert told["base"]["f1"] == pytest.approx(mean)
    else:
        assert text.count("Which way is north?") == 2
        assert ("&lt;of course&gt; &amp; surely" in text) == (suffix == "html")


def length(prediction: str, reference: str) -> int:
    return len(prediction)


def broken(prediction: str, reference: str) -> float:
    raise ValueError("no good\nat all")


def leaving(prediction: str, reference: str) -> float:
    sys.exit(0)


def unknown(prediction: str, reference: str) -> float:
    return math.nan


def huge(prediction: str, reference: str) -> int:
    return -(10**400)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--metrics", "rouge_l"], "--metrics: there is no metric 'rouge_l'; did you mean 'rougeL'?"),
        (["--metrics", "nowhere:f"], "metric 'nowhere:f' cannot be imported"),
        (["--metrics", "tests.recipes.test_answers:broken"], "rows.jsonl:1: it raises ValueError: no good; mend"),
        (["--metrics", "tests.recipes.test_answers:leaving"], "rows.jsonl:1: it exits: it raises SystemExit: 0; mend"),
        (["--metrics", "tests.recipes.test_answers:unknown"], "test_answers:unknown gives nan at "),
        (["--metrics", "tests.recipes.test_answers:huge"], "test_answers:huge gives -inf at "),
        (["--side-by-side", "answers.html"], "--side-by-side: there is no second model to stand beside"),
        (["--side-by-side", "answers.pdf", "--base", "debug:qwen3"], ".pdf is no form of it"),
        (["--base", "debug:qwen3"], "--base: is for answers side by side"),
    ],
)
def test_what_cannot_be_measured_is_named(
    rows: Path, arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert luthier(rows, *arguments) == 2
    assert said in json.loads(capfd.readouterr().out)["error"]["message"]


def test_rows_of_plain_text_have_no_question(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("A paragraph of plain text.\n")
    assert luthier(tmp_path / "text.txt", "--metrics", "f1") == 2
    assert "no row has a question before what is trained on" in capfd.readouterr().out


def test_all_metrics_are_there() -> None:
    found = find_metrics(["exact_match", "f1", "rouge1", "rouge2", "rougeL"])
    assert [metric("the same words", "the same words") for metric in found.values()] == [1.0] * 5


def test_questions_of_one_token_are_asked_and_rows_without_one_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load_tokenizer(resolve("debug:llama"))
    assert not tokenizer("R").input_ids[1:]  # no BOS either
    pairs, text = tmp_path / "rows.jsonl", tmp_path / "text.txt"
    pairs.write_text('{"prompt": "R", "completion": " no"}\n{"prompt": "Which way?", "completion": " up"}\n')
    text.write_text("A paragraph.\n")
    sources = [{"path": str(path)} for path in (pairs, text)]
    rows = build_rows(DataConfig.model_validate({"validation": sources}), "validation", tokenizer)  # type: ignore[arg-type]
    found = questions_of(rows, tokenizer)
    assert [(question.prompt, question.expected) for question in found] == [("R", "no"), ("Which way?", "up")]
    assert f"1 of 3 rows are not asked, without a question before what is trained on: {text}:1" in caplog.text


def test_a_piece_of_a_row_is_no_question_of_one_token(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(resolve("debug:llama"))
    pairs = tmp_path / "rows.jsonl"
    pairs.write_text('{"prompt": "R", "completion": " ' + "no and " * 40 + '"}\n')
    how = DataConfig(validation=str(pairs), sequence_length=16, too_long="split")  # type: ignore[arg-type]
    rows = build_rows(how, "validation", tokenizer)
    assert len(rows) > 1
    assert [question.prompt for question in questions_of(rows, tokenizer)] == ["R"]


def test_a_metric_may_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def length(prediction, reference):\n    return len(prediction) - len(reference)\n")
    assert find_metrics([f"{file}:length"])[f"{file}:length"]("abc", "a") == 2.0
