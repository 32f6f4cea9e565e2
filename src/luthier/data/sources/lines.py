"""Lines of a text file, compressed or not: bytes are told from text here, and nowhere else."""

from __future__ import annotations

import codecs
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow

from luthier.data.report import BadRow
from luthier.errors import DataError

_WIDE = (
    *((codecs.BOM_UTF32_LE, 32), (codecs.BOM_UTF32_BE, 32)),
    *((codecs.BOM_UTF16_LE, 16), (codecs.BOM_UTF16_BE, 16)),
)
"""Byte-order marks of encodings that are not read; that of UTF-32 begins like that of UTF-16."""
_ESCAPED = re.compile("[\udc80-\udcff]")
_ICONV = "convert it with iconv -f {} -t utf-8, or leave such rows out with data.on_bad_row: skip"


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed.

    Raises:
        DataError: it cannot be opened or decompressed; also while the block reads.
    """
    try:
        with path.open("rb") as raw:
            suffix = path.suffix.lower()
            if suffix == ".gz":
                yield cast(BinaryIO, gzip.GzipFile(fileobj=raw))
            elif suffix == ".zst":
                unpacked = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")
                yield cast(BinaryIO, io.BufferedReader(unpacked))
            else:
                yield raw
    except (EOFError, gzip.BadGzipFile, zlib.error, pyarrow.ArrowException) as error:
        raise DataError("is damaged or not compressed as its suffix says", where=str(path)) from error
    except OSError as error:
        # Arrow reports a broken stream as an OSError without a number
        reason = error.strerror or "damaged, or not compressed as its suffix says"
        raise DataError(f"cannot be read ({reason})", where=str(path)) from error


def lines(path: Path) -> Iterator[tuple[int, str | BadRow]]:
    """(line number from 1, text with its line end) of every line; only a line feed ends a line.

    A byte-order mark is taken away. U+2028 and other separators of Unicode stay inside the text. A line that is not
    UTF-8 comes as a BadRow, so that the reader can go on after it.

    Raises:
        DataError: the file cannot be read, or is UTF-16 or UTF-32.
    """
    for number, text in escaped_lines(path):
        yield number, not_utf8(text) or text


def escaped_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The same, with bytes that are not UTF-8 in the text as `not_utf8` knows them: for rows of more than one line.

    Raises:
        DataError: as of `lines`.
    """
    with opened(path) as stream:
        for number, line in enumerate(stream, start=1):
            if number == 1:
                _refuse_wide(line, path)
                line = line.removeprefix(codecs.BOM_UTF8)
            yield number, line.decode("utf-8", errors="surrogateescape")


def not_utf8(text: str) -> BadRow | None:
    """What is wrong with a text that holds bytes which are no UTF-8 (decoded with `surrogateescape`), or None."""
    found = _ESCAPED.search(text)
    if found is None:
        return None
    start = text.rfind("\n", 0, found.start()) + 1
    line = text[start:].partition("\n")[0]
    bad = [ord(escaped) - 0xDC00 for escaped in _ESCAPED.findall(line)]
    # bytes 0x80 to 0x9f are control characters in Latin-1, and letters or quotes in Windows-1252
    encoding, name = ("Windows-1252", "cp1252") if any(byte < 0xA0 for byte in bad) else ("Latin-1", "latin1")
    place = len(text[start : found.start()].encode()) + 1
    return BadRow(
        f"byte {place} of the line (0x{bad[0]:02x}) is not UTF-8; the encoding looks like {encoding}",
        reason="not UTF-8",
        remedy=_ICONV.format(name),
    )


def whole_text(path: Path) -> str:
    """All of a file without its byte-order mark; bytes that are not UTF-8 are in it as `not_utf8` knows them.

    Raises:
        DataError: it cannot be read, or is UTF-16 or UTF-32.
    """
    with opened(path) as stream:
        data = stream.read()
    _refuse_wide(data, path)
    return data.removeprefix(codecs.BOM_UTF8).decode("utf-8", errors="surrogateescape")


def _refuse_wide(start: bytes, path: Path) -> None:
    bits = next((bits for mark, bits in _WIDE if start.startswith(mark)), None)
    if bits is not None:
        remedy = f"convert it with iconv -f utf-{bits} -t utf-8"
        raise DataError(f"is UTF-{bits}, not UTF-8", where=str(path), remedy=remedy)
