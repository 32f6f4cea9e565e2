"""Paths to rows: every kind of file, compressed or not, and every fault in one sentence that names its place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard

from luthier.config.sections import SourceConfig
from luthier.data.report import BadRow
from luthier.data.sources import find_files, read_file, read_rows
from luthier.errors import ConfigError, DataError

ROWS = [{"text": "one", "n": 1}, {"text": "two\nlines", "n": 2}, {"text": "ünï \u2028 🎻", "n": 3}]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Rows in the format that the name asks for, by other code than ours."""
    kind = path.name.removesuffix(".gz").removesuffix(".zst").rpartition(".")[2]
    table = pa.Table.from_pylist(rows)
    sink = pa.BufferOutputStream()
    if kind == "parquet":
        pyarrow.parquet.write_table(table, sink)
        data = sink.getvalue().to_pybytes()
    elif kind in ("arrow", "feather"):
        make = pyarrow.ipc.new_stream if "stream" in path.name else pyarrow.ipc.new_file
        with make(sink, table.schema) as writer:
            writer.write_table(table)
        data = sink.getvalue().to_pybytes()
    elif kind in ("jsonl", "ndjson"):
        data = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()
    elif kind == "json":
        data = json.dumps(rows, indent=1).encode()
    else:
        separator = "\t" if kind == "tsv" else ","
        quoted = [separator.join('"' + str(v).replace('"', '""') + '"' for v in row.values()) for row in rows]
        data = ("\r\n".join([separator.join(rows[0]), *quoted]) + "\r\n").encode()
    if path.suffix == ".gz":
        data = gzip.compress(data[:20]) + gzip.compress(data[20:])
    if path.suffix == ".zst":
        data = zstandard.compress(data[:20]) + zstandard.compress(data[20:])
    path.write_bytes(data)


def read(path: Path, **options: Any) -> list[tuple[Any, str]]:
    return [(row, str(origin)) for row, origin in read_file(path, **options)]


KINDS = ("jsonl", "ndjson", "json", "csv", "tsv", "parquet", "arrow", "stream.arrow", "feather")


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file(tmp_path, kind, packed):
    path = tmp_path / f"some.data.{kind}{packed}"
    write(path, ROWS)
    rows = read(path)
    if kind in ("csv", "tsv"):
        assert [row for row, _ in rows] == [{**row, "n": str(row["n"])} for row in ROWS]
        assert [origin for _, origin in rows] == [f"{path}:{line}" for line in (2, 3, 5)]
    else:
        assert [row for row, _ in rows] == ROWS
        by_row = kind not in ("jsonl", "ndjson")
        assert [origin for _, origin in rows] == [f"{path}:{'row ' * by_row}{n}" for n in (1, 2, 3)]


@pytest.mark.parametrize("packed", [".gz", ".zst"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_damaged_compression(tmp_path, kind, packed):
    path = tmp_path / f"a.{kind}{packed}"
    write(path, ROWS * 50)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match="damaged") as caught:
        read(path)
    assert str(path) in str(caught.value)
    path.write_bytes(b"plain text, not compressed")
    with pytest.raises(DataError, match="damaged"):
        read(path)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_table_that_is_none(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    path.write_bytes(b"this is no table at all, whatever its name says")
    with pytest.raises(DataError, match=r"is not an? (Parquet|Arrow) file"):
        read(path)


def test_arrow_nulls_that_only_fill_the_schema_are_taken_out(tmp_path):
    path = tmp_path / "a.parquet"
    calls = [{"arguments": {"city": "Cremona"}}, {"arguments": {"a": 2}}]
    write(path, [{"text": None, "calls": [call]} for call in calls])
    assert [row for row, _ in read(path)] == [{"text": None, "calls": [call]} for call in calls]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (b'{"a": 1}\n\n{"a": 2}', [1, 2]),
        (b'{"a": 1}\n[2]\n{"a": 3}\n"x"\nnull\n7\n', [1, "a list", 3, "a text", "null", "a number"]),
        (b'{"a": 1}\r\n{"a": }\r\n', [1, "not JSON"]),
        (b'\xef\xbb\xbf{"a": 1}', [1]),
        (b'{"a": 18446744073709551617}', [18446744073709551617]),
        (b'{"a": "\x93"}\n{"a": 2}', ["Windows-1252", 2]),
        (b'{"a": ' + b"[" * 100_000 + b"\n", ["not JSON"]),
        (b'{"a": 1} {"a": 2}\n', ["not JSON"]),
    ],
    ids=range(8),
)
def test_json_lines(tmp_path, text, rows):
    path = tmp_path / "a.jsonl"
    path.write_bytes(text)
    found = [row for row, _ in read(path)]
    assert len(found) == len(rows)
    for row, wanted in zip(found, rows, strict=True):
        if isinstance(row, BadRow):
            assert str(wanted) in f"{row}; {row.reason}"
        else:
            assert row == {"a": wanted}


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("[]", []),
        ("  \n", []),
        ('[{"a": 1},\n {"a": 2}]\n', [1, 2]),
        ('{"a": 1}\n{"a": 2}\n', [1, 2]),
        ('{"a": 1}{"a": 2}', [1, 2]),
    ],
)
def test_json(tmp_path, text, rows):
    path = tmp_path / "a.json"
    path.write_text(text)
    assert [row["a"] for row, _ in read(path)] == rows


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[{"a": 1},\n {"a": }]', 2),
        ('[{"a": 1}\n', 2),
        ('[{"a": 1}\n\n {"a": 2}]', 3),
        ('[{"a": 1}]\n\nmore', 3),
        ('[{"a": 1},]', 1),
    ],
)
def test_broken_json_names_the_line(tmp_path, text, line):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DataError, match="is not JSON") as caught:
        read(path)
    assert caught.value.where == f"{path}:{line}"


