"""Whatever a caller gives as data, read into rows: tokens, targets, and what the loss reads, each checked and named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from luthier.batch import NO_TOKEN
from luthier.errors import DataError
from luthier.losses.table import TARGETS, WEIGHTS, Loss

_HUGGING_FACE = ("input_ids", "labels", "attention_mask")
_TAKES = "give a Datum, a ModelInput, a dict, a tensor of token ids, or a list of them"


@dataclass(frozen=True, slots=True)
class Row:
    """One document.

    Attributes:
        tokens: int64 [T].
        fields: `target_tokens` int64 [T] or [T, K], NO_TOKEN where nothing is predicted, and what else the loss reads.
        where: what to call it ("data[3]").
    """

    tokens: torch.Tensor
    fields: dict[str, torch.Tensor]
    where: str

    @property
    def targets(self) -> torch.Tensor:
        return self.fields[TARGETS]

    @property
    def has_weights(self) -> bool:
        return WEIGHTS in self.fields


def read_rows(data: Any, loss: Loss, vocabulary: int, positions: int | None = None) -> list[Row]:
    """The rows of a call.

    Args:
        data: a tensor [T] or [rows, T] of token ids, a dict with `input_ids` and perhaps `labels` and
            `attention_mask` as Transformers takes them, a ModelInput, a Datum, or a list of any of these.
        loss: what each row must be fit for.
        vocabulary: ids are below this.
        positions: rows are no longer than this; None where the model has no table of them.

    Raises:
        DataError: something cannot be read as a row; it is named.
    """
    rows: list[Row] = []
    many = isinstance(data, Sequence) and not (data and all(isinstance(item, int | np.integer) for item in data))
    for number, item in enumerate(data if many else [data]):
        rows += _rows_of(item, f"data[{number}]" if many else "data")
    if not rows:
        raise DataError("there is no row", where="data", remedy=_TAKES)
    for row in rows:
        loss.check(row.fields, len(row.tokens), row.where)
        _check_ids(row.tokens, vocabulary, f"{row.where}.model_input", allowed=None)
        _check_ids(row.targets, vocabulary, f"{row.where}.loss_fn_inputs.{TARGETS}", allowed=NO_TOKEN)
        check_length(row, positions)
        if row.has_weights and bool(((row.targets == NO_TOKEN) & (row.fields[WEIGHTS] != 0)).any()):
            raise DataError(f"a target of {NO_TOKEN} has a weight", where=f"{row.where}.loss_fn_inputs.{WEIGHTS}")
    odd = next((row for row in rows if row.has_weights != rows[0].has_weights), None)
    if odd is not None:
        what = f"{WEIGHTS} are {'given' if odd.has_weights else 'missing'}, and {rows[0].where} is the other way"
        raise DataError(
            what, where=f"{odd.where}.loss_fn_inputs", remedy="give weights to all rows of a call or to none"
        )
    return rows


def read_prompt(prompt: Any, vocabulary: int, where: str = "prompt") -> torch.Tensor:
    """The token ids [T] of a ModelInput, a tensor or a list.

    Raises:
        DataError: they are none, or not among the model's.
    """
    tokens = _tokens(prompt, where)
    _check_ids(tokens, vocabulary, where, allowed=None)
    return tokens


def check_length(row: Row, positions: int | None) -> None:
    """Refuse a row that the model's table of positions ends before: a GPU would stop the whole process.

    Raises:
        DataError: it is too long.
    """
    if positions is not None and len(row.tokens) > positions:
        what = f"{len(row.tokens):,} tokens are more than the {positions:,} positions that the model has"
        raise DataError(what, where=row.where, remedy="shorten it")


def dense(values: Any, where: str) -> torch.Tensor:
    """A tensor on the CPU of a tensor, array, (nested) list or TensorData, a sparse one included.

    Raises:
        DataError: it is none of these, or of complex numbers.
    """
    found = _dense(values, where)
    if found.is_complex():
        raise DataError(f"it is {found.dtype}", where=where, remedy="give real numbers")
    # torch compares no unsigned numbers wider than a byte; what does not fit becomes negative, which no id is
    return found.to(torch.int64) if found.dtype in (torch.uint16, torch.uint32, torch.uint64) else found


def _dense(values: Any, where: str) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().to_dense() if values.layout != torch.strided else values.detach().cpu()
    data = getattr(values, "data", values)
    if isinstance(values, np.ndarray):
        data = values
    shape, dtype = getattr(values, "shape", None), getattr(values, "dtype", None)
    try:
        crow = getattr(values, "sparse_crow_indices", None)
        kind = torch.int64 if dtype == "int64" else torch.float32
        if crow is not None:
            full = torch.zeros(tuple(shape or ()), dtype=kind)
            lines = torch.arange(len(full)).repeat_interleave(torch.as_tensor(crow).diff())
            full[lines, torch.as_tensor(values.sparse_col_indices)] = torch.as_tensor(np.asarray(data)).to(kind)
            return full
        to_torch = getattr(values, "to_torch", None)
        if to_torch is not None:
            found: torch.Tensor = to_torch()
            return found.detach().cpu()
        found = torch.from_numpy(np.ascontiguousarray(np.asarray(data)))
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise DataError(f"it is no array of numbers ({str(error).splitlines()[0]})", where=where) from None
    if not found.numel() and dtype is None:
        return found.to(torch.int64)
    if dtype in ("int64", "float32"):
        found = found.to(kind)
    return found.reshape(tuple(shape)) if shape is not None and not isinstance(values, np.ndarray) else found


def _rows_of(item: Any, where: str) -> list[Row]:
    if isinstance(item, Mapping):
        if "model_input" in item:
            return [_datum(item["model_input"], item.get("loss_fn_inputs") or {}, where)]
        return _as_transformers_takes_it(item, where)
    if hasattr(item, "model_input"):
        return [_datum(item.model_input, getattr(item, "loss_fn_inputs", None) or {}, where)]
    if hasattr(item, "chunks") and not isinstance(item, torch.Tensor):
        return [_datum(item, {}, where)]
    if isinstance(item, torch.Tensor | np.ndarray) and item.ndim == 2:
        return [_datum(row, {}, f"{where}[{number}]") for number, row in enumerate(item)]
    return [_datum(item, {}, where)]


def _datum(model_input: Any, given: Mapping[str, Any], where: str) -> Row:
    tokens = _tokens(model_input, f"{where}.model_input" if given else where)
    if not given:
        return Row(tokens[:-1], {TARGETS: tokens[1:]}, where)
    return Row(tokens, {key: dense(values, f"{where}.loss_fn_inputs.{key}") for key, values in given.items()}, where)


def _as_transformers_takes_it(given: Mapping[str, Any], where: str) -> list[Row]:
    """Rows of input_ids, labels (not shifted) and attention_mask, each [T] or [rows, T]; padding is left out."""
    unknown = next((key for key in given if key not in _HUGGING_FACE), None)
    if unknown is not None or "input_ids" not in given:
        what = f"there is no use for {unknown}" if unknown is not None else "input_ids are missing"
        remedy = f"give {', '.join(_HUGGING_FACE)}, or model_input and loss_fn_inputs"
        raise DataError(what, where=where, remedy=remedy)
    found = {key: torch.atleast_2d(dense(values, f"{where}.{key}")) for key, values in given.items()}
    ids = found["input_ids"]
    for key, values in found.items():
        if values.shape != ids.shape:
            raise DataError(f"it is {list(values.shape)}, and input_ids are {list(ids.shape)}", where=f"{where}.{key}")
    rows = []
    for number, row in enumerate(ids):
        here = where if len(ids) == 1 else f"{where}[{number}]"
        kept = found["attention_mask"][number] != 0 if "attention_mask" in found else torch.ones_like(row) != 0
        tokens, labels = _tokens(row[kept], here), found.get("labels", ids)[number][kept]
        rows.append(Row(tokens[:-1], {TARGETS: labels[1:]}, here))
    return rows


def _tokens(given: Any, where: str) -> torch.Tensor:
    if hasattr(given, "chunks") and not isinstance(given, torch.Tensor):
        given = [token for number, chunk in enumerate(given.chunks) for token in _of_chunk(chunk, f"{where}[{number}]")]
    if isinstance(given, str):
        raise DataError("it is text", where=where, remedy="give token ids, which the model's tokenizer makes of it")
    values = dense(given, where)
    if values.ndim != 1 or values.is_floating_point() or values.dtype == torch.bool:
        raise DataError(f"it is {values.dtype} {list(values.shape)}, not whole numbers [T]", where=where, remedy=_TAKES)
    if len(values) == 0:
        raise DataError("it holds no token", where=where)
    return values.to(torch.int64)


def _of_chunk(chunk: Any, where: str) -> Sequence[int]:
    tokens = getattr(chunk, "tokens", None)
    if tokens is None:
        raise DataError(f"a {type(chunk).__name__} is no text", where=where, remedy="give token ids alone")
    found: Sequence[int] = tokens
    return found


def _check_ids(ids: torch.Tensor, vocabulary: int, where: str, *, allowed: int | None) -> None:
    outside = (ids >= vocabulary) | (ids < 0)
    if allowed is not None:
        outside &= ids != allowed
    if bool(outside.any()):
        bad = int(ids[outside][0])
        remedy = "use the model's own tokenizer"
        raise DataError(f"token {bad} is not among the model's {vocabulary:,}", where=where, remedy=remedy)
