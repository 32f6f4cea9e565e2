"""Rows of a Luthier source as SFTTrainer takes them: `text`, `prompt` and `completion`, or `messages`.

TRL tokenizes them and tells which tokens train; here columns only get the names and shapes that it knows. Empty rows
are left out, as Luthier leaves them out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from glob import has_magic
from pathlib import Path
from typing import Any

from luthier.config.sections import SourceConfig
from luthier.errors import DataError, first_line

BUILDERS = {
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
    ".md": "text",
}
"""Suffix of a file -> what reads it in `datasets`."""
SAMPLE_BY = {"paragraph": "paragraph", "line": "line", "file": "document"}
"""Option `rows` of text files -> what `datasets` calls it."""
MESSAGES = ("messages", "conversations", "conversation")
PAIRS = {
    ("prompt", "completion"): ("prompt", "completion"),
    ("instruction", "output"): ("instruction", "output"),
    ("prompt", "response"): ("prompt", "completion"),
    ("question", "answer"): ("prompt", "completion"),
    ("instruction", "response"): ("instruction", "output"),
}
"""Columns of format instruct -> the fields that they are."""
ROLES = {"human": "user"} | dict.fromkeys(("gpt", "chatgpt", "bot", "model", "ai"), "assistant")
_KEYS = {"role", "content", "from", "value", "id", "name"}

Row = Mapping[str, Any]


def read(sources: Sequence[SourceConfig], at: str) -> tuple[Any, bool]:
    """All rows of all sources.

    Args:
        sources: where they are; all of the same `train_on_input`.
        at: their field, for messages.

    Returns:
        a `datasets.Dataset`, and whether assistant turns have to be found in it by the chat template: conversations
        with one answer, at their end, are prompts with a completion, which need no such template.

    Raises:
        DataError: a source cannot be read, its rows are not what they should be, or SFTTrainer cannot mix them.
    """
    import datasets

    rows: list[dict[str, Any]] = []
    for number, source in enumerate(sources):
        where = f"{at}.{number}"
        loaded = _load(source, where)
        if source.rows is not None:
            loaded = loaded.select(range(min(source.rows, len(loaded))))
        convert = _converter(loaded.column_names, source, where)
        for place, row in enumerate(loaded, start=1):
            try:
                converted = convert(row)
            except ValueError as error:
                raise DataError(str(error), where=f"{where} ({source.path}), row {place}") from None
            rows += [converted] if converted is not None else []
    if not rows:
        raise DataError("there are no rows", where=at)
    turns = False
    if all("messages" in row for row in rows) and not sources[0].train_on_input:
        turns = not all(_has_one_answer(row["messages"]) for row in rows)
        if not turns:
            rows = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in rows]
    if len({tuple(sorted(row)) for row in rows}) > 1:
        raise DataError("rows are of several formats, which SFTTrainer does not mix", where=at)
    return datasets.Dataset.from_list(rows), turns


def _load(source: SourceConfig, where: str) -> Any:
    """A source's rows as they are, by `datasets` and its rules of what is in a directory."""
    import datasets

    options: dict[str, Any] = {"split": source.split}
    named: str | None = None
    if source.path.startswith("hf://"):
        name, _, revision = source.path.removeprefix("hf://").removeprefix("datasets/").partition("@")
        options |= {"path": name, "name": source.subset, "revision": revision or None}
    else:
        path = Path(source.path)
        if path.is_dir():
            options["path"] = source.path
            files = [file for file in path.rglob("*") if file.suffix in BUILDERS and file.stem != "README"]
            named = BUILDERS[files[0].suffix] if files else None
        else:
            plain = path.with_suffix("") if path.suffix in (".gz", ".zst") else path
            named = BUILDERS.get(plain.suffix)
            if named is None or not (has_magic(source.path) or path.is_file()):
                raise DataError(f"{source.path} is no file of rows that can be read", where=f"{where}.path")
            options |= {"path": named, "data_files": {source.split.partition("[")[0]: source.path}}
        if named == "text":
            options["sample_by"] = SAMPLE_BY.get(source.options.get("rows", "paragraph"), "paragraph")
        elif named == "csv" and path.suffix == ".tsv":
            options["sep"] = "\t"
    try:
        return datasets.load_dataset(**options)
    except StopIteration:  # of an empty file
        raise DataError(f"{source.path} has no rows", where=f"{where}.path") from None
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{source.path} cannot be read ({first_line(error)})", where=f"{where}.path") from error


