"""Pictures of rows: where a row names them, what may be read, and what a microbatch shows of them.

A row names its pictures in a column, in the order of the tags in its text, or in the parts of its messages, each in its
place. While rows are tokenised every picture is opened once, to be sure of it and to know its tokens; what is kept is
its path. It is opened again for each step that sees it.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from luthier.batch import Batch, Picture, Sample
from luthier.config.sections import SourceConfig
from luthier.data.fetch import fetch
from luthier.data.formats.chat import MESSAGE_COLUMNS
from luthier.data.formats.instruct import ALIASES, FIELDS
from luthier.data.picture_files import digest, keep, read
from luthier.data.report import BadRow
from luthier.data.sources.json_rows import json_value
from luthier.errors import DataError
from luthier.hf.vision.sight import TAG, Sight

COLUMNS = ("images", "image")
"""Columns that hold pictures where the source names none."""
_TEXTS = dict.fromkeys(
    ("system", "instruction", *FIELDS, "question", "context", *MESSAGE_COLUMNS, "response", "answer", "text")
)
assert all(name in _TEXTS for pair in ALIASES for name in pair)
_PICTURE_PARTS = ("image", "image_url", "input_image")
_URL = re.compile(r"^[a-z][a-z0-9+.-]*://", re.IGNORECASE)


class Album:
    """Takes the pictures out of a source's rows.

    Args:
        sight: of the model.
        source: says where rows have pictures, and what may be read.
        store: where to keep pictures that do not lie in files; None for memory.
    """

    def __init__(self, sight: Sight, source: SourceConfig, store: Path | None) -> None:
        self._sight = sight
        self._source = source
        self._store = store
        self._names = [*dict.fromkeys([*_TEXTS, *source.columns.values(), *filter(None, [source.column])])]

    def seen(
        self,
        row: dict[str, Any],
        root: Path | None,
        formatted: Callable[[dict[str, Any]], Sample | list[Sample] | None],
        *,
        longest: int,
        policy: str,
    ) -> list[Sample]:
        """The samples of a row with its pictures.

        Args:
            row: as the source has it.
            root: as of `take`.
            formatted: makes samples of a row in words.
            longest: most positions of a sample.
            policy: what happens to a longer one.

        Raises:
            BadRow: as `take`; the processor or the format refuses it, its text holds tokens that stand for pictures, or
                a picture would be cut.
        """
        words, pictures, opened = self.take(row, root)
        try:
            expansions = self._sight.expansions(opened) if opened else []
        except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:
            why = " ".join(str(error).split())
            raise BadRow(f"the model's processor refuses its images ({why})", reason="images refused") from error
        with self._sight.showing(expansions):
            made = formatted(words)
        samples = made if isinstance(made, list) else [made] if made is not None else []
        wanted = sum(self._sight.marks(text) for text in expansions)
        own = self._sight.own_ids(expansions)
        for sample in samples:
            held = int(np.isin(sample.tokens, list(self._sight.ids)).sum())
            if held != wanted:
                raise BadRow(
                    f"there are {held:,} tokens for {wanted:,} that its {len(pictures):,} images make",
                    reason="tokens of images that no image is of",
                    remedy="take the model's own tokens for images out of the text",
                )
            places = np.flatnonzero(np.isin(sample.tokens, list(own)))
            reached = int(places[-1]) if len(places) else -1
            cut = {"truncate": reached >= longest, "split": reached >= 0}.get(policy, False)
            if len(sample) > longest and cut:
                raise BadRow(
                    f"it has {len(sample):,} tokens, and its images would be cut at {longest:,}",
                    reason="images that do not fit into the sequence length",
                    remedy="raise data.sequence_length, or set data.too_long: drop",
                )
        return [_with(sample, pictures, own) for sample in samples]

    def take(self, row: Mapping[str, Any], root: Path | None) -> tuple[dict[str, Any], list[Picture], list[Any]]:
        """A row in words with tags in them, its pictures in the order of the tags, and these opened.

        Args:
            row: as the source has it; not changed.
            root: directory that relative paths start from; None for a source that lies in none.

        Raises:
            BadRow: there are more tags than pictures or more pictures than tags, or a picture cannot be had or opened.
        """
        column = self._source.image_column or next((name for name in COLUMNS if name in row), None)
        given = _listed(row.get(column)) if column is not None else []
        walk = _Walk(self._sight.tag, list(given))
        words = {name: walk.column(name, row[name]) if name in row else None for name in self._names}
        changed = {**row, **{name: value for name, value in words.items() if name in row}}
        if walk.lacking:
            had = len(given)
            raise BadRow(
                f"there are {walk.lacking + had:,} image tags and {had:,} image{'' if had == 1 else 's'}"
                f" (column {column or COLUMNS[0]!r})",
                reason="a tag without an image",
                remedy="give each tag its image, or take the tag out",
            )
        if walk.left:
            had = len(given)
            raise BadRow(
                f"there {'is' if had == 1 else 'are'} {had:,} image{'' if had == 1 else 's'} in column {column!r} and "
                f"{had - len(walk.left):,} tags for them",
                reason="an image without a tag",
                remedy=f"put {TAG} where each is to be seen, or a part {{type: image}} into the message",
            )
        pictures, opened = [], []
        for number, value in enumerate(walk.found, start=1):
            picture, data = self._had(value, f"image {number}", root)
            pictures.append(picture)
            opened.append(open_picture(data, f"image {number} ({picture.path})"))
        return changed, pictures, opened

    def _had(self, value: Any, what: str, root: Path | None) -> tuple[Picture, bytes]:
        """A picture and its bytes, wherever the row has them."""
        if isinstance(value, Mapping):
            inner = next((value[key] for key in ("bytes", "path", "url", "image") if value.get(key) is not None), None)
            return self._had(inner, what, root)
        if hasattr(value, "save") and hasattr(value, "convert"):  # a PIL image, as data sets of the Hub give them
            return self._kept(_as_png(value, what), what)
        if isinstance(value, bytes | bytearray):
            return self._kept(bytes(value), what)
        if not isinstance(value, str) or not value:
            kind = type(value).__name__
            raise BadRow(f"{what} is {kind}, and no path, bytes or address", reason="pictures that cannot be read")
        if value.startswith("data:"):
            return self._kept(_inline(value, what), what)
        if _URL.match(value) and not value.lower().startswith("file://"):
            if not self._source.allow_urls:
                raise BadRow(
                    f"{what} is an address ({value}), and none may be asked",
                    reason="an image at an address",
                    remedy="set data.*.allow_urls: true, or fetch the files first",
                )
            return self._kept(fetch(value, what), value)
        return self._file(value, what, root)

    def _kept(self, data: bytes, name: str) -> tuple[Picture, bytes]:
        return keep(data, name, self._store), data

    def _file(self, value: str, what: str, root: Path | None) -> tuple[Picture, bytes]:
        if root is None:
            what = f"{what} ({value}) is a path, and the source lies in no directory"
            remedy = "name the directory that holds all images with data.*.image_root"
            raise BadRow(what, reason="an image that is not there", remedy=remedy)
        base = root.resolve()
        try:
            file = (base / value.removeprefix("file://")).resolve()
        except (OSError, ValueError) as error:  # a NUL, a name that is too long, links in a circle
            why = f"{what} ({value!r}) is no path ({error})"
            raise BadRow(why, reason="pictures that cannot be read") from error
        if not file.is_relative_to(base):
            raise BadRow(
                f"{what} ({value}) lies outside {base}",
                reason="an image outside its directory",
                remedy="name the directory that holds all images with data.*.image_root",
            )
        try:
            data = file.read_bytes()
        except FileNotFoundError:
            raise BadRow(f"{what} ({value}) is not there", reason="an image that is not there") from None
        except OSError as error:
            why = f"{what} ({value}) cannot be read ({error.strerror})"
            raise BadRow(why, reason="pictures that cannot be read") from error
        return Picture(str(file), digest(data)), data


class _Walk:
    """Goes through the words of a row and gives each tag its picture."""

    def __init__(self, tag: str, given: list[Any]) -> None:
        self._tag = tag
        self.left = given
        self.found: list[Any] = []
        self.lacking = 0
        self._tags = re.compile("|".join(re.escape(text) for text in sorted({TAG, tag}, key=len, reverse=True)))

    def column(self, name: str, value: Any) -> Any:
        if name in MESSAGE_COLUMNS and isinstance(value, str) and value.lstrip().startswith("["):
            try:
                value = json_value(value)
            except BadRow:
                return value  # the format says what is wrong with it
        if isinstance(value, str):
            return self.text(value)
        return [self._message(item) for item in value] if isinstance(value, list) else value

    def text(self, value: str) -> str:
        return self._tags.sub(lambda _: self._next(None), value)

    def _next(self, own: Any) -> str:
        """The tag of one more picture."""
        if own is not None:
            self.found.append(own)
        elif self.left:
            self.found.append(self.left.pop(0))
        else:
            self.lacking += 1
        return self._tag

    def _message(self, message: Any) -> Any:
        if not isinstance(message, Mapping):
            return message
        key = "content" if "content" in message else "value"
        content = message.get(key)
        if isinstance(content, str):
            return {**message, key: self.text(content)}
        return {**message, key: [self._part(part) for part in content]} if isinstance(content, list) else message

    def _part(self, part: Any) -> Any:
        if isinstance(part, str):
            return self.text(part)
        if not isinstance(part, Mapping):
            return part
        kind = part.get("type", "text")
        if kind in _PICTURE_PARTS:
            keys = ("image", "image_url", "url", "path", "bytes", "base64")
            own = next((part[key] for key in keys if part.get(key) is not None), None)
            if own is not None and part.get("base64") is own:
                own = f"data:;base64,{own}"
            return {"type": "text", "text": self._next(own)}
        if kind == "text" and isinstance(part.get("text"), str):
            return {**part, "text": self.text(part["text"])}
        return part


def has_pictures(row: Mapping[str, Any], source: SourceConfig) -> str | None:
    """The column in which a row has pictures that a model without eyes would not see; None if there is none."""
    for name in [source.image_column] if source.image_column else COLUMNS:
        value = row.get(name) if name is not None else None
        if value is None or value == [] or value == "":
            continue
        tagged = isinstance(value, str) and TAG in json.dumps([v for v in row.values() if isinstance(v, str | list)])
        if not isinstance(value, str) or tagged or source.image_column:
            return name
    return None


def _with(sample: Sample, pictures: Sequence[Picture], own: frozenset[int]) -> Sample:
    """A sample with its pictures, whose own tokens are never trained on."""
    weights = np.where(np.isin(sample.targets, list(own)), np.float32(0), sample.weights)
    return replace(sample, weights=weights, pictures=tuple(pictures))


def open_picture(data: bytes, what: str) -> Any:
    """A PIL image in RGB, turned as its camera says; as Transformers' own `load_image` opens it.

    Raises:
        BadRow: it is no picture, or a broken one, or has more than eight bits a colour.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(BytesIO(data)) as image:
            _require_eight_bits(image, what)
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        why = (
            " ".join(str(error).split()) if not isinstance(error, Image.UnidentifiedImageError) else "of no known kind"
        )
        raise BadRow(f"{what} cannot be opened as an image ({why})", reason="pictures that cannot be read") from error


