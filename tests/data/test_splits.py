"""Splits of directories and parts of splits, against what `datasets` makes of the same files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from luthier.config.sections import SourceConfig
from luthier.data.sources import read_rows
from luthier.errors import ConfigError, DataError

LAYOUTS = {
    "the Hub's shards": {
        "data/train-00000-of-00002.jsonl": 3,
        "data/train-00001-of-00002.jsonl": 2,
        "data/test-00000-of-00001.jsonl": 4,
    },
    "names": {"train.jsonl": 5, "validation.jsonl": 2, "test.jsonl": 3},
    "directories": {"train/a.jsonl": 2, "train/b.jsonl": 2, "dev/a.jsonl": 1},
    "no names": {"a.jsonl": 3, "b.jsonl": 1},
    "other shards": {"data/train-00000-of-00001.jsonl": 3, "data/hard-00000-of-00001.jsonl": 2},
}


def write(directory: Path, files: dict[str, int]) -> None:
    for name, rows in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"text": f"{name} {number}"}) for number in range(rows)]
        (directory / name).write_text("\n".join(lines) + "\n")


def texts(path: Path, **source: str) -> list[str]:
    return [row["text"] for row, _ in read_rows(SourceConfig(path=str(path), **source))]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_splits_of_a_directory_are_those_of_datasets(tmp_path, layout):
    import datasets

    write(tmp_path / "set", LAYOUTS[layout])
    expected = datasets.load_dataset(str(tmp_path / "set"), cache_dir=str(tmp_path / "cache"))
    for split, rows in expected.items():
        assert texts(tmp_path / "set", split=split) == rows["text"]
    assert texts(tmp_path / "set") == expected["train"]["text"]


@pytest.mark.parametrize("part", ["[:10%]", "[10%:]", "[25%:75%]", "[:3]", "[3:5]", "[-4:]", "[:-30%]", "[5:2]", "[:]"])
def test_parts_of_a_split_are_those_of_datasets(tmp_path, part):
    import datasets

    write(tmp_path / "set", {"train-00000-of-00002.jsonl": 8, "train-00001-of-00002.jsonl": 5, "test.jsonl": 2})
    path, cache = str(tmp_path / "set"), str(tmp_path / "cache")
    expected = datasets.load_dataset(path, split=f"train{part}", cache_dir=cache)["text"]
    assert texts(tmp_path / "set", split=f"train{part}") == list(expected)


def test_a_part_of_one_file(tmp_path):
    write(tmp_path, {"rows.jsonl": 10})
    assert texts(tmp_path / "rows.jsonl", split="train[:20%]") == ["rows.jsonl 0", "rows.jsonl 1"]


def test_shards_of_any_name_train_where_nothing_else_does(tmp_path):
    write(tmp_path, {"part-00000-of-00002.jsonl": 1, "part-00001-of-00002.jsonl": 1})
    assert len(texts(tmp_path)) == 2


def test_kinds_of_files(tmp_path):
    write(tmp_path, {"a.jsonl": 2})
    (tmp_path / "b.csv").write_text("text\nfrom the table\n")
    (tmp_path / "dataset_infos.json").write_text("{}")
    assert len(texts(tmp_path, kind="json")) == 2
    assert texts(tmp_path, kind="csv") == ["from the table"]
    with pytest.raises(DataError, match=r"holds no parquet file; check data\.\*\.kind"):
        texts(tmp_path, kind="parquet")


@pytest.mark.parametrize(
    ("split", "kind", "words"),
    [
        ("test", DataError, 'has no split "test"; there is train, validation'),
        ("train[1", ConfigError, "is no split; write train"),
        ("train+test", ConfigError, "is no split"),
    ],
)
def test_splits_that_there_are_not(tmp_path, split, kind, words):
    write(tmp_path, {"train.jsonl": 1, "dev.jsonl": 1})
    with pytest.raises(kind, match=words.replace("[", r"\[")):
        texts(tmp_path, split=split)
