"""What can be seen of rows and models that lie on this machine, before a job starts: columns, and chat templates."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from luthier.config.faults import shown
from luthier.config.suggest import nearest
from luthier.jobs.convert import AT, Draft

_READ = {
    "json": (".jsonl", ".ndjson", ".json"),
    "csv": (".csv", ".tsv"),
    "parquet": (".parquet",),
    "arrow": (".arrow", ".feather"),
}
"""`kind` of a source -> suffixes whose columns can be told here."""
_NOTES = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")
PAIRS = (
    *(("prompt", "completion"), ("instruction", "output"), ("prompt", "response")),
    *(("question", "answer"), ("instruction", "response")),
)
"""Columns by which format instruct knows itself; the data room has the same."""
CONVERSATIONS = ("messages", "conversations", "conversation")
_PEEKED = 1 << 20
"""Bytes of a file that are looked at."""
_ROWS = 32
"""Rows of it, as many as the nodes look at."""


def check_columns(draft: Draft, fetched: Path | None) -> None:
    """Refuse columns that the first file of a source does not have; what cannot be read here, the nodes will refuse.

    Args:
        draft: the run.
        fetched: what the data-set initializer copies, where that is of this machine.
    """
    for number, source in enumerate(draft.config.get("data", {}).get("train") or ()):
        columns = _columns(source, fetched)
        if not columns:
            continue
        named = f"data.train.{number}"
        needed = list(_needed(source))
        for field, column in needed:
            if column not in columns:
                meant = nearest(column, columns)
                remedy = f'did you mean "{meant}"?' if meant else f"there are {', '.join(sorted(columns))}"
                draft.refuse(_where(draft, named, field), f"the rows have no column {shown(column)}", remedy)
        if not needed:
            _check_format(draft, source, columns, named)


def _check_format(draft: Draft, source: dict[str, Any], columns: set[str], named: str) -> None:
    """Refuse rows whose columns no format, or not the one that is named, is told by."""
    found = ["chat"] if columns.intersection(CONVERSATIONS) else []
    found += ["instruct"] if any(columns.issuperset(pair) for pair in PAIRS) else []
    found += ["text"] if "text" in columns else []
    given, told = source.get("format"), ", ".join(sorted(columns))
    if given in ("chat", "instruct", "text") and given not in found:
        remedy = "name the columns: column_map, conversation_column, or columns of a YAML"
        draft.refuse(_where(draft, named, ""), f"the rows have no columns of format {given} (columns: {told})", remedy)
    elif given is None and len(found) != 1:
        fits = f"fit formats {' and '.join(found)}" if found else "fit no format"
        remedy = "say which with dataset_preprocess_config, or format of a YAML"
        draft.refuse(_where(draft, named, ""), f"the columns of the rows ({told}) {fits}", remedy)


def check_template(draft: Draft, model: Path | None) -> None:
    """Refuse conversations for a model without a chat template.

    Args:
        model: what the model initializer copies, where that is of this machine.
    """
    sources = draft.config.get("data", {}).get("train") or ()
    chats = any(
        source.get("format") == "chat" or (source.get("options") or {}).get("template") == "chat" for source in sources
    )
    if not chats or model is None or draft.config.get("tokenizer") or draft.config["data"].get("chat_template"):
        return
    settings = model / "tokenizer_config.json"
    if (model / "chat_template.jinja").is_file() or (model / "chat_template.json").is_file() or not settings.is_file():
        return
    try:
        has_one = bool(json.loads(settings.read_text(encoding="utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return
    if not has_one:
        what = "the model has no chat template, which conversations are laid out by"
        draft.refuse("initializer.model.storage_uri", what, f"take a chat model, or set {AT}.chat_template")


def _needed(source: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(field, column) that every row must have."""
    for name, column in (source.get("columns") or {}).items():
        if name not in ("input", "system"):
            yield f"columns.{name}", column
    if source.get("column") is not None:
        yield "column", source["column"]


def _where(draft: Draft, named: str, field: str) -> str:
    """The path of a field of a source as its user has written it."""
    origin = draft.origins.get("data.train", f"{AT}.{named}")
    if not field:
        return origin
    if "data.train" not in draft.origins:
        return f"{origin}.{field}"
    kubeflow = {"columns.prompt": "column_map.input", "columns.completion": "column_map.output"}
    kubeflow |= {"column": "conversation_column"}
    return f"{origin}.{kubeflow.get(field, field.replace('columns.', 'column_map.'))}"


def _columns(source: dict[str, Any], fetched: Path | None) -> set[str]:
    path = str(source.get("path", ""))
    directory, _, below = path.partition("/")
    if directory == "dataset":
        if fetched is None:
            return set()
        place = fetched / below if below else fetched
    elif path.startswith("/"):
        place = Path(path)
    else:
        return set()
    kind = source.get("kind")
    known = _READ.get(kind, ()) if kind is not None else tuple(suffix for all_of in _READ.values() for suffix in all_of)
    for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
        hidden = file != place and any(part.startswith(".") for part in file.relative_to(place).parts)
        if not hidden and file.name not in _NOTES and file.name.removesuffix(".gz").endswith(known) and file.is_file():
            return _of_file(file)
    return set()


def _of_file(file: Path) -> set[str]:
    """Columns of a file's first rows; none where it cannot be read."""
    name = file.name.removesuffix(".gz")
    try:
        if name.endswith((".parquet", ".arrow", ".feather")):
            return set() if file.suffix == ".gz" else _of_table(file)
        with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as stream:
            text = stream.read(_PEEKED).decode("utf-8-sig", "ignore").lstrip()
        if name.endswith((".csv", ".tsv")):
            header = text.split("\n", 1)[0]
            separator = "\t" if name.endswith(".tsv") else max(",;\t|", key=header.count)
            return set(next(csv.reader([header], delimiter=separator)))
        return _of_objects(text)
    except (OSError, EOFError, zlib.error, ValueError, StopIteration):
        return set()


def _of_objects(text: str) -> set[str]:
    """Keys of JSON objects that stand behind one another, as lines or in a list; the last may be cut off."""
    columns: set[str] = set()
    place, decoder = 0, json.JSONDecoder()
    for _ in range(_ROWS):
        place += len(text[place:]) - len(text[place:].lstrip("[, \n\r\t"))
        try:
            row, place = decoder.raw_decode(text, place)
        except ValueError:
            break
        if not isinstance(row, dict):
            return set()
        columns.update(row)
    return columns


def _of_table(file: Path) -> set[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        if file.suffix == ".parquet":
            return set(pyarrow.parquet.read_schema(file).names)
        with file.open("rb") as stream:
            try:
                return set(pyarrow.ipc.open_file(stream).schema.names)
            except pyarrow.ArrowInvalid:
                stream.seek(0)
                return set(pyarrow.ipc.open_stream(stream).schema.names)
    except pyarrow.ArrowException:
        return set()
