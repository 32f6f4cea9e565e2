"""Tokenised rows on disk: made once, found by content, made again when damaged, shared by processes."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from luthier.config.sections import DataConfig
from luthier.data.cache import cache_directory, tokenise
from luthier.data.rows import build_rows
from luthier.errors import DataError


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {i} of some"}) + "\n" for i in range(600)) + '{"text": null}\n')
    return DataConfig(train=str(path))


def entries() -> list[Path]:
    return sorted(path for path in (cache_directory() / "rows").iterdir() if path.is_dir())


def test_the_second_time_comes_from_the_cache(config, tiny):
    told: list[tuple[int, int | None]] = []

    def progress(done: int, total: int | None) -> None:
        told.append((done, total))

    first = build_rows(config, "train", tiny, progress=progress)
    assert told == [(256, None), (512, None), (601, 601)]
    told.clear()
    second = build_rows(config, "train", tiny, progress=progress)
    assert told == []
    assert first.fingerprint == second.fingerprint
    assert second.report.to_dict() == first.report.to_dict()
    assert (second.report.read, second.report.empty) == (601, 1)
    assert second.stop_ids == first.stop_ids == [tiny.eos_token_id]
    for index in (0, 299, 599):
        np.testing.assert_array_equal(first[index].tokens, second[index].tokens)
        assert first[index].origin == second[index].origin
    uncached = build_rows(config.model_copy(update={"cache": False}), "train", tiny)
    assert uncached.fingerprint == first.fingerprint
    assert len(entries()) == 1


def test_the_key_is_the_content(config, tiny, tmp_path):
    assert config.train is not None
    source = config.train[0]
    tokenise(source, config, tiny)
    moved = tmp_path / "b.jsonl"
    os.rename(source.path, moved)
    again = tokenise(source.model_copy(update={"path": str(moved)}), config, tiny)
    assert len(entries()) == 1
    assert again.origin(3) == f"{moved}:4"
    # what is said of rows names the file that they are in now
    assert again.report.examples == {"empty": [f"{moved}:601"]}
    for change in ({"sequence_length": 8}, {"too_long": "drop"}):
        tokenise(source.model_copy(update={"path": str(moved)}), config.model_copy(update=change), tiny)
    assert len(entries()) == 3
    moved.write_text(moved.read_text().replace("row 5 ", "row 6 "))
    tokenise(source.model_copy(update={"path": str(moved)}), config, tiny)
    tiny.add_special_tokens({"additional_special_tokens": ["<|x|>"]})
    tokenise(source.model_copy(update={"path": str(moved)}), config, tiny)
    assert len(entries()) == 5


@pytest.mark.parametrize("damage", ["cut", "flip", "no meta", "bad meta", "missing"])
def test_a_damaged_entry_is_made_again(config, tiny, damage):
    wanted = build_rows(config, "train", tiny)
    wanted_tokens = [wanted[index].tokens.tolist() for index in range(len(wanted))]
    del wanted
    (entry,) = entries()
    tokens, meta = entry / "tokens.bin", entry / "meta.json"
    if damage == "cut":
        tokens.write_bytes(tokens.read_bytes()[:-4])
    elif damage == "flip":
        data = bytearray(tokens.read_bytes())
        data[40] ^= 1
        tokens.write_bytes(data)
    elif damage == "no meta":
        meta.unlink()
    elif damage == "bad meta":
        meta.write_text("{")
    else:
        tokens.unlink()
    again = build_rows(config, "train", tiny)
    assert [again[index].tokens.tolist() for index in range(len(again))] == wanted_tokens
    assert len(entries()) == 1


def test_hub_data_sets_are_cached_and_streamed(tiny, tmp_path, monkeypatch):
    import datasets

    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    config = DataConfig(train="hf://owner/name")
    first, second = (build_rows(config, "train", tiny) for _ in range(2))
    assert first.fingerprint == second.fingerprint
    assert second[1].origin == "hf://owner/name[train]:row 2"
    assert len(entries()) == 1
    stream = build_rows(DataConfig(train="hf://owner/name", streaming=True, shuffle=False), "train", tiny)
    got = [placed.sample.origin for placed in itertools.islice(stream.samples(), 3)]
    assert got == [f"hf://owner/name[train]:row {number}" for number in (1, 2, 1)]


def test_an_interrupted_write_leaves_nothing(config, tiny):
    def interrupt(done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_rows(config, "train", tiny, progress=interrupt)
    assert entries() == []
    assert len(build_rows(config, "train", tiny)) == 600


def test_a_cache_that_cannot_be_written(config, tiny, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("LUTHIER_CACHE", str(blocked))
    with pytest.raises(DataError, match=r"cannot be written.*LUTHIER_CACHE"):
        build_rows(config, "train", tiny)


CHILD = """
import sys
from luthier.config.sections import DataConfig
from luthier.data.rows import build_rows
from luthier.hf.debug.tiny import debug_tokenizer
made = []
rows = build_rows(DataConfig(train=sys.argv[1]), "train", debug_tokenizer(), progress=lambda *told: made.append(told))
print(rows.fingerprint, bool(made))
"""


def test_processes_wait_for_each_other(config):
    assert config.train is not None
    command = [sys.executable, "-c", CHILD, config.train[0].path]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate()[0].split() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert told[0][0] == told[1][0]
    assert sorted(made for _, made in told) == ["False", "True"]
    assert len(entries()) == 1


def test_the_place_of_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("LUTHIER_CACHE", str(tmp_path / "here"))
    assert cache_directory() == tmp_path / "here"
    monkeypatch.delenv("LUTHIER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_directory() == tmp_path / "luthier"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_directory().parts[-3:] == ("Library", "Caches", "luthier")
