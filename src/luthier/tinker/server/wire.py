"""Between the SDK's messages and what the client in process takes and gives.

The messages are the `tinker` package's own; its `proto/tinker_public_pb2.pyi` says what each field holds.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError
from tinker import types
from tinker.proto import tinker_public_pb2 as proto

from luthier.errors import DataError
from luthier.sampling.request import TopTokens
from luthier.tinker.types import ForwardBackwardOutput, SampleResponse

PROTOBUF = "application/x-protobuf"
"""Media type of results of forward, forward_backward and sample."""
_DTYPES: dict[int, np.dtype[Any]] = {
    proto.DTYPE_FLOAT32: np.dtype("<f4"),
    proto.DTYPE_INT64: np.dtype("<i8"),
    proto.DTYPE_INT32: np.dtype("<i4"),
}
_LONGEST = 1 << 31
"""Of each side of a tensor."""
_NO_TOKEN, _NO_LOGPROB = 0, -99999.0
"""What an empty cell of top-k tables holds."""


def parse_forward_backward(body: bytes) -> proto.ForwardBackwardRequest:
    """The request that a body holds.

    Raises:
        DataError: it holds none.
    """
    request = proto.ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
    except DecodeError:
        raise DataError("it is no ForwardBackwardRequest", where="body", remedy="use the tinker SDK") from None
    return request


def rows_of(request: proto.ForwardBackwardRequest) -> list[dict[str, Any]]:
    """The datums of a request, as `LocalTrainingClient` takes them.

    Raises:
        DataError: a datum holds what is no text, or bytes that are no tensor; it is named.
    """
    rows = []
    for number, datum in enumerate(request.data):
        where = f"data[{number}]"
        tokens = np.concatenate(
            [np.zeros(0, np.int32), *(_tokens(chunk, f"{where}.model_input") for chunk in datum.model_input)]
        )
        fields = {
            key: _tensor(value, f"{where}.loss_fn_inputs.{key}") for key, value in sorted(datum.loss_fn_inputs.items())
        }
        rows.append({"model_input": torch.from_numpy(tokens.astype(np.int64)), "loss_fn_inputs": fields})
    return rows


def settings_of(request: proto.ForwardBackwardRequest) -> dict[str, float]:
    """The settings of the loss.

    Raises:
        DataError: one is text, which no loss here reads.
    """
    if request.loss_fn_config_v2:
        for key, value in request.loss_fn_config_v2.items():
            if value.WhichOneof("value") != "number":
                raise DataError("it is no number", where=f"loss_fn_config.{key}", remedy="give a number")
        return {key: value.number for key, value in request.loss_fn_config_v2.items()}
    return dict(request.loss_fn_config)


def forward_backward_output(output: ForwardBackwardOutput) -> bytes:
    """The SDK's ForwardBackwardOutput; log-probabilities in fp32, which is all that it can carry."""
    message = proto.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=output.metrics)
    arrays = [datum["logprobs"].to_torch().to(torch.float32).numpy() for datum in output.loss_fn_outputs]
    for shape, group in itertools.groupby(arrays, key=lambda array: array.shape[1:]):  # rectangular but for rows
        rows = list(group)
        record = message.loss_fn_outputs.add(num_datums=len(rows))
        field = record.fields["logprobs"]
        field.dtype = proto.DTYPE_FLOAT32
        field.trailing_shape.extend(shape)
        field.data = b"".join(np.ascontiguousarray(row).tobytes() for row in rows)
        field.offsets = np.cumsum([0, *(row.nbytes for row in rows)], dtype=np.int64).tobytes()
    return message.SerializeToString()


def parse_sample(body: bytes) -> types.SampleRequest:
    """A stored request to sample."""
    return types.SampleRequest.model_validate_json(body)


