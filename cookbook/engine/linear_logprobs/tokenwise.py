"""Gradients in the forward pass, for losses whose slope by a logprob is known as soon as that logprob is.

The logits of a chunk of rows live just long enough to become the chunk's gradients: three products in all, none to form the
logits again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cookbook.engine.linear_logprobs.api import LowRank, Operands, linear_logprobs, operands
from cookbook.engine.linear_logprobs.gradient import Gradients, Upstream, add_gradients
from cookbook.engine.linear_logprobs.projection import Tiling, of_device
from cookbook.engine.linear_logprobs.scan import Wanted, scan
from cookbook.errors import BackendError

CHUNK_BYTES = {"cpu": 160 << 20, "cuda": 512 << 20}
CHUNK_ROWS = (64, 1024)

GradientOf = Callable[[slice, Tensor], Tensor]
"""``gradient_of(rows, logprobs) -> dL/dlogprob``: of the rows ``rows.start .. rows.stop``, both in the targets' shape there."""


@dataclass(frozen=True)
class FoldedLogprobs:
    """``logprobs``, ``entropy``, ``hit`` as in :class:`LinearLogprobs`, without a graph.

    ``surrogate`` carries the graph: a scalar, the sum of ``dL/dlogprob * logprob``, whose backward pass hands the gradients
    that are already there to hidden states, weight and bias.
    """

    logprobs: Tensor
    entropy: Tensor | None
    hit: Tensor | None
    surrogate: Tensor


def linear_logprobs_with_gradient(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    gradient_of: GradientOf,
    *,
    bias: Tensor | None = None,
    low_rank: LowRank | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    hit: bool = False,
    chunk_rows: int | None = None,
    cuts: Sequence[int] | None = None,
) -> FoldedLogprobs:
    """As :func:`linear_logprobs`, for a loss that is a sum of terms of one row each.

    ``gradient_of`` is called once for every chunk, in order; what it returns is not differentiated. A chunk has at most
    ``chunk_rows`` rows; with ``cuts``, ascending row numbers, it ends at one of them (and is longer where two are further
    apart), so that a caller can keep whole what belongs together. A frozen weight needs no chunks: one call, two products.

    Raises:
        BackendError: as :func:`linear_logprobs`.
    """
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "temperature": temperature}
    given = operands(hidden, weight, targets, bias, low_rank, **options)
    if not given.trained:
        found = linear_logprobs(hidden, weight, targets, bias=bias, low_rank=low_rank, entropy=entropy, hit=hit, **options)
        logprobs = found.logprobs.detach()
        slope = gradient_of(slice(0, len(targets)), logprobs)
        return FoldedLogprobs(logprobs, found.entropy, found.hit, (found.logprobs * slope).sum())
    rows = chunk_rows or _chunk_rows(given)
    chunks = _chunks(len(targets), rows, cuts)
    surrogate, logprobs, entropies, hits = _Fold.apply(  # type: ignore[no-untyped-call]
        given.hidden, given.weight, given.bias, given.low_hidden, given.low_weight, given, gradient_of, chunks, (entropy, hit)
    )
    return FoldedLogprobs(logprobs.reshape(targets.shape), entropies, hits, surrogate)


_MAKERS = (torch.zeros_like, torch.empty_like, torch.zeros_like, torch.zeros_like, torch.empty_like)


class _Fold(torch.autograd.Function):
    """Computes everything in its forward pass, and hands it over in its backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low_hidden: Tensor | None,
        low_weight: Tensor | None,
        given: Operands,
        gradient_of: GradientOf,
        chunks: list[slice],
        metrics: tuple[bool, bool],
    ) -> tuple[Tensor | None, ...]:
        likes = [hidden, weight, bias, low_hidden, low_weight]
        # The weights' gradients are written by the first chunk: to fill them would be one more pass over fresh memory.
        found = [
            None if like is None or not need else make(like, dtype=given.work_dtype)
            for like, need, make in zip(likes, ctx.needs_input_grad[:5], _MAKERS, strict=True)
        ]
        entropy, hit = metrics
        parts = []
        longest = max(rows.stop - rows.start for rows in chunks)
        # One buffer for all chunks: fresh pages cost more than the logits that are written to them.
        buffer = torch.empty(longest * len(weight), dtype=given.work_dtype, device=weight.device)
        value = hidden.new_zeros((), dtype=given.work_dtype)
        for number, rows in enumerate(chunks):
            projection = given.projection.select(rows)
            tiling = Tiling.of(projection, whole_rows=True)
            scores = scan(projection, tiling, Wanted(keep=True, entropy=entropy, hit=hit), buffer)
            shape = given.targets.shape[1:]
            logprobs = scores.logprobs.reshape(-1, *shape)
            slope = gradient_of(rows, logprobs).to(logprobs)
            value += (slope * logprobs).sum()
            xs = [None if x is None else x[rows] for x in (found[0], found[3])]
            into = Gradients(xs[: given.pairs], [found[1], found[4]][: given.pairs], found[2], empty=number == 0)
            add_gradients(projection, tiling, scores, Upstream(slope.reshape(scores.logprobs.shape)), into)
            parts.append((scores.logprobs, scores.entropy, scores.hit))
        ctx.gradients = [
            None if one is None or like is None else one.to(like.dtype) for one, like in zip(found, likes, strict=True)
        ]
        ctx.set_materialize_grads(False)
        outputs = [_joined(column) for column in zip(*parts, strict=True)]
        ctx.mark_non_differentiable(*[one for one in outputs if one is not None])
        return value, *outputs

    @staticmethod
    def backward(ctx: Any, by_value: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if by_value is None:
            return (None,) * 9
        # Given away, not lent: autograd copies a gradient that somebody else holds, and the weight's is the largest of a step.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise BackendError(
                "linear_logprobs_with_gradient: backward ran twice, and the gradients are handed over once; compute it again"
            )
        if float(by_value) != 1.0:
            for one in gradients:
                if one is not None:
                    one.mul_(by_value)
        return (*gradients, *[None] * 4)


def _joined(column: Sequence[Tensor | None]) -> Tensor | None:
    tensors = [one for one in column if one is not None]
    return torch.cat(tensors) if tensors else None


def _chunk_rows(given: Operands) -> int:
    least, most = CHUNK_ROWS
    budget = of_device(CHUNK_BYTES, given.targets.device)
    return min(max(budget // (given.work_dtype.itemsize * len(given.weight)), least), most)


def _chunks(rows: int, most: int, cuts: Sequence[int] | None) -> list[slice]:
    """At least one, so that no rows at all still leave a graph and gradients of zero."""
    if cuts is None:
        return [slice(start, min(start + most, rows)) for start in range(0, max(rows, 1), most)]
    chunks, start, last = [], 0, 0
    for cut in (*cuts, rows):
        if cut - start > most and last > start:
            chunks.append(slice(start, last))
            start = last
        last = cut
    return [*chunks, slice(start, rows)] if start < rows or not chunks else chunks
