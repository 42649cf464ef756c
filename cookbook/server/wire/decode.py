"""Decode request bodies: decompression, and the protobuf message of ``forward_backward``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import zstandard
from google.protobuf.message import DecodeError

from cookbook.backends.remote.connection import ALL_LOGPROBS
from cookbook.errors import DataError
from cookbook.losses import loss_class
from cookbook.server.wire import messages_pb2 as pb
from cookbook.server.wire.bodies import UPDATE_HINT, Refused
from cookbook.types import NOT_TEXT, Array, Datum, ModelInput, TensorData

MIB = 1 << 20
# Limit on the window of a zstd stream, which bounds the memory of decompression; 128 MiB is zstd's own default.
MAX_WINDOW_BYTES = 1 << 27

DTYPES: dict[int, np.dtype[np.float32] | np.dtype[np.int64] | np.dtype[np.int32]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
}
# Limit on the elements to which all sparse tensors of a request expand. Without it, a few bytes could claim any shape.
MAX_SPARSE_ELEMENTS = 1 << 26

# Tinker's ``stable_reinforce`` is not public. CISPO has the same purpose, training on off-policy samples: it bounds the
# importance ratio of every token and drops no token.
LOSS_ALIASES = {"stable_reinforce": "cispo"}
# Name of the losses that sessions create with create_custom_loss; the option ``loss_id`` selects one.
CUSTOM_LOSS = "custom"

OPTION_LITERALS = {"true": True, "false": False, "null": None}
LossOption = float | str | bool | None


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Decompress a body.

    Raises:
        Refused: 413, the result has more than ``limit`` bytes; 415, the encoding is unknown; 422, the body is damaged.
    """
    if encoding == "identity":
        return body
    if encoding != "zstd":
        raise Refused(415, f"Content-Encoding: unknown encoding {encoding!r}; send zstd or an uncompressed body")
    try:
        with zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).stream_reader(
            body, read_across_frames=True
        ) as reader:
            data: bytes = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise Refused(422, f"Content-Encoding: the body is not valid zstd: {error}") from None
    if len(data) > limit:
        raise Refused(413, f"the request decompresses to more than {limit >> 10:,} KiB; send smaller requests")
    return data


@dataclass(frozen=True)
class ForwardBackwardInput:
    """Arguments of a forward pass, or of a forward and backward pass.

    ``all_logprobs``: return logprobs also of tokens that the loss ignores. True by default, because the protocol cannot express
    missing logprobs and most clients use all of them.
    """

    data: list[Datum]
    loss_fn: str
    loss_fn_config: dict[str, LossOption]
    all_logprobs: bool = True


def parse_forward_backward(body: bytes) -> pb.ForwardBackwardRequest:
    """Parse the message. :func:`forward_backward_input` decodes its tensors when it is the turn of the request.

    Raises:
        Refused: 422, the body is not a ``ForwardBackwardRequest``, or lacks the run or the number of the request.
    """
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        hint = f"; {UPDATE_HINT}" if body[:1] == b"{" else ""
        raise Refused(422, f"forward_backward: the body is not a protobuf ForwardBackwardRequest ({error}){hint}") from None
    if not message.model_id or message.seq_id < 1:
        raise Refused(
            422,
            f"forward_backward: expected a model_id and a seq_id of at least 1, got {message.model_id!r} and {message.seq_id}",
        )
    return message


def _check_weights(data: Sequence[Datum]) -> None:
    """Raise DataError if a weight is not finite. Clients send the gradients of a custom loss as weights of cross_entropy."""
    for index, datum in enumerate(data):
        if (weights := datum.loss_fn_inputs.get("weights")) is not None and not np.isfinite(weights.array).all():
            values = weights.array.reshape(-1)
            place = int(np.flatnonzero(~np.isfinite(values))[0])
            raise DataError(
                f"datum {index}: weights holds {values[place]} at position {place}; if forward_backward_custom computed it, "
                "the gradient of the custom loss is not finite: check the loss for log(0), 0/0 or overflow"
            )


def forward_backward_input(message: pb.ForwardBackwardRequest) -> ForwardBackwardInput:
    """Decode the datums, the loss and its options.

    Raises:
        DataError: a datum is invalid; the error names the datum.
        ConfigError: the loss is unknown.
    """
    budget = _SparseBudget()
    data = [_datum(datum, index, budget) for index, datum in enumerate(message.data)]
    if message.loss_fn == "cross_entropy" and not message.forward_only:
        _check_weights(data)
    name = LOSS_ALIASES.get(message.loss_fn, message.loss_fn)
    options: dict[str, float | str] = {
        key: value.text if value.WhichOneof("choice") == "text" else value.number
        for key, value in message.loss_fn_config_v2.items()
    } or dict(message.loss_fn_config)
    all_logprobs = options.pop(ALL_LOGPROBS, "true") != "false"
    if name != message.loss_fn:
        # The options belong to the loss that the client named, not to its substitute.
        options = {}
    config: dict[str, LossOption] = {**options} if name == CUSTOM_LOSS else _typed_options(name, options)
    return ForwardBackwardInput(data, name, config, all_logprobs)


