"""Data sets of the Hugging Face Hub, read by `datasets`: hf://owner/name, or hf://owner/name@revision."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from luthier.config.sections import SourceConfig
from luthier.data.report import BadRow
from luthier.data.sources.arrow_rows import without_null_keys
from luthier.data.sources.origin import Origin
from luthier.errors import DataError

PREFIX = "hf://"


def load(source: SourceConfig, streaming: bool) -> Any:
    """The `datasets` object of a source.

    Raises:
        DataError: it is not there, cannot be reached, or has no such subset or split.
    """
    import datasets  # slow to import, and only needed here

    name, _, revision = source.path.removeprefix(PREFIX).removeprefix("datasets/").partition("@")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise DataError("is no name of a data set", where=source.path, remedy="write hf://owner/name")
    try:
        return datasets.load_dataset(
            name, source.subset, split=source.split, revision=revision or None, streaming=streaming
        )
    except Exception as error:  # whatever the network, the Hub or the files raise ends in one sentence
        raise _explained(error, source) from error


def read_hub(loaded: Any, source: SourceConfig) -> Iterator[tuple[dict[str, Any] | BadRow, Origin]]:
    """Rows of a loaded data set.

    Raises:
        DataError: the connection breaks, or a file of the data set cannot be read.
    """
    name = f"{source.path}[{source.split}]"
    number = 0
    try:
        for row in loaded:
            number += 1
            yield {key: without_null_keys(value) for key, value in row.items()}, Origin(name, number, "row")
    except DataError:
        raise
    except Exception as error:
        raise _explained(error, source) from error


def content_name(loaded: Any) -> str:
    """A name that changes when the content does: the fingerprint that `datasets` keeps."""
    return str(loaded._fingerprint)


def _explained(error: Exception, source: SourceConfig) -> DataError:
    kind = type(error).__name__
    text = str(error).strip().splitlines()
    reason = (text[0] if text else kind).rstrip(".")
    remedy = None
    if kind in ("OfflineModeIsEnabled", "ConnectionError", "ConnectTimeout", "LocalEntryNotFoundError", "ConnectError"):
        reason = f"the Hub cannot be reached, and the data set is not in the local cache ({reason})"
        remedy = "download it where there is a network, or name a local file"
    elif kind == "DatasetNotFoundError":
        remedy = "check the name; a gated data set needs `hf auth login`"
    elif isinstance(error, ValueError):
        remedy = "check data.*.subset and data.*.split"
    return DataError(reason, where=source.path, remedy=remedy)
