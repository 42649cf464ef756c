"""The backward pass: from dL/dlogprob and dL/dentropy to the gradients of rows, weights and bias.

With ``p`` the probabilities and ``g = dL/dlogprob``, the logits' gradient is ``dz_j = -g p_j``, and ``g (1 - p)`` at the
target; the entropy ``H`` adds ``-gH p_j (log p_j + H)``. Each tile of it is formed once, in place, and goes into two products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cookbook.engine.linear_logprobs.projection import (
    LIKELY_BITS,
    LN2,
    LOG2E,
    Block,
    Projection,
    Tiling,
    add_product,
    part,
    product,
    uniform,
)
from cookbook.engine.linear_logprobs.scan import Scores

LEAST_BITS = -200.0  # stands for log2(0), where p log p is 0


@dataclass(frozen=True)
class Upstream:
    """What the loss sends back: ``logprobs`` ``(N, K)``; ``entropy`` ``(N,)`` or None."""

    logprobs: Tensor
    entropy: Tensor | None = None

    def select(self, rows: Tensor | slice) -> Upstream:
        return Upstream(self.logprobs[rows], None if self.entropy is None else self.entropy[rows])

    def active(self) -> Tensor:
        """Rows that have a gradient at all."""
        rows = (self.logprobs != 0).any(1)
        return (rows if self.entropy is None else rows | (self.entropy != 0)).nonzero()[:, 0]


@dataclass
class Gradients:
    """Where gradients are added up; ``xs`` and ``weights`` one per pair, None where not asked for."""

    xs: list[Tensor | None]
    weights: list[Tensor | None]
    bias: Tensor | None = None
    empty: bool = True  # the weights hold nothing yet, and may be written without being read


def add_gradients(projection: Projection, tiling: Tiling, scores: Scores, upstream: Upstream, into: Gradients) -> None:
    """Adds to ``into.weights`` and ``into.bias``, and writes ``into.xs``, which must be zero.

    Rows without a gradient cost nothing. Kept tiles, when ``scores`` has them, are read and left as they are.
    """
    blocks = [_BlockGradient(projection, tiling, rows, scores, upstream, into) for rows in tiling.blocks]
    tiles_at_once = 1 if all(block.plain for block in blocks) else 2
    buffer = torch.empty(
        tiles_at_once, tiling.block_rows * tiling.tile_columns, dtype=projection.work_dtype, device=projection.device
    )
    for index, tile in enumerate(tiling.tiles):
        outs = [None if weight is None else weight[tile] for weight in into.weights]
        sinks = [_sink(out, projection, len(blocks) > 1) for out in outs]
        for number, block in enumerate(blocks):
            block.add(index, tile, buffer, sinks, first=into.empty and number == 0)
        for out, sink in zip(outs, sinks, strict=True):
            if out is not None and sink is not None and sink is not out:
                out.copy_(sink)
    for block in blocks:
        block.finish()


def add_frozen_gradients(projection: Projection, scores: Scores, upstream: Upstream, into: Gradients) -> None:
    """Writes ``into.xs`` from the mixtures that the forward pass left: no product is computed."""
    assert scores.kept is not None
    values = target_gradient(projection, scores, upstream)
    widths = [weight.shape[1] for _, weight in projection.pairs]
    mixtures = torch.split(scores.kept, widths * (scores.kept.shape[1] // sum(widths)), 1)
    total = upstream.logprobs.sum(1, keepdim=True)
    for pair, out in enumerate(into.xs):
        if out is None:
            continue
        out.copy_(projection.target_rows(values, pair)).addcmul_(mixtures[pair], total, value=-1)
        if upstream.entropy is not None:
            out.addcmul_(mixtures[len(widths) + pair], upstream.entropy[:, None], value=-1)


def target_gradient(projection: Projection, scores: Scores, upstream: Upstream) -> Tensor:
    """``(N, K)``: dL/d(layer's output) at the target; with several, only what a target has beyond other columns."""
    values = upstream.logprobs
    if projection.one_target:
        values = values * -torch.expm1(scores.logprobs)
        if upstream.entropy is not None:
            assert scores.entropy is not None
            surprise = scores.logprobs + scores.entropy[:, None]
            values = values - upstream.entropy[:, None] * surprise * scores.logprobs.exp()
    values = values * projection.slope()[:, None]
    slope = projection.capped_slope(scores.normalizer[:, None] + scores.logprobs * LOG2E)
    return values if slope is None else values * slope


class _BlockGradient:
    """``dL/d(layer's output)`` of a block's active rows, as ``coefficient[:, None] * tile``, into the products."""

    def __init__(
        self, projection: Projection, tiling: Tiling, rows: slice, scores: Scores, upstream: Upstream, into: Gradients
    ) -> None:
        self.tiling, self.rows, self.into, self.kept = tiling, rows, into, scores.kept
        upstream = upstream.select(rows)
        active = upstream.active()
        self.active = None if len(active) == rows.stop - rows.start else active
        chosen = rows if self.active is None else active + rows.start
        upstream = upstream if self.active is None else upstream.select(active)
        self.scores = scores.select(chosen)
        self.block = Block(projection.select(chosen), tiling)
        self.projection = self.block.projection
        self.plain = upstream.entropy is None and projection.one_target and projection.softcap is None
        self.narrow = projection.dtype != projection.work_dtype
        self._coefficients(upstream)
        self.targets = target_gradient(self.projection, self.scores, upstream).mul_(self.coefficient[:, None]).reshape(-1)
        self.alpha = uniform(self.coefficient)
        self.weighed = [
            None if weight is None else x if self.alpha is not None else (x * self.coefficient[:, None]).to(x.dtype)
            for (x, _), weight in zip(self.projection.pairs, into.weights, strict=True)
        ]
        self.xs = [self._accumulator(out) for out in into.xs]

    def _coefficients(self, upstream: Upstream) -> None:
        slope = self.projection.slope()
        total = upstream.logprobs.sum(1) * slope
        self.factor = self.scores.factor[:, None]
        if self.plain:
            # The size of g goes into the exponent, or a cast, and its sign to the rows: no pass over the tile is spent on it.
            self.coefficient = -total.sign()
            self.shift = (self.scores.normalizer - total.abs().log2())[:, None]
            self.factor = self.factor * total.abs()[:, None]
            if self.kept is not None and not self.narrow:
                self.coefficient = self.coefficient * self.factor[:, 0]
            return
        self.coefficient = torch.ones_like(total)
        self.shift = self.scores.normalizer[:, None]
        self.constant, self.per_bit = -total[:, None], None
        if upstream.entropy is not None:
            assert self.scores.entropy is not None
            of_entropy = upstream.entropy * slope
            self.constant = self.constant - (of_entropy * self.scores.entropy)[:, None]
            self.per_bit = (of_entropy * -LN2)[:, None]

    def _accumulator(self, out: Tensor | None) -> Tensor | None:
        if out is None:
            return None
        return out[self.rows] if self.active is None else out.new_zeros(len(self.active), out.shape[1])

    def add(self, index: int, tile: slice, buffer: Tensor, sinks: list[Tensor | None], *, first: bool) -> None:
        """One tile's share; ``sinks`` are the tile's parts of the weights' gradients, written when ``first``."""
        values = self._values(index, tile, buffer).to(self.projection.dtype)
        for (_, weight), x, weighed, sink in zip(self.projection.pairs, self.xs, self.weighed, sinks, strict=True):
            if x is not None:
                add_product(values, weight[tile], x)
            if sink is not None and weighed is not None:
                (product if first else add_product)(values.T, weighed, sink, self.alpha)
        if self.into.bias is not None:
            self.into.bias[tile] += torch.mv(values.T.to(self.coefficient.dtype), self.coefficient)

    def finish(self) -> None:
        for out, x in zip(self.into.xs, self.xs, strict=True):
            if out is not None and x is not None:
                x.mul_(self.coefficient[:, None])
                if self.active is not None:
                    out[self.rows].index_copy_(0, self.active, x)

    def _values(self, index: int, tile: slice, buffer: Tensor) -> Tensor:
        shape = (self.projection.num_rows, tile.stop - tile.start)
        out, second = part(buffer[0], shape), part(buffer[-1], shape)
        if self.kept is None:
            bits = self.block.bits(tile, out)
            if self.block.rounds:
                self.block.sharpen(bits, tile, self.scores.normalizer + LIKELY_BITS)
            bits.sub_(self.shift)
            values = bits.exp2_() if self.plain else self._general(bits, torch.exp2(bits, out=second))
        else:
            exponentials = self.tiling.view(self.kept, self.rows, tile)
            if self.active is not None:
                exponentials = exponentials[self.active]
            if self.plain:  # the targets are in place
                return torch.mul(exponentials, self.factor, out=out) if self.narrow else exponentials
            log_p = torch.log2(exponentials, out=out).add_(self.factor.log2()).clamp_(min=LEAST_BITS)
            values = self._general(log_p, torch.mul(exponentials, self.factor, out=second))
        rows, columns, places = self.block.placed[index]
        values.index_put_((rows, columns), self.targets[places], accumulate=not self.projection.one_target)
        return values

    def _general(self, log_p: Tensor, p: Tensor) -> Tensor:
        """With the entropy's gradient, a soft cap, or several targets; overwrites both arguments."""
        slope = self.projection.capped_slope(log_p + self.shift) if self.projection.softcap is not None else None
        weights = self.constant if self.per_bit is None else log_p.mul_(self.per_bit).add_(self.constant)
        p.mul_(weights)
        return p if slope is None else p.mul_(slope)


def _sink(out: Tensor | None, projection: Projection, several: bool) -> Tensor | None:
    """Where a tile of a weight's gradient adds up: in float32 when there is more to add than one product."""
    if out is None or not several or out.dtype == projection.work_dtype:
        return out
    return torch.empty_like(out, dtype=projection.work_dtype)