def sample_response(found: SampleResponse) -> bytes:
    """The SDK's SampleResponse."""
    message = proto.SampleResponse()
    for sequence in found.sequences:
        one = message.sequences.add(
            stop_reason=proto.STOP_REASON_STOP if sequence.stop_reason == "stop" else proto.STOP_REASON_LENGTH,
            tokens=np.asarray(sequence.tokens, np.int32).tobytes(),
            logprobs=np.asarray(sequence.logprobs, np.float32).tobytes(),
        )
        if sequence.topk_logprobs is not None:
            one.topk_sampled_logprobs.CopyFrom(_top(sequence.topk_logprobs))
    if found.prompt_logprobs is not None:
        told = np.asarray([np.nan if one is None else one for one in found.prompt_logprobs], np.float32)
        message.prompt_logprobs = told.tobytes()
    if found.topk_prompt_logprobs is not None:
        message.topk_prompt_logprobs.CopyFrom(_top(found.topk_prompt_logprobs))
    return message.SerializeToString()


def as_json(value: Mapping[str, Any]) -> bytes:
    """A result that is JSON."""
    return json.dumps(value).encode()


def _tokens(chunk: proto.Chunk, where: str) -> np.ndarray[Any, Any]:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        raise DataError(f"a chunk of {kind or 'nothing'} is no text", where=where, remedy="give token ids alone")
    return _numbers(chunk.encoded_text.tokens, np.dtype("<i4"), where)


def _tensor(message: proto.Tensor, where: str) -> torch.Tensor:
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise DataError(f"dtype {message.dtype} is unknown", where=where, remedy="send float32 or int64")
    shape = tuple(message.shape)
    if any(not 0 <= size <= _LONGEST for size in shape) or len(shape) > 2:
        raise DataError(f"{list(shape)} is the shape of no numbers per token", where=where, remedy="send [T] or [T, K]")
    if message.WhichOneof("encoding") == "sparse_csr":
        return _dense(message.sparse_csr, dtype, shape, where)
    values = _numbers(message.dense, dtype, where)
    if shape and math.prod(shape) != len(values):
        raise DataError(f"{len(values)} numbers are no tensor of {list(shape)}", where=where)
    return torch.from_numpy(values.reshape(shape) if shape else values)


def _dense(csr: proto.SparseCsr, dtype: np.dtype[Any], shape: Sequence[int], where: str) -> torch.Tensor:
    """A matrix of which only some cells were sent; the others are 0."""
    values = _numbers(csr.values, dtype, where)
    crow, col = (_numbers(part, np.dtype("<i8"), where) for part in (csr.crow_indices, csr.col_indices))
    sound = len(shape) == 2 and len(crow) == shape[0] + 1 and len(col) == len(values)
    sound = sound and crow[0] == 0 and crow[-1] == len(col) and bool((np.diff(crow) >= 0).all())
    if not sound or (len(col) and (int(col.min()) < 0 or int(col.max()) >= shape[1])):
        raise DataError(f"its indices are those of no sparse matrix of {list(shape)}", where=where)
    if shape[0] * shape[1] > 1 << 28:
        raise DataError(f"a matrix of {list(shape)} is too large", where=where, remedy="send fewer rows at once")
    full = np.zeros(shape, dtype)
    full[np.repeat(np.arange(shape[0]), np.diff(crow)), col] = values
    return torch.from_numpy(full)


def _numbers(data: bytes, dtype: np.dtype[Any], where: str) -> np.ndarray[Any, Any]:
    if len(data) % dtype.itemsize:
        raise DataError(f"{len(data)} bytes are no whole number of {dtype.name}", where=where)
    return np.frombuffer(data, dtype).copy()


def _top(rows: Sequence[TopTokens | None]) -> proto.TopkLogprobs:
    """A table [positions, k] of likeliest tokens."""
    width = max((len(row) for row in rows if row), default=0)
    ids = np.full((len(rows), width), _NO_TOKEN, np.int32)
    logprobs = np.full((len(rows), width), _NO_LOGPROB, np.float32)
    for number, row in enumerate(rows):
        for place, (token, logprob) in enumerate(row or ()):
            ids[number, place], logprobs[number, place] = token, logprob
    return proto.TopkLogprobs(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=width, length=len(rows))
