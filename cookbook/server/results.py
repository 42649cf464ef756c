"""From what the trainer answers to bytes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from starlette.responses import Response

from cookbook.server import schema
from cookbook.server.errors import category, described
from cookbook.types import Array, ForwardBackwardOutput, SampleResponse, TensorData

JSON = "application/json"
COUNTS = frozenset({"tokens/trained"})  # metrics that add up over the chunks of a call


@dataclass(frozen=True)
class Result:
    """An answer, ready to be sent."""

    body: bytes
    content_type: str = JSON
    error: str | None = None  # why the call failed, if it did

    @property
    def is_failure(self) -> bool:
        return self.error is not None


def from_json(value: Mapping[str, Any]) -> Result:
    return Result(json.dumps(value).encode())


def failure(error: BaseException) -> Result:
    reason = described(error)
    return replace(from_json({"error": reason, "category": category(error)}), error=reason)


def passed(output: ForwardBackwardOutput) -> Result:
    """What a forward or a forward-backward pass found."""
    message = schema.ForwardBackwardOutput(loss_fn_output_type=output.loss_fn_output_type)
    message.metrics.update({wire_name(name): value for name, value in output.metrics.items() if name != "loss"})
    for _, rows in itertools.groupby(output.loss_fn_outputs, key=_kind):
        _add_record(message.loss_fn_outputs.add(type_tag=output.loss_fn_output_type), list(rows))
    return _written(message)


def _written(message: Any) -> Result:
    """The same bytes in every process: maps of the wire have no order of their own, and a replay is compared with what was."""
    return Result(message.SerializeToString(deterministic=True), schema.CONTENT_TYPE)


def wire_name(metric: str) -> str:
    """The metric's name with how to combine it over chunks, which the client insists on: ``loss/nll`` -> ``loss/nll:mean``."""
    if metric.count(":") == 1:
        return metric
    return f"{metric.replace(':', '/')}:{'sum' if metric in COUNTS else 'mean'}"


def _kind(row: Mapping[str, TensorData]) -> list[tuple[str, tuple[int, ...]]]:
    """Rows whose arrays have the same shape beyond the token axis share a record."""
    return [(name, tuple(tensor.shape[1:])) for name, tensor in row.items()]


def _add_record(record: Any, rows: Sequence[Mapping[str, TensorData]]) -> None:
    record.num_datums = len(rows)
    for name in rows[0]:
        arrays = [_float32(row[name].array) for row in rows]
        field = record.fields[name]
        field.data = b"".join(array.tobytes() for array in arrays)
        field.offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8").tobytes()
        field.dtype = schema.FLOAT32
        field.trailing_shape.extend(arrays[0].shape[1:])


def _float32(array: Array) -> Array:
    return np.ascontiguousarray(array, dtype="<f4")


NO_TOKEN, NO_LOGPROB = 0, -99999.0  # where the protocol has nothing: before the first token


@dataclass(frozen=True)
class Successors:
    """Of every token of a prompt but the last, the likeliest successors, best first: ``ids`` and ``logprobs``, ``(T-1, k)``."""

    ids: Array
    logprobs: Array

    def write(self, message: Any) -> None:
        """As a row for every token of the prompt: what could have stood in its place; nothing in the first's."""
        message.k, message.length = self.ids.shape[1], len(self.ids) + 1
        message.token_ids = np.pad(self.ids, ((1, 0), (0, 0)), constant_values=NO_TOKEN).astype("<i4").tobytes()
        message.logprobs = _float32(np.pad(self.logprobs, ((1, 0), (0, 0)), constant_values=NO_LOGPROB)).tobytes()


def sampled(
    response: SampleResponse,
    last_n: int | None = None,
    successors: Successors | None = None,
) -> Result:
    """``last_n`` limits the prompt's logprobs to that many at its end."""
    message = schema.SampleResponse()
    for sample in response.sequences:
        message.sequences.add(
            stop_reason=schema.STOPPED if sample.stop_reason == "stop" else schema.CUT,
            tokens=np.asarray(sample.tokens, dtype="<i4").tobytes(),
            logprobs=_float32(np.asarray(sample.logprobs)).tobytes(),
        )
    if response.prompt_logprobs is not None:
        message.prompt_logprobs = _with_gaps(response.prompt_logprobs, last_n).tobytes()
    if successors is not None:
        successors.write(message.topk_prompt_logprobs)
    return _written(message)


def _with_gaps(logprobs: Iterable[float | None], last_n: int | None) -> Array:
    """Not a number where there is no logprob."""
    values = np.array([np.nan if one is None else one for one in logprobs], dtype="<f4")
    if last_n is not None:
        values[:-last_n] = np.nan
    return values


def error_response(status: int, message: str) -> Response:
    return Response(json.dumps({"detail": message}), status, media_type=JSON)