def _converter(columns: Sequence[str], source: SourceConfig, where: str) -> Callable[[Row], dict[str, Any] | None]:
    """What makes a row of TRL's from one of a source; None for an empty one."""
    pair = next((pair for pair in PAIRS if set(pair) <= set(columns)), None)
    messages = [name for name in MESSAGES if name in columns]
    found = ["instruct"] if source.columns or pair else []
    found += ["chat"] if messages else []
    found += ["text"] if "text" in columns and not found else []
    form = source.format or (found[0] if len(found) == 1 else None)
    column = source.column or (messages[0] if messages and form == "chat" else "text")
    if form is None or (form != "instruct" and column not in columns):
        seen = ", ".join(sorted(columns)) or "none"
        remedy = "name format and columns as docs/data.md has them"
        raise DataError(f"what rows are cannot be told from their columns ({seen})", where=where, remedy=remedy)
    if form == "text":
        return lambda row: {"text": row[column]} if _text(row, column) else None
    if form == "chat":
        return lambda row: _conversation(_messages(row[column]), row, source)
    fields = _fields(columns, source, where)
    return lambda row: _instruct({field: _text(row, name) for field, name in fields.items()}, row, source)


def _fields(columns: Sequence[str], source: SourceConfig, where: str) -> dict[str, str]:
    """Fields of format instruct -> columns."""
    fields = dict(source.columns)
    if not {"prompt", "completion", "instruction", "output"} & set(fields):
        pair = next((pair for pair in PAIRS if set(pair) <= set(columns)), ("prompt", "completion"))
        fields |= dict(zip(PAIRS[pair], pair, strict=True))
    kind = ("prompt", "completion") if {"prompt", "completion"} & set(fields) else ("instruction", "output")
    for field in kind:
        fields.setdefault(field, field)
    for field in ("input", "system"):
        if field in columns:
            fields.setdefault(field, field)
    for field, name in fields.items():
        if name not in columns:
            raise DataError(f"there is no column {name} for {field}", where=f"{where}.columns")
    return fields


def _instruct(fields: Mapping[str, str | None], row: Row, source: SourceConfig) -> dict[str, Any] | None:
    template = source.options.get("template")
    system = fields.get("system") or source.system_prompt
    answer = fields.get("completion") or fields.get("output")
    if answer is None:
        return None
    if "prompt" in fields:
        asked = fields["prompt"] or ""
        if template != "chat":
            return {"prompt": f"{system}\n\n{asked}" if system else asked, "completion": answer}
    else:
        task, given = fields["instruction"] or "", fields.get("input")
        asked = f"{task}\n\n{given}" if given else task
        if template == "plain":
            parts = [system] if system else []
            parts += [f"### Instruction:\n{task}"] + ([f"### Input:\n{given}"] if given else [])
            return {"prompt": "\n\n".join([*parts, "### Response:\n"]), "completion": answer}
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return _conversation(turns, {**row, "system": system, "tools": None}, source)


def _conversation(turns: list[dict[str, str]], row: Row, source: SourceConfig) -> dict[str, Any] | None:
    if row.get("tools") or row.get("functions"):
        raise ValueError("tools are not taken along to SFTTrainer")
    if not any(turn["role"] == "assistant" and turn["content"].strip() for turn in turns):
        return None
    system = row.get("system") or source.system_prompt
    if system and turns[0]["role"] not in ("system", "developer"):
        turns = [{"role": "system", "content": system}, *turns]
    return {"messages": turns}


def _messages(value: Any) -> list[dict[str, str]]:
    """Turns of role and content."""
    turns = []
    for number, message in enumerate(value or (), start=1):
        said = {key: part for key, part in message.items() if part is not None}
        more = sorted(set(said) - _KEYS)
        if more and not (more == ["weight"] and said["weight"] == 1):
            raise ValueError(f"message {number} has {more[0]}, which is not taken along to SFTTrainer")
        role, content = str(said.get("role", said.get("from", ""))).lower(), said.get("content", said.get("value", ""))
        if not role or not isinstance(content, str):
            raise ValueError(f"message {number} has no role, or a content that is no text")
        turns.append({"role": ROLES.get(role, role), "content": content})
    return turns


def _has_one_answer(turns: Sequence[Mapping[str, str]]) -> bool:
    return [turn["role"] for turn in turns].index("assistant") == len(turns) - 1


def _text(row: Row, column: str) -> str | None:
    value = row[column]
    if value is not None and not isinstance(value, str):
        raise ValueError(f"column {column} holds {type(value).__name__} and no text")
    return value if value and value.strip() else None
