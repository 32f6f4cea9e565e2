"""Rows of answers to prompts: pairs, ranked and labelled answers, prompts alone; told from columns, refused by name."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from luthier.batch import NO_TOKEN, Batch
from luthier.config import RunConfig
from luthier.config.kinds import Kind, set_kind
from luthier.config.sections import DataConfig, SourceConfig, TrainConfig
from luthier.data.formats import detect, make_format
from luthier.data.loader import Loader, iterate_once
from luthier.data.report import BadRow
from luthier.data.rows import Rows, build_rows
from luthier.data.show import render_row
from luthier.errors import ConfigError, DataError, UserError
from luthier.hf.debug.tiny import debug_tokenizer
from luthier.recipes.show import show

from .conftest import spans, whole

EOS = "<|endoftext|>"
USER = {"role": "user", "content": "2+2?"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def made(tokenizer: Any, row: dict[str, Any], name: str, kind: Kind, **source: Any) -> Any:
    return make_format(name, tokenizer, SourceConfig(path="x", **source), kind)(row)


@pytest.mark.parametrize(
    ("columns", "kind", "wanted"),
    [
        ("prompt chosen rejected", "pairs", "preference"),
        ("chosen rejected", "pairs", "preference"),
        ("prompt prompt_id chosen rejected messages score_chosen score_rejected", "pairs", "preference"),
        ("prompt completions scores", "pairs", "ranked"),
        ("prompt completion label", "labelled", "unpaired"),
        ("chosen rejected", "labelled", "unpaired"),
        ("prompt answer", "prompts", "prompt"),
        ("messages answer", "prompts", "prompt"),
        ("prompt completion label", "documents", "instruct"),
    ],
)
def test_formats_are_told_from_columns_and_method(columns: str, kind: Kind, wanted: str) -> None:
    assert detect(columns.split(), SourceConfig(path="x"), kind) == wanted


def test_columns_that_do_not_fit_the_method() -> None:
    with pytest.raises(DataError, match=r"no format for pairs fits the columns.*chosen and rejected"):
        detect(["prompt", "completion"], SourceConfig(path="x"), "pairs")
    with pytest.raises(DataError, match="method: dpo"):
        detect(["prompt", "chosen", "rejected"], SourceConfig(path="x"))
    with pytest.raises(ConfigError, match="format text gives documents, and the method of this run trains on pairs"):
        make_format("text", debug_tokenizer(), SourceConfig(path="x"), "pairs")


def test_a_pair_is_one_row_of_two_documents(tiny: Any) -> None:
    sample = made(tiny, {"prompt": "2+2?", "chosen": " 4", "rejected": " five"}, "preference", "pairs")
    better, worse = sample.documents
    assert [whole(tiny, better), whole(tiny, worse)] == ["2+2? 4" + EOS, "2+2? five" + EOS]
    assert [spans(tiny, better), spans(tiny, worse)] == [[" 4" + EOS], [" five" + EOS]]
    batch = Batch.pack([sample])
    assert batch.cu_seqlens.tolist() == [0, len(better), len(sample)]
    assert batch.position_ids[0, len(better)] == 0
    assert [row.documents for row in batch.rows] == [2]


TURNS = [
    {"prompt": [USER], "chosen": [said("4")], "rejected": [said("5")]},
    {"chosen": [USER, said("4")], "rejected": [USER, said("5")]},
    {"prompt": "2+2?", "chosen": [USER, said("4")], "rejected": [USER, said("5")]},
    {"prompt": [USER], "chosen": "4", "rejected": "5"},
    {"prompt": "2+2?", "chosen": [said("4")], "rejected": [said("5")]},
]


@pytest.mark.parametrize("row", TURNS)
def test_conversations_as_data_sets_write_them_are_one_pair(smol: Any, row: dict[str, Any]) -> None:
    sample = made(smol, row, "preference", "pairs")
    for document, text in zip(sample.documents, "45", strict=True):
        assert spans(smol, document) == [f"{text}<|im_end|>"]
        assert whole(smol, document).endswith(
            f"<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n{text}<|im_end|>\n"
        )


ASIDE = [
    ([said("four") | {"weight": 0}, {"role": "user", "content": "sure?"}, said("yes")], [said("5")]),
    ([said("5")], [said(""), {"role": "user", "content": "well?"}, said("6")]),
    ([{"role": "user", "content": "and 3+3?"}, said("6")], [{"role": "user", "content": "then 3+3?"}, said("7")]),
]


@pytest.mark.parametrize("sides", ASIDE)
def test_what_stands_before_an_answers_first_trained_turn_does_not_train(smol: Any, sides: tuple[Any, Any]) -> None:
    chosen, rejected = sides
    sample = made(smol, {"prompt": [USER], "chosen": chosen, "rejected": rejected}, "preference", "pairs")
    for document, answer in zip(sample.documents, sides, strict=True):
        alone = made(smol, {"messages": [USER, *answer]}, "chat", "documents")
        assert spans(smol, document) == spans(smol, alone)


def test_texts_that_repeat_their_prompt(tiny: Any) -> None:
    sample = made(tiny, {"chosen": "Q: a?\nA: b", "rejected": "Q: a?\nA: c"}, "preference", "pairs")
    assert [spans(tiny, document) for document in sample.documents] == [[" b" + EOS], [" c" + EOS]]
    with pytest.raises(BadRow, match="do not begin alike"):
        made(tiny, {"chosen": "a", "rejected": "b"}, "preference", "pairs")


def test_ranked_answers_become_pairs(tiny: Any) -> None:
    row = {"prompt": "p", "completions": [" a", " b", " c", " d"], "scores": [1, 3, 2, 3]}
    [pair] = made(tiny, row, "ranked", "pairs")
    assert [spans(tiny, document) for document in pair.documents] == [[" b" + EOS], [" a" + EOS]]
    pairs = made(tiny, row, "ranked", "pairs", options={"pairs": "all"})
    found = ["".join(spans(tiny, document)[0][1] for document in pair.documents) for pair in pairs]
    assert found == ["bc", "ba", "dc", "da", "ca"]  # b and d are as good as each other
    by_rank = {"prompt": "p", "responses": [" a", " b"], "ranks": [2, 1]}
    assert spans(tiny, made(tiny, by_rank, "ranked", "pairs")[0].documents[0]) == [" b" + EOS]
    inside = {"instruction": "p", "completions": [{"response": " a", "score": 0.5}, {"response": " b", "score": 1}]}
    assert spans(tiny, made(tiny, inside, "ranked", "pairs")[0].documents[0]) == [" b" + EOS]
    assert made(tiny, {**row, "scores": [1, 1, 1, 1]}, "ranked", "pairs") is None
    with pytest.raises(BadRow, match="4 answers and 2 scores"):
        made(tiny, {**row, "scores": [1, 2]}, "ranked", "pairs")


def test_labelled_answers_carry_another_prompts_answer(tiny: Any) -> None:
    form = make_format("unpaired", tiny, SourceConfig(path="x"), "labelled")
    first = form({"prompt": "a", "completion": " 1", "label": True})
    second = form({"prompt": "a", "completion": " 2", "label": False})  # the same prompt: nobody else's answer yet
    third = form({"prompt": "b", "completion": " 3", "label": 1})
    assert (first.meta, second.meta, third.meta) == ({"label": True}, {"label": False}, {"label": True})
    assert [len(sample.documents) for sample in (first, second, third)] == [1, 1, 2]
    assert [whole(tiny, document) for document in third.documents] == ["b 3" + EOS, "b 2" + EOS]
    good, bad = form({"prompt": "c", "chosen": " 4", "rejected": " 5"})
    assert (good.meta["label"], bad.meta["label"]) == (True, False)
    with pytest.raises(BadRow, match="neither true nor false"):
        form({"prompt": "a", "completion": " 1", "label": "perhaps"})


def test_prompts_alone_keep_their_rows(tiny: Any, smol: Any) -> None:
    sample = made(tiny, {"prompt": "2+2?", "answer": 4}, "prompt", "prompts")
    assert tiny.decode(sample.tokens) == "2+2?"
    assert sample.meta == {"prompt": "2+2?", "answer": 4}
    assert not sample.weights.any()
    assert sample.targets[-1] == NO_TOKEN
    asked = made(smol, {"prompt": [USER]}, "prompt", "prompts")
    assert smol.decode(asked.tokens).endswith("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n")


def rows_of(tmp_path: Any, rows: list[Any], kind: Kind, tokenizer: Any, **data: Any) -> Rows:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(train=str(path), **data)
    set_kind(config, kind)
    found = build_rows(config, "train", tokenizer)
    assert isinstance(found, Rows)
    return found


PAIRS = [{"prompt": f"number {n}?", "chosen": f" it is {n}", "rejected": f" {n}" * (n + 1)} for n in range(12)]


def test_pairs_come_out_of_the_cache_and_the_loader_whole(tmp_path: Any, tiny: Any) -> None:
    first = rows_of(tmp_path, PAIRS, "pairs", tiny, sequence_length=64)
    again = rows_of(tmp_path, PAIRS, "pairs", tiny, sequence_length=64)
    assert first.fingerprint == again.fingerprint
    assert again[3].parts == first[3].parts
    assert (len(first[3].parts), again[3].number) == (2, 3)
    config = DataConfig(train=str(tmp_path / "rows.jsonl"), sequence_length=64)
    seen: list[int] = []
    for step in Loader(first, config, TrainConfig(rows_per_step=5)):
        for batch in step.microbatches:
            assert batch.documents == 2 * len(batch.rows)
            for place, row in enumerate(batch.rows):
                sample = first[row.number]
                begin, end = int(batch.cu_seqlens[2 * place]), int(batch.cu_seqlens[2 * place + 2])
                np.testing.assert_array_equal(batch.input_ids[0, begin:end].numpy(), sample.tokens)
                seen.append(row.number)
    assert sorted(seen) == list(range(12))
    assert sorted(row.number for batch in iterate_once(first, 64) for row in batch.rows) == list(range(12))


def test_what_is_too_long_is_so_by_one_answer(tmp_path: Any, tiny: Any) -> None:
    rows = [{"prompt": "a" * 10, "chosen": "b" * 4, "rejected": "c" * 40}]
    cut = rows_of(tmp_path, rows, "pairs", tiny, sequence_length=20)
    assert (max(cut[0].parts), cut.report.truncated) == (20, 1)
    with pytest.raises(DataError, match="more than the sequence length 20"):
        rows_of(tmp_path, rows, "pairs", tiny, sequence_length=20, too_long="raise")
    with pytest.raises(DataError, match="1 row dropped"):
        rows_of(tmp_path, rows, "pairs", tiny, sequence_length=20, too_long="drop")
    with pytest.raises(DataError, match="no trained tokens left"):
        rows_of(tmp_path, rows, "pairs", tiny, sequence_length=5)
    with pytest.raises(UserError, match="pairs cannot be split"):
        rows_of(tmp_path, rows, "pairs", tiny, sequence_length=20, too_long="split")


@pytest.mark.parametrize("policy", ["truncate", "drop", "raise"])
def test_a_labelled_row_is_judged_by_its_own_answer(tmp_path: Any, tiny: Any, policy: str) -> None:
    prompts = ["aaaa", "bbbb", "cccccccc"]
    rows = [{"prompt": p, "completion": c, "label": True} for p, c in zip(prompts, ["x", "y" * 40, "z"], strict=True)]
    if policy == "raise":
        rows[1]["completion"] = "y" * 12
        with pytest.raises(DataError, match=r"the row has 16 tokens.*data\.too_long to truncate or drop$"):
            rows_of(tmp_path, rows, "labelled", tiny, sequence_length=15, too_long=policy)
        rows[2]["prompt"] = "c" * 12  # with that answer beside it, it would be too long
        found = rows_of(tmp_path, rows, "labelled", tiny, sequence_length=16, too_long=policy)
        assert [sample.lengths for sample in found] == [(5,), (16, 5), (13, 16)]
        return
    found = rows_of(tmp_path, rows, "labelled", tiny, sequence_length=20, too_long=policy)
    own = [(5,), (20, 5), (9, 20)]
    assert [sample.lengths for sample in found] == (own if policy == "truncate" else own[::2])
    report = found.report
    assert (report.truncated, report.dropped) == ((1, 0) if policy == "truncate" else (0, 1))
    assert report.cut_tokens == (24 if policy == "truncate" else 0)


def test_a_bad_row_is_named_with_its_line(tmp_path: Any, tiny: Any) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:2.*rejected"):
        rows_of(tmp_path, [PAIRS[0], {"prompt": "a", "chosen": " b"}], "pairs", tiny)


def test_both_sides_are_shown(tmp_path: Any, tiny: Any) -> None:
    sample = rows_of(tmp_path, PAIRS, "pairs", tiny)[1]
    text = render_row(sample, tiny).plain
    assert "(first)" in text
    assert "(second)" in text
    run = {"model": "debug:llama", "data": {"train": str(tmp_path / "rows.jsonl")}, "method": "dpo"}
    told, _ = show(RunConfig.model_validate(run), rows=2)
    assert told["rows"][0]["parts"] == list(rows_of(tmp_path, PAIRS, "pairs", tiny)[0].parts)


@pytest.mark.parametrize("name", ["prompts", "completions", "completion_ids"])
def test_a_column_called_as_what_is_sampled_is_refused(tmp_path: Any, tiny: Any, name: str) -> None:
    rows = [{"prompt": "1+1?"}, {"prompt": "2+2?", name: ["4"]}]
    with pytest.raises(DataError, match=f"rows.jsonl:2: column {name!r} has the name of what is sampled.*; rename it"):
        rows_of(tmp_path, rows, "prompts", tiny)


def test_a_prompt_may_stand_in_a_column_called_so(tiny: Any) -> None:
    sample = made(tiny, {"prompts": "2+2?"}, "prompt", "prompts", columns={"prompt": "prompts"})
    assert sample.meta == {"prompt": "2+2?"}
