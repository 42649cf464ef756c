"""Gradients in the forward pass, for losses that are sums over tokens or sequences.

The logits of each chunk of rows are computed once, used for the chunk's gradients, and dropped: three matrix products in total.
Recomputing the logits in a backward pass would be a fourth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cookbook.engine.head.linear_logprobs.api import LinearLayer, LinearLogprobs, joined, linear_logprobs, operands
from cookbook.engine.head.linear_logprobs.operator import HeadGradients, Operands, Upstream, add_gradients
from cookbook.engine.head.linear_logprobs.scan import ScanSpec, Tiling, device_limit, scan
from cookbook.errors import BackendError

CHUNK_BYTES = {"cpu": 160 << 20, "cuda": 512 << 20}
CHUNK_ROWS = (64, 1024)

GradientOf = Callable[[slice, Tensor], Tensor]
"""``gradient_of(rows, logprobs) -> dL/dlogprob`` of these rows; both tensors have the shape of ``targets[rows]``."""


@dataclass(frozen=True)
class LogprobsWithGradient(LinearLogprobs):
    """Scores without a graph, and a scalar ``surrogate`` with a graph.

    ``surrogate`` is the sum of ``dL/dlogprob * logprob``. Its backward pass returns the gradients of hidden states, weight and
    bias that the forward pass has computed.
    """

    surrogate: Tensor


def linear_logprobs_with_gradient(
    hidden: Tensor,
    layer: LinearLayer,
    targets: Tensor,
    gradient_of: GradientOf,
    temperature: Tensor | None = None,
    *,
    entropy: bool = False,
    hit: bool = False,
    chunk_rows: int | None = None,
    boundaries: Sequence[int] | None = None,
) -> LogprobsWithGradient:
    """Return the results of :func:`linear_logprobs`, and the gradient of a loss that is a sum over rows or groups of rows.

    ``gradient_of`` is called once per chunk, in order; its result is not differentiated. ``chunk_rows``: largest number of rows
    of a chunk. ``boundaries``: ascending row numbers at which chunks may end, so that the rows between two boundaries are in
    one chunk, even if there are more than ``chunk_rows``. A frozen weight is computed in one chunk, with two matrix products.

    Raises:
        BackendError: shapes or dtypes do not match, or an option is invalid.
    """
    inputs = operands(hidden, layer, targets, temperature)
    if not inputs.trained:
        scores = linear_logprobs(hidden, layer, targets, temperature, entropy=entropy, hit=hit)
        logprobs = scores.logprobs.detach()
        upstream = gradient_of(slice(0, len(targets)), logprobs)
        return LogprobsWithGradient(logprobs, scores.entropy, scores.hit, (scores.logprobs * upstream).sum())

    def upstream_of(rows: slice, logprobs: Tensor) -> Tensor:
        upstream = gradient_of(rows, logprobs.reshape(-1, *targets.shape[1:]))
        return upstream.to(logprobs).reshape(logprobs.shape)

    trainable = (inputs.hidden, inputs.weight, inputs.bias, inputs.low_hidden, inputs.low_weight)
    chunks = _chunks(len(targets), chunk_rows or _chunk_rows(inputs), boundaries)
    surrogate, logprobs, entropies, hits = _GradientInForward.apply(*trainable, inputs, upstream_of, chunks, entropy, hit)  # type: ignore[no-untyped-call]
    return LogprobsWithGradient(logprobs.reshape(targets.shape), entropies, hits, surrogate)


_BUFFER_FACTORIES = (torch.zeros_like, torch.empty_like, torch.zeros_like, torch.zeros_like, torch.empty_like)


class _GradientInForward(torch.autograd.Function):
    """Autograd function whose forward pass computes the gradients that its backward pass returns."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low_hidden: Tensor | None,
        low_weight: Tensor | None,
        inputs: Operands,
        upstream_of: GradientOf,
        chunks: list[slice],
        entropy: bool,
        hit: bool,
    ) -> tuple[Tensor | None, ...]:
        likes = [hidden, weight, bias, low_hidden, low_weight]
        # The weights' gradients are not zeroed: the first chunk overwrites them, which saves a pass over new memory.
        gradients = [
            None if like is None or not need else make(like, dtype=inputs.work_dtype)
            for like, need, make in zip(likes, ctx.needs_input_grad[:5], _BUFFER_FACTORIES, strict=True)
        ]
        parts = []
        longest = max(rows.stop - rows.start for rows in chunks)
        # One buffer for all chunks: the first touch of new pages costs more than computing the logits in them.
        buffer = torch.empty(longest * len(weight), dtype=inputs.work_dtype, device=weight.device)
        value = hidden.new_zeros((), dtype=inputs.work_dtype)
        for number, rows in enumerate(chunks):
            projection = inputs.projection().select(rows)
            tiling = Tiling.of(projection, whole_rows=True)
            scores = scan(projection, tiling, ScanSpec(keep=True, entropy=entropy, hit=hit), buffer)
            upstream = upstream_of(rows, scores.logprobs)
            value += (upstream * scores.logprobs).sum()
            xs = [None if x is None else x[rows] for x in (gradients[0], gradients[3])]
            pairs = len(projection.pairs)
            into = HeadGradients(xs[:pairs], [gradients[1], gradients[4]][:pairs], gradients[2], empty=number == 0)
            add_gradients(projection, tiling, scores, Upstream(upstream), into)
            parts.append((scores.logprobs, scores.entropy, scores.hit))
        ctx.gradients = [
            None if gradient is None or like is None else gradient.to(like.dtype)
            for gradient, like in zip(gradients, likes, strict=True)
        ]
        ctx.set_materialize_grads(False)
        outputs = [joined(column) for column in zip(*parts, strict=True)]
        ctx.mark_non_differentiable(*[output for output in outputs if output is not None])
        return value, *outputs

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if upstream is None:
            return (None,) * 10
        # Drop the references: autograd copies a gradient that has another reference, and the weight's gradient is large.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise BackendError(
                "linear_logprobs_with_gradient: backward ran twice, but the gradients are kept for one; run forward again"
            )
        if float(upstream) != 1.0:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(upstream)
        return (*gradients, *[None] * 5)


def _chunk_rows(inputs: Operands) -> int:
    least, most = CHUNK_ROWS
    budget = device_limit(CHUNK_BYTES, inputs.targets.device)
    return min(max(budget // (inputs.work_dtype.itemsize * len(inputs.weight)), least), most)


def _chunks(rows: int, most: int, boundaries: Sequence[int] | None) -> list[slice]:
    """Return the chunks; at least one, so that an empty batch has a graph, and gradients of zero."""
    if boundaries is None:
        return [slice(start, min(start + most, rows)) for start in range(0, max(rows, 1), most)]
    chunks, start, last = [], 0, 0
    for cut in (*boundaries, rows):
        if cut - start > most and last > start:
            chunks.append(slice(start, last))
            start = last
        last = cut
    return [*chunks, slice(start, rows)] if start < rows or not chunks else chunks