def _typed_options(name: str, options: Mapping[str, float | str]) -> dict[str, LossOption]:
    """Convert numbers and strings, the only types on the wire, to the types of the loss's fields."""
    flags = {field.name for field in fields(loss_class(name)) if field.type in ("bool", bool)}  # type: ignore[arg-type]
    typed: dict[str, LossOption] = {}
    for key, value in options.items():
        if isinstance(value, str):
            typed[key] = OPTION_LITERALS.get(value, value)
        else:
            typed[key] = bool(value) if key in flags and value in (0.0, 1.0) else value
    return typed


class _SparseBudget:
    """Number of elements to which the sparse tensors of one request may still expand."""

    def __init__(self) -> None:
        self._elements_left = MAX_SPARSE_ELEMENTS

    def take(self, num_elements: int) -> None:
        self._elements_left -= num_elements
        if self._elements_left < 0:
            raise DataError(
                f"the sparse tensors of the request expand to more than {MAX_SPARSE_ELEMENTS:,} numbers; send smaller requests"
            )


def _datum(message: pb.Datum, index: int, budget: _SparseBudget) -> Datum:
    try:
        tokens = [token for chunk in message.model_input for token in _tokens(chunk)]
        inputs = {
            key: TensorData(_scalar_or_array(_array(key, tensor, budget), len(tensor.shape), len(tokens)))
            for key, tensor in message.loss_fn_inputs.items()
        }
        return Datum(ModelInput.from_ints(tokens), inputs)
    except DataError as error:
        raise DataError(f"datum {index}: {error}") from None


def _scalar_or_array(array: Array, num_dimensions: int, num_tokens: int) -> Array:
    """Return one element without a shape as a scalar, unless the sequence has one token.

    A value without a shape is ambiguous: it is either a scalar for the whole sequence, or an array of a client that omits
    shapes.
    """
    return array.reshape(()) if not num_dimensions and len(array) == 1 != num_tokens else array


def _tokens(chunk: pb.Chunk) -> list[int]:
    if chunk.WhichOneof("choice") != "encoded_text":
        raise DataError(NOT_TEXT)
    ids: list[int] = _numbers("model_input", chunk.encoded_text.tokens, pb.DTYPE_INT32).tolist()
    return ids


def _numbers(key: str, data: bytes, dtype: pb.DType) -> Array:
    if dtype not in DTYPES:
        raise DataError(f"{key}: unknown dtype {dtype}; send float32 (1) or int64 (2)")
    if len(data) % DTYPES[dtype].itemsize:
        raise DataError(f"{key}: expected a multiple of {DTYPES[dtype].itemsize} bytes ({DTYPES[dtype].name}), got {len(data)}")
    return np.frombuffer(data, DTYPES[dtype])


def _array(key: str, tensor: pb.Tensor, budget: _SparseBudget) -> Array:
    shape = list(tensor.shape)
    if any(size < 0 for size in shape):
        raise DataError(f"{key}: negative size in the shape {shape}")
    if tensor.WhichOneof("choice") == "sparse_csr":
        return _dense(key, tensor, shape, budget)
    values = _numbers(key, tensor.dense, tensor.dtype)
    if shape and math.prod(shape) != len(values):
        raise DataError(f"{key}: {len(values)} values do not fill the shape {shape}")
    return values.reshape(shape) if shape else values


def _dense(key: str, tensor: pb.Tensor, shape: Sequence[int], budget: _SparseBudget) -> Array:
    """Expand a compressed-sparse-row tensor; elements that it does not list are zero."""
    values = _numbers(key, tensor.sparse_csr.values, tensor.dtype)
    rows = _numbers(key, tensor.sparse_csr.crow_indices, pb.DTYPE_INT64)
    columns = _numbers(key, tensor.sparse_csr.col_indices, pb.DTYPE_INT64)
    if len(shape) != 2 or len(rows) != shape[0] + 1 or len(columns) != len(values):
        raise DataError(f"{key}: {len(values)} sparse values and {len(rows)} row indices do not fill the shape {shape}")
    if rows[0] != 0 or rows[-1] != len(values) or (np.diff(rows) < 0).any():
        raise DataError(f"{key}: the row indices of a sparse tensor must increase from 0 to the number of values")
    if len(columns) and (columns.min() < 0 or columns.max() >= shape[1]):
        raise DataError(f"{key}: a column index is outside the shape {shape}")
    budget.take(math.prod(shape))
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return dense