def test_utf16_is_refused_by_name(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"text": "a"}\n'.encode("utf-16"))
    with pytest.raises(DataError, match="UTF-16"):
        read(path)


@pytest.mark.parametrize(
    ("name", "text", "rows", "lines"),
    [
        ("a.csv", "a;b\n1;2\n", [{"a": "1", "b": "2"}], [2]),
        ("a.csv", "a|b\n1|2\n", [{"a": "1", "b": "2"}], [2]),
        ("a.csv", 'text\n"x, y"\n', [{"text": "x, y"}], [2]),
        ("a.csv", '\ufeff"a, b";c\n\n1;2\n\n3;4\n', [{"a, b": "1", "c": "2"}, {"a, b": "3", "c": "4"}], [3, 5]),
        ("a.csv", 'a,b\n"x\n\ny",2\n3,4\n', [{"a": "x\n\ny", "b": "2"}, {"a": "3", "b": "4"}], [2, 5]),
        ("a.csv", "a,b\n1,2,3\n4,5\n", ["3 fields where the header has 2", {"a": "4", "b": "5"}], [2, 3]),
        ("a.csv", 'a,b\n"1"x,2\n4,5\n', ["cannot be read", {"a": "4", "b": "5"}], [2, 3]),
        ("a.csv", 'a,b\n1,2\n"3,4\n', [{"a": "1", "b": "2"}, "cannot be read"], [2, 3]),
        ("a.csv", "", [], []),
        ("a.csv", "a,b\n", [], []),
        ("a.tsv", "a\tb\n1,1\t2\n", [{"a": "1,1", "b": "2"}], [2]),
    ],
)
def test_csv(tmp_path, name, text, rows, lines):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8", newline="")
    found = read(path)
    assert [origin for _, origin in found] == [f"{path}:{line}" for line in lines]
    for (row, _), wanted in zip(found, rows, strict=True):
        assert (wanted in str(row)) if isinstance(wanted, str) else (row == wanted)


def test_csv_that_is_not_utf8_goes_on_after_the_bad_row(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"a,b\n\xe9,1\n2,3\n")
    (bad, where), (good, _) = read(path)
    assert "Latin-1" in str(bad)
    assert where == f"{path}:2"
    assert good == {"a": "2", "b": "3"}
    # the quotes of a line that is not UTF-8 hold still: what follows within them is no row of its own
    path.write_bytes(b'a,b\n1,"caf\xe9\nmiddle, of it\nend"\n2,"x\n\xe9\ny"\n3,4\n')
    first, second, (good, _) = read(path)
    assert [where for _, where in (first, second)] == [f"{path}:2", f"{path}:6"]
    assert all("UTF-8" in str(bad) for bad, _ in (first, second))
    assert good == {"a": "3", "b": "4"}


