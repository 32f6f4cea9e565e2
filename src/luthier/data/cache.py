"""Tokenised rows, kept by content: prepared once, read by every rank and every later run.

The key is a hash of everything that decides what the rows become, so an entry is never out of date. Entries are written
aside and renamed; one that is not whole is made again. A lock lets one process work while the others wait and read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock

from luthier.config.kinds import kind_of
from luthier.config.sections import DataConfig, SourceConfig
from luthier.data.picture_files import Stamp, pack, stamps, unchanged
from luthier.data.prepare import Progress, SourceReader
from luthier.data.sources import files_of, hub
from luthier.data.tokenised import COLUMNS, MemoryColumns, Tokenised, Writer, assemble, open_directory, write_meta
from luthier.errors import DataError
from luthier.hf.render import Tokenizer
from luthier.hf.tokenizer import fingerprint
from luthier.hf.vision.sight import sight_of

VERSION = 6
"""Raise it when the same rows become other samples, or the arrays change: no older entry is then found."""

_TOLD_EVERY = 256


def cache_directory() -> Path:
    """LUTHIER_CACHE, else the user's cache directory of the platform."""
    chosen = os.environ.get("LUTHIER_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "luthier"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "luthier"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "luthier"


def tokenise(
    source: SourceConfig, data: DataConfig, tokenizer: Tokenizer, progress: Progress | None = None
) -> Tokenised:
    """All samples of a source, out of the cache where they are in it.

    Args:
        source: the source.
        data: length and fault policies, and whether to cache.
        tokenizer: for the format.
        progress: told how far it is; not called for what comes out of the cache.

    Raises:
        DataError: the source or a row cannot be used, or the cache cannot be written.
    """
    store = cache_directory() / "images" if data.cache else None
    reader = SourceReader(source, data, tokenizer, store=store)
    if source.format == "random":
        names = ["random"]
    elif source.path.startswith(hub.PREFIX):
        reader.loaded = hub.load(source, data.streaming)
        names = [f"{source.path}[{source.split}]"]
    else:
        reader.files = files_of(source)
        names = [str(file) for file in reader.files]
    own_format = source.format is not None and ":" in source.format
    # code of one's own can change without its name changing, and a stream has no content to name
    if not data.cache or own_format or source.format == "random" or (reader.loaded is not None and data.streaming):
        memory = MemoryColumns()
        meta = _fill(reader, names, Writer(memory.open), progress)
        return replace(assemble(meta, memory.read), roots=reader.roots(names), store=store)
    try:
        found = _cached(reader, names, _key(reader), progress)
        report = found.report.moved(dict(zip(found.origins, names, strict=True)))
        return replace(found, origins=names, report=report, roots=reader.roots(names), store=store)
    except OSError as error:
        remedy = "set LUTHIER_CACHE to a directory that can be written, or data.cache: false"
        what, where = f"the cache cannot be written ({error.strerror or error})", str(cache_directory())
        raise DataError(what, where=where, remedy=remedy) from error


def _cached(reader: SourceReader, names: list[str], key: str, progress: Progress | None) -> Tokenised:
    directory = cache_directory() / "rows"
    directory.mkdir(parents=True, exist_ok=True)
    entry = directory / key
    with FileLock(directory / f"{key}.lock"):
        found = open_directory(entry)
        if found is not None and unchanged(found.stamps):
            return found
        aside = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=directory))
        try:
            _write(reader, names, aside, progress)
            # what is there is not whole, or open_directory had found it
            shutil.rmtree(entry, ignore_errors=True)
            aside.rename(entry)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        made = open_directory(entry)
        if made is None:
            raise DataError("the entry just written cannot be read back", where=str(entry), remedy="check the disk")
        return made


def _write(reader: SourceReader, names: list[str], directory: Path, progress: Progress | None) -> None:
    streams: list[BinaryIO] = []

    def create(name: str) -> BinaryIO:
        streams.append((directory / f"{name}.bin").open("wb"))
        return streams[-1]

    try:
        meta = _fill(reader, names, Writer(create), progress)
        for stream in streams:
            stream.flush()
            os.fsync(stream.fileno())
    finally:
        for stream in streams:
            stream.close()
    write_meta(directory, meta)


def _fill(reader: SourceReader, names: list[str], writer: Writer, progress: Progress | None) -> dict[str, Any]:
    places = {name: index for index, name in enumerate(names)}
    total = reader.source.rows if reader.source.format == "random" else None
    done = 0
    marks: dict[str, Stamp] = {}
    for document, raw in enumerate(reader.rows()):
        origin = raw[1]
        for sample in reader.samples(raw):
            marks |= {stamp[0]: stamp for stamp in stamps(sample.pictures, reader.store)}
            packed = pack(sample.pictures, reader.root(origin.file), reader.store)
            writer.add(sample, document, places[origin.file], origin, packed)
        done = document + 1
        if progress is not None and done % _TOLD_EVERY == 0:
            progress(done, total)
    if progress is not None:
        progress(done, done)
    return writer.meta(names, reader.report, reader.stop_ids, list(marks.values()))


def _key(reader: SourceReader) -> str:
    source, data = reader.source, reader.data
    content: Any
    if reader.files is not None:
        content = [[_digest(file), "".join(file.suffixes[-2:])] for file in reader.files]
    else:
        content = hub.content_name(reader.loaded)
    decisive = {
        "version": VERSION,
        "columns": COLUMNS,
        "content": content,
        "source": source.model_dump(mode="json", exclude={"path", "weight"}),
        "length": [data.sequence_length, data.too_long],
        "on_bad_row": data.on_bad_row,
        "tokenizer": fingerprint(reader.tokenizer),
        "kind": kind_of(data),
    }
    if (sight := sight_of(reader.tokenizer)) is not None:
        names = [str(file) for file in reader.files or ()]
        decisive["sight"] = [sight.fingerprint, [str(root and root.resolve()) for root in reader.roots(names)]]
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:40]


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror})", where=str(file)) from error