def _require_eight_bits(image: Any, what: str) -> None:
    """PIL clips wider numbers to 255: what is in 16 bits would be white, and what lies between 0 and 1 black."""
    if image.mode.startswith(("I", "F")):
        raise BadRow(f"{what} has more than 8 bits a colour ({image.mode}); save it in 8", reason="pictures too deep")


def show(samples: Sequence[Sample], batch: Batch, sight: Sight | None) -> Batch:
    """A microbatch of samples with what the model sees of their pictures, made when it is run."""
    if not any(sample.pictures for sample in samples):
        return batch
    if sight is None:
        raise DataError("the row has pictures, and there is no processor for them", where=samples[0].origin)
    return replace(batch, sights=functools.partial(_inputs, tuple(samples), sight))


def _inputs(samples: Sequence[Sample], sight: Sight) -> Mapping[str, torch.Tensor]:
    return sight.inputs(list(_opened(samples)), [sample.tokens for sample in samples])


def _opened(samples: Sequence[Sample]) -> Iterator[Any]:
    for sample in samples:
        for number, picture in enumerate(sample.pictures, start=1):
            try:
                yield open_picture(read(picture), f"image {number} ({picture.path})")
            except DataError as error:
                raise DataError(error.what, where=sample.origin, remedy=error.remedy) from error


def _listed(value: Any) -> list[Any]:
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


_STORED = ("1", "L", "LA", "P", "RGB", "RGBA")
"""Modes of pixels that PNG has."""


def _as_png(image: Any, what: str) -> bytes:
    """A PIL image, turned as its camera says, as bytes."""
    from PIL import ImageOps

    stream = BytesIO()
    _require_eight_bits(image, what)
    try:
        turned = ImageOps.exif_transpose(image)
        (turned if turned.mode in _STORED else turned.convert("RGB")).save(stream, format="PNG")
    except (OSError, ValueError, SyntaxError) as error:
        why = f"{what} cannot be read as an image ({error})"
        raise BadRow(why, reason="pictures that cannot be read") from error
    return stream.getvalue()


def _inline(value: str, what: str) -> bytes:
    head, comma, body = value.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise ValueError("only base64 is read")
        return base64.b64decode(body, validate=True)
    except (ValueError, binascii.Error) as error:
        raise BadRow(f"{what} is no data: address ({error})", reason="pictures that cannot be read") from error