def test_csv_headers_that_cannot_be_used(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,b,a\n1,2,3\n")
    with pytest.raises(DataError, match="'a' more than once"):
        read(path)
    path.write_bytes(b"a,\xe9\n1,2\n")
    with pytest.raises(DataError, match="UTF-8"):
        read(path)


@pytest.mark.parametrize(
    ("unit", "rows"),
    [
        ("paragraph", [("a\n b", 2), ("c", 5)]),
        ("line", [("a", 2), (" b", 3), ("c", 5)]),
        ("file", [("\na\n b\n \nc\n", 1)]),
    ],
)
def test_text(tmp_path, unit, rows):
    path = tmp_path / "a.md"
    path.write_bytes(b"\r\na\r\n b\r\n \r\nc\r\n")
    assert read(path, unit=unit) == [({"text": text}, f"{path}:{line}") for text, line in rows]
    with pytest.raises(ConfigError, match="paragraph, line, file"):
        list(read_rows(SourceConfig(path=str(path), options={"rows": "page"})))


def test_a_byte_that_is_not_utf8_makes_its_whole_row_bad(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a\nb\n\nc\n\xe9d\ne\n\nf\n")
    (first, _), (bad, where), (last, _) = read(path)
    assert (first, last) == ({"text": "a\nb"}, {"text": "f"})
    assert where == f"{path}:5"
    assert "byte 1 of the line (0xe9)" in str(bad)
    assert [isinstance(row, BadRow) for row, _ in read(path, unit="line")] == [False, False, False, True, False, False]
    ((whole, _),) = read(path, unit="file")
    assert isinstance(whole, BadRow)
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"text": "a"},\n {"text": "\xe9"},\n {"text": "b"}]')
    (first, _), (bad, where), (last, _) = read(path)
    assert (first, last) == ({"text": "a"}, {"text": "b"})
    assert where == f"{path}:row 2"
    assert "Latin-1" in str(bad)


