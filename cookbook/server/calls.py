"""From the bytes of a ``forward_backward`` request to a call of the trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from cookbook.backends.remote.facts import ALL_LOGPROBS
from cookbook.errors import DataError
from cookbook.losses import loss_class
from cookbook.server import schema
from cookbook.server.errors import Refused
from cookbook.types import NOT_TEXT, Array, Datum, ModelInput, TensorData

DTYPES: dict[int, np.dtype[Any]] = {
    schema.FLOAT32: np.dtype("<f4"),
    schema.INT64: np.dtype("<i8"),
    schema.INT32: np.dtype("<i4"),
}
SPARSE_NUMBERS = 1 << 26  # the sparse tensors of a request may name a shape, not bytes: together no more numbers than this

LOSS_NAMES = {"stable_reinforce": "cispo"}
"""Losses we know under another name. Tinker's own ``stable_reinforce`` is not public; CISPO is what we have for its purpose,
samples that are some steps old: it bounds every token's importance ratio and silences none."""

CUSTOM = "custom"  # a loss that the session has made, by the option loss_id

WORDS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class Call:
    """A forward or forward-backward pass, as it was asked for."""

    model_id: str
    seq_id: int
    data: list[Datum]
    loss_fn: str
    loss_fn_config: dict[str, Any]
    forward_only: bool
    all_logprobs: bool = True  # the protocol knows no gaps in them, and most clients compute with all


def parse(body: bytes) -> Any:
    """The message in ``body``.

    Raises:
        Refused: 422, it is none.
    """
    message = schema.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise Refused(422, f"forward_backward: the body is not the protobuf message it should be ({error})") from None
    if not message.model_id or message.seq_id < 1:
        raise Refused(
            422, f"forward_backward: needs a model_id and a seq_id from 1, got {message.model_id!r}, {message.seq_id}"
        )
    return message


def call_of(message: Any) -> Call:
    """What ``message`` asks for.

    Raises:
        DataError: naming the datum.
        ConfigError: no such loss.
    """
    budget = _Budget(SPARSE_NUMBERS)
    data = [_datum(one, index, budget) for index, one in enumerate(message.data)]
    name = LOSS_NAMES.get(message.loss_fn, message.loss_fn)
    options = {key: _value(value) for key, value in message.loss_fn_config_v2.items()} or dict(message.loss_fn_config)
    everything = options.pop(ALL_LOGPROBS, "true") != "false"
    if name != message.loss_fn:
        options = {}  # they are options of a loss that is not this one
    typed = options if name == CUSTOM else _typed(name, options)
    return Call(message.model_id, message.seq_id, data, name, typed, message.forward_only, everything)


def _value(value: Any) -> float | str:
    number: float = value.number
    text: str = value.text
    return text if value.WhichOneof("choice") == "text" else number


def _typed(name: str, options: Mapping[str, float | str]) -> dict[str, Any]:
    """The wire knows numbers and texts. True came as 1.0, if not as a word."""
    switches = {field.name for field in fields(loss_class(name)) if field.type in ("bool", bool)}  # type: ignore[arg-type]
    found: dict[str, Any] = {}
    for key, value in options.items():
        if isinstance(value, str):
            found[key] = WORDS.get(value, value)
        else:
            found[key] = bool(value) if key in switches and value in (0.0, 1.0) else value
    return found


class _Budget:
    """What the sparse tensors of one request may still unfold to."""

    def __init__(self, numbers: int) -> None:
        self.left = numbers

    def take(self, numbers: int) -> None:
        self.left -= numbers
        if self.left < 0:
            raise DataError(
                f"the sparse tensors of the request unfold to more than {SPARSE_NUMBERS:,} numbers; send less at once"
            )


def _datum(message: Any, index: int, budget: _Budget) -> Datum:
    try:
        tokens = [token for chunk in message.model_input for token in _tokens(chunk)]
        inputs = {
            key: TensorData(_of_sequence(_array(key, tensor, budget), len(tensor.shape), len(tokens)))
            for key, tensor in message.loss_fn_inputs.items()
        }
        return Datum(ModelInput.from_ints(tokens), inputs)
    except DataError as error:
        raise DataError(f"datum {index}: {error}") from None


def _of_sequence(array: Array, dimensions: int, length: int) -> Array:
    """A scalar, which speaks of the whole sequence, has no shape on the wire; nor has a list whose sender names none."""
    return array.reshape(()) if not dimensions and len(array) == 1 != length else array


def _tokens(chunk: Any) -> list[int]:
    if chunk.WhichOneof("choice") != "encoded_text":
        raise DataError(NOT_TEXT)
    ids: list[int] = _numbers("model_input", chunk.encoded_text.tokens, schema.INT32).tolist()
    return ids


def _numbers(key: str, data: bytes, dtype: int) -> Array:
    if dtype not in DTYPES:
        raise DataError(f"{key}: its dtype is {dtype}; send float32 (1) or int64 (2)")
    if len(data) % DTYPES[dtype].itemsize:
        raise DataError(f"{key}: {len(data)} bytes are not a whole number of {DTYPES[dtype].name}")
    return np.frombuffer(data, DTYPES[dtype])


def _array(key: str, tensor: Any, budget: _Budget) -> Array:
    shape = list(tensor.shape)
    if any(size < 0 for size in shape):
        raise DataError(f"{key}: its shape is {shape}")
    if tensor.WhichOneof("choice") == "sparse_csr":
        return _dense(key, tensor, shape, budget)
    values = _numbers(key, tensor.dense, tensor.dtype)
    if shape and math.prod(shape) != len(values):
        raise DataError(f"{key}: {len(values)} values do not make the shape {shape}")
    return values.reshape(shape) if shape else values


def _dense(key: str, tensor: Any, shape: Sequence[int], budget: _Budget) -> Array:
    """A compressed-row tensor with zeros where it names nothing: what is left out weighs nothing."""
    values = _numbers(key, tensor.sparse_csr.values, tensor.dtype)
    rows = _numbers(key, tensor.sparse_csr.crow_indices, schema.INT64)
    columns = _numbers(key, tensor.sparse_csr.col_indices, schema.INT64)
    if len(shape) != 2 or len(rows) != shape[0] + 1 or len(columns) != len(values):
        raise DataError(f"{key}: {len(values)} sparse values and {len(rows)} row indices do not make the shape {shape}")
    if rows[0] != 0 or rows[-1] != len(values) or (np.diff(rows) < 0).any():
        raise DataError(f"{key}: the row indices of a sparse tensor must rise from 0 to the number of its values")
    if len(columns) and (columns.min() < 0 or columns.max() >= shape[1]):
        raise DataError(f"{key}: a column index lies outside the shape {shape}")
    budget.take(math.prod(shape))
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return dense
