"""Encode the results of requests as JSON or protobuf."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from starlette.responses import Response

from cookbook.errors import BackendError, CookbookError
from cookbook.server.wire import messages_pb2 as pb
from cookbook.server.wire.bodies import TargetIds
from cookbook.types import Array, ForwardBackwardOutput, SampleResponse, TensorData

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
# Metrics that clients sum over the chunks of a request. All others are averaged.
COUNT_METRICS = frozenset({"tokens/trained"})
# Values of the first prompt token, which has no predecessor and therefore no logprobs.
NO_TOKEN, NO_LOGPROB = 0, -99999.0


@dataclass(frozen=True)
class StoredResult:
    """Encoded result of a request. ``error`` is the message of a failed request."""

    body: bytes
    content_type: str = JSON
    error: str | None = None

    @property
    def is_failure(self) -> bool:
        return self.error is not None

    def exception(self) -> CookbookError | None:
        """Recreate the exception of a failed request: its message, and whether the client or the server caused it."""
        if self.error is None:
            return None
        kind = CookbookError if json.loads(self.body)["category"] == "user" else BackendError
        return kind(self.error)


def from_json(value: Mapping[str, object]) -> StoredResult:
    return StoredResult(json.dumps(value).encode())


def failure(error: BaseException) -> StoredResult:
    """Encode an error. Its category is ``user`` or ``server``: the side that caused the failure."""
    is_known = isinstance(error, CookbookError)
    reason = str(error) if is_known else f"{type(error).__name__}: {error}"
    side = "user" if is_known and not isinstance(error, BackendError) else "server"
    return replace(from_json({"error": reason, "category": side}), error=reason)


def error_response(status: int, message: str) -> Response:
    return Response(json.dumps({"detail": message}), status, media_type=JSON)


def forward_backward_result(output: ForwardBackwardOutput) -> StoredResult:
    """Encode the output of a forward pass, or of a forward and backward pass."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type=output.loss_fn_output_type)
    message.metrics.update({wire_name(name): value for name, value in output.metrics.items() if name != "loss"})
    for _, rows in itertools.groupby(output.loss_fn_outputs, key=_names_and_shapes):
        _add_rows(message.loss_fn_outputs.add(type_tag=output.loss_fn_output_type), list(rows))
    return _serialized(message)


def _serialized(message: pb.ForwardBackwardOutput | pb.SampleResponse) -> StoredResult:
    """Serialize to the same bytes in every process.

    Protobuf does not define the order of map entries, but recovery compares the bytes of a replayed result with those in the
    log.
    """
    return StoredResult(message.SerializeToString(deterministic=True), PROTOBUF)


def wire_name(metric: str) -> str:
    """Append the reduction with which clients combine the metric over chunks: ``loss/nll`` -> ``loss/nll:mean``.

    The Tinker client requires the suffix.
    """
    if metric.count(":") == 1:
        return metric
    return f"{metric.replace(':', '/')}:{'sum' if metric in COUNT_METRICS else 'mean'}"


def _names_and_shapes(row: Mapping[str, TensorData]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the key of rows that share a record: the names of their arrays, and the shapes without the token axis."""
    return [(name, tuple(tensor.shape[1:])) for name, tensor in row.items()]


def _add_rows(record: pb.ArrayRecord, rows: Sequence[Mapping[str, TensorData]]) -> None:
    record.num_datums = len(rows)
    for name in rows[0]:
        arrays = [_float32(row[name].array) for row in rows]
        field = record.fields[name]
        field.data = b"".join(array.tobytes() for array in arrays)
        field.offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8").tobytes()
        field.dtype = pb.DTYPE_FLOAT32
        field.trailing_shape.extend(arrays[0].shape[1:])


def _float32(array: Array) -> Array:
    return np.ascontiguousarray(array, dtype="<f4")


def _write_topk(message: pb.TopkLogprobs, ids: Array, logprobs: Array) -> None:
    """Write one row per prompt token: the ``k`` most likely tokens at its position. The first row is a placeholder.

    Args:
        ids, logprobs: ``(T - 1, k)``, most likely first, for every prompt token but the first.
    """
    message.k, message.length = ids.shape[1], len(ids) + 1
    message.token_ids = np.pad(ids, ((1, 0), (0, 0)), constant_values=NO_TOKEN).astype("<i4").tobytes()
    message.logprobs = _float32(np.pad(logprobs, ((1, 0), (0, 0)), constant_values=NO_LOGPROB)).tobytes()


@dataclass(frozen=True)
class PromptExtras:
    """Parts of the result of a sampling request beyond samples and the logprobs of its prompt.

    Attributes:
        last_n: return logprobs of the last ``last_n`` prompt tokens only; None: of all.
        topk: the most likely tokens at each position of the prompt, as ids and logprobs ``(T - 1, k)``.
        sampled: the same for each sequence, at each of its positions.
        targets: token ids by position, and their logprobs, in the order of the ids.
    """

    last_n: int | None = None
    topk: tuple[Array, Array] | None = None
    sampled: Sequence[tuple[Array, Array]] = ()
    targets: tuple[TargetIds, Array] | None = None


def sample_result(response: SampleResponse, extras: PromptExtras) -> StoredResult:
    """Encode samples."""
    message = pb.SampleResponse()
    for number, sample in enumerate(response.sequences):
        sequence = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if sample.stop_reason == "stop" else pb.STOP_REASON_LENGTH,
            tokens=np.asarray(sample.tokens, dtype="<i4").tobytes(),
            logprobs=_float32(np.asarray(sample.logprobs)).tobytes(),
        )
        if extras.sampled:
            ids, logprobs = extras.sampled[number]
            sequence.topk_sampled_logprobs.k, sequence.topk_sampled_logprobs.length = ids.shape[1], len(ids)
            sequence.topk_sampled_logprobs.token_ids = ids.astype("<i4").tobytes()
            sequence.topk_sampled_logprobs.logprobs = _float32(logprobs).tobytes()
    if response.prompt_logprobs is not None:
        message.prompt_logprobs = _nan_where_missing(response.prompt_logprobs, extras.last_n).tobytes()
    if extras.topk is not None:
        _write_topk(message.topk_prompt_logprobs, *extras.topk)
    if extras.targets is not None:
        _write_targets(message.target_prompt_logprobs, *extras.targets)
    return _serialized(message)


def _write_targets(tensor: pb.Tensor, target_ids: TargetIds, logprobs: Array) -> None:
    """Write logprobs in the shape and layout of the ids that they belong to."""
    tensor.dtype = pb.DTYPE_FLOAT32
    tensor.shape.extend(target_ids.shape)
    if target_ids.sparse_crow_indices is None:
        tensor.dense = _float32(logprobs).tobytes()
        return
    tensor.sparse_csr.values = _float32(logprobs).tobytes()
    tensor.sparse_csr.crow_indices = np.asarray(target_ids.sparse_crow_indices, dtype="<i8").tobytes()
    tensor.sparse_csr.col_indices = np.asarray(target_ids.sparse_col_indices or [], dtype="<i8").tobytes()


def _nan_where_missing(logprobs: Iterable[float | None], last_n: int | None) -> Array:
    values = np.array([np.nan if logprob is None else logprob for logprob in logprobs], dtype="<f4")
    if last_n is not None:
        values[:-last_n] = np.nan
    return values