def test_directories_globs_and_their_order(tmp_path):
    (tmp_path / "v1.0" / "b").mkdir(parents=True)
    (tmp_path / "v1.0" / ".git").mkdir()
    for name in (
        "b/2.jsonl",
        "c.json",
        "a.csv.gz",
        ".hidden.jsonl",
        ".git/x.jsonl",
        "README.md",
        "LICENSE",
        "state.json",
    ):
        (tmp_path / "v1.0" / name).write_text("{}")
    names = [str(file.relative_to(tmp_path / "v1.0")) for file in find_files(str(tmp_path / "v1.0"))]
    assert names == ["a.csv.gz", "b/2.jsonl", "c.json"]
    assert [file.name for file in find_files(str(tmp_path / "v1.0" / "*.json*"))] == ["c.json", "state.json"]
    assert [file.name for file in find_files(str(tmp_path / "**" / "*.jsonl"))] == ["2.jsonl"]
    assert [file.name for file in find_files(str(tmp_path / "v*"))] == ["a.csv.gz", "2.jsonl", "c.json"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("rows.json", ["no such file", "did you mean", "rows.jsonl"]),
        ("none/at/all.jsonl", ["no such file"]),
        ("*.parquet", ["no file matches"]),
        ("empty", ["holds no file of rows", "parquet"]),
        ("rows.docx", [".docx", "jsonl", "zst"]),
        ("plain", ["no suffix"]),
    ],
)
def test_paths_that_lead_nowhere(tmp_path, path, words):
    (tmp_path / "empty").mkdir()
    for name in ("rows.jsonl", "rows.docx", "plain"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(DataError) as caught:
        find_files(str(tmp_path / path))
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_may_not_be_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.mkdir()  # even root cannot read a directory as a file
    with pytest.raises(DataError, match="cannot be read"):
        read(path)


def test_the_first_rows_only(tmp_path):
    path = tmp_path / "a.jsonl"
    write(path, ROWS)
    assert [row["n"] for row, _ in read_rows(SourceConfig(path=str(path), rows=2))] == [1, 2]


def test_hub_data_sets(tmp_path, monkeypatch):
    # `datasets` reads owner/name from the working directory where there is one, so its real code runs without a network
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    write(folder / "train.jsonl", [{"text": "a", "call": {"x": 1}}, {"text": "b", "call": {"y": 2}}])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = list(read_rows(SourceConfig(path="hf://owner/name")))
    assert [(row, str(origin)) for row, origin in rows] == [
        ({"text": "a", "call": {"x": 1}}, "hf://owner/name[train]:row 1"),
        ({"text": "b", "call": {"y": 2}}, "hf://owner/name[train]:row 2"),
    ]
    with pytest.raises(DataError, match="split") as caught:
        list(read_rows(SourceConfig(path="hf://owner/name", split="nope")))
    assert "\n" not in str(caught.value)


def test_a_hub_data_set_that_cannot_be_reached():
    with pytest.raises(DataError, match="hf://owner/that-is-not-here") as caught:
        list(read_rows(SourceConfig(path="hf://owner/that-is-not-here")))
    assert "\n" not in str(caught.value)


def test_a_key_that_stands_twice_loses_nothing_in_silence(tmp_path):
    row = '{"text": "one", "text": "two"}'
    (tmp_path / "a.jsonl").write_text(f'{row}\n{{"text": "b"}}\n')
    (tmp_path / "a.json").write_text(f'[{row}, {{"text": "b"}}]')
    for name in ("a.jsonl", "a.json"):
        (bad, _), (good, _) = read(tmp_path / name)
        assert isinstance(bad, BadRow)
        assert "key 'text' stands there twice" in str(bad)
        assert good == {"text": "b"}
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="more than one column 'text'"):
        read(tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text(",,text\n0,1,a\n")
    ((row, _),) = read(tmp_path / "a.csv")
    assert row["text"] == "a"


def test_json_at_the_limits_of_python(tmp_path):
    path = tmp_path / "a.jsonl"
    huge, deep = "9" * 5000, "[" * 10**5 + "]" * 10**5
    path.write_text(f'{{"text": "a", "n": {huge}}}\n{{"n": {deep}}}\n{{"text": "b"}}\n')
    (first, _), (bad, _), (last, _) = read(path)
    assert first["n"] == 10**5000 - 1
    assert "nested too deeply" in str(bad)
    assert last == {"text": "b"}


def test_arrow_values_that_python_does_not_have(tmp_path):
    path = tmp_path / "a.parquet"
    days = pa.array([10**9, 1], pa.date32())
    pyarrow.parquet.write_table(pa.table({"text": ["a", "b"], "day": days}), path)
    assert [row["text"] for row, _ in read(path)] == ["a", "b"]
    offsets = pa.array([0, 1, 3], pa.int32()).buffers()[1]
    text = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"a\xff\xfe")])
    pyarrow.parquet.write_table(pa.table({"text": text}), path)
    (good, _), (bad, where) = read(path)
    assert good == {"text": "a"}
    assert where == f"{path}:row 2"
    assert "column 'text' holds byte 0xff, which is not UTF-8" in str(bad)


def test_utf_16_and_utf_32_are_told_apart(tmp_path):
    path = tmp_path / "a.jsonl"
    for encoding in ("utf-16", "utf-32"):
        path.write_bytes('{"text": "a"}\n'.encode(encoding))
        with pytest.raises(DataError, match=f"is {encoding.upper()}, not UTF-8"):
            read(path)


def test_data_sets_that_datasets_saved(tmp_path):
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["a", "b"]})
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.load_from_disk(str(tmp_path / "one")).map(lambda row: {"text": row["text"] + "!"})
    assert len(list((tmp_path / "one").glob("*.arrow"))) == 2  # the second is the cache of `map`
    assert [file.name for file in find_files(str(tmp_path / "one"))] == ["data-00000-of-00001.arrow"]
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(DataError, match=r"splits test, train .*; name the one that is meant"):
        find_files(str(tmp_path / "splits"))
    assert len(find_files(str(tmp_path / "splits" / "train"))) == 1
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "single"))
    assert len(find_files(str(tmp_path / "single"))) == 1


def test_a_link_back_into_a_directory_doubles_no_rows(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "d" / "again").symlink_to("../d")
    assert [file.name for file in find_files(str(tmp_path / "d"))] == ["a.jsonl"]


def test_a_path_that_names_nothing():
    with pytest.raises(DataError, match="no file is named"):
        list(find_files(""))
    with pytest.raises(DataError, match="no name of a data set"):
        list(read_rows(SourceConfig(path="hf://")))
