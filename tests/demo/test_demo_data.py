"""The shipped demonstration data: well formed, and its held-out part truly held out."""

import difflib
import json
import re
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[2] / "src" / "luthier" / "demo"
NEAR = 0.85  # two normalised questions more alike than this count as the same question


def conversations(name: str) -> list[list[dict]]:
    lines = (DEMO / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]


def normal(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def said(rows: list[list[dict]], role: str) -> list[str]:
    return [turn["content"] for row in rows for turn in row if turn["role"] == role]


def key_words() -> list[str]:
    table = (DEMO / "knowledge.md").read_text(encoding="utf-8").split("| --- | --- |\n")[1]
    return [line.strip("|").split("|")[1].strip() for line in table.splitlines()]


TRAIN, HELD = conversations("train.jsonl"), conversations("heldout.jsonl")
QUESTIONS = json.loads((DEMO / "questions.json").read_text(encoding="utf-8"))


def test_counts():
    assert 300 <= len(TRAIN) <= 420
    assert 30 <= len(HELD) <= 60
    assert 6 <= len(QUESTIONS) <= 8


@pytest.mark.parametrize("name", ["train.jsonl", "heldout.jsonl"])
def test_every_row_is_a_conversation_that_ends_with_the_assistant(name):
    for number, row in enumerate(conversations(name), 1):
        where = f"{name}:{number}"
        assert all(set(turn) == {"role", "content"} for turn in row), where
        assert all(turn["content"] == turn["content"].strip() != "" for turn in row), where
        roles = [turn["role"] for turn in row]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns, where
        assert turns == ["user", "assistant"] * (len(turns) // 2), where


def test_no_question_stands_twice():
    for rows in (TRAIN, HELD):
        seen = [normal(text) for row in rows if row[0]["role"] != "system" for text in said([row], "user")]
        assert sorted(seen) == sorted(set(seen))


def test_held_out_questions_are_not_trained_on():
    trained = [normal(text) for text in said(TRAIN, "user")]
    for held in map(normal, said(HELD, "user")):
        assert held not in trained
        matcher = difflib.SequenceMatcher(None, b=held, autojunk=False)
        for text in trained:
            matcher.set_seq1(text)
            near = matcher.real_quick_ratio() > NEAR and matcher.quick_ratio() > NEAR and matcher.ratio() > NEAR
            assert not near, f"{held!r} is too near to {text!r}"


def test_shown_questions_are_held_out_and_answered_there_as_expected():
    answers = {row[0]["content"]: row[1]["content"].lower() for row in HELD}
    for shown in QUESTIONS:
        assert set(shown) == {"question", "expected"}
        assert shown["expected"]
        assert all(part.lower() in answers[shown["question"]] for part in shown["expected"])
        assert not any(part.lower() in shown["question"].lower() for part in shown["expected"])


def test_expected_words_are_taught():
    trained = [text.lower() for text in said(TRAIN, "assistant")]
    for part in (part.lower() for shown in QUESTIONS for part in shown["expected"]):
        assert sum(part in text for text in trained) >= 5, part


def test_every_fact_of_the_knowledge_sheet_is_taught_and_held_out():
    words = key_words()
    assert 40 <= len(words) == len(set(words))
    trained = [text.lower() for text in said(TRAIN, "assistant")]
    held = [text.lower() for text in said(HELD, "assistant")]
    for word in map(str.lower, words):
        assert sum(word in text for text in trained) >= 5, word
        assert any(word in text for text in held), word
