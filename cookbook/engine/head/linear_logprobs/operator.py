"""The backward pass, and both passes as custom operators of torch, which ``torch.compile`` does not trace into.

With ``p`` the probabilities, ``g = dL/dlogprob`` and ``gH = dL/dH`` of the entropy ``H``, the gradient of the logits is
``dz_j = -g p_j - gH p_j (log p_j + H)``, plus ``g`` at the target. Each tile of ``dz`` is computed once, in place, and used in
two matrix products: for the hidden states and for the weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from cookbook.engine.head.linear_logprobs.scan import (
    LIKELY_BITS,
    LN2,
    LOG2E,
    Projection,
    RowBlock,
    ScanOutput,
    ScanSpec,
    Tiling,
    add_product,
    buffer_view,
    common_value,
    product,
    scan,
)

# Finite stand-in for log2(0), so that p log p is 0 and not NaN.
LEAST_BITS = -200.0


@dataclass(frozen=True)
class Upstream:
    """Upstream gradients: dL/dlogprob ``(N, K)`` and dL/dentropy ``(N,)`` or None."""

    logprobs: Tensor
    entropy: Tensor | None = None

    def select(self, rows: Tensor | slice) -> Upstream:
        return Upstream(self.logprobs[rows], None if self.entropy is None else self.entropy[rows])

    def active(self) -> Tensor:
        """Return the indices of the rows with a nonzero gradient."""
        rows = (self.logprobs != 0).any(1)
        return (rows if self.entropy is None else rows | (self.entropy != 0)).nonzero()[:, 0]


@dataclass
class HeadGradients:
    """Buffers for the gradients. ``xs`` and ``weights``: one per pair of the projection, None if not needed.

    ``empty``: the buffers of the weights are uninitialized, and are overwritten instead of added to.
    """

    xs: list[Tensor | None]
    weights: list[Tensor | None]
    bias: Tensor | None = None
    empty: bool = True


def add_gradients(projection: Projection, tiling: Tiling, scores: ScanOutput, upstream: Upstream, into: HeadGradients) -> None:
    """Add to ``into.weights`` and ``into.bias``, and write ``into.xs``, which must be zero before.

    Rows with a zero gradient are skipped. Kept tiles in ``scores`` are not changed.
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


def add_frozen_gradients(projection: Projection, scores: ScanOutput, upstream: Upstream, into: HeadGradients) -> None:
    """Write ``into.xs`` from the mixtures that the forward pass has kept, without a matrix product."""
    assert scores.cache is not None
    values = target_gradient(projection, scores, upstream)
    widths = [weight.shape[1] for _, weight in projection.pairs]
    mixtures = torch.split(scores.cache, widths * (scores.cache.shape[1] // sum(widths)), 1)
    total = upstream.logprobs.sum(1, keepdim=True)
    for pair, out in enumerate(into.xs):
        if out is None:
            continue
        out.copy_(projection.target_rows(values, pair)).addcmul_(mixtures[pair], total, value=-1)
        if upstream.entropy is not None:
            out.addcmul_(mixtures[len(widths) + pair], upstream.entropy[:, None], value=-1)


def target_gradient(projection: Projection, scores: ScanOutput, upstream: Upstream) -> Tensor:
    """Return dL/d(layer's output) at the targets, ``(N, K)``; with K > 1, only the term that exists at targets alone."""
    values = upstream.logprobs
    if projection.one_target:
        values = values * -torch.expm1(scores.logprobs)
        if upstream.entropy is not None:
            assert scores.entropy is not None
            surprise = scores.logprobs + scores.entropy[:, None]
            values = values - upstream.entropy[:, None] * surprise * scores.logprobs.exp()
    values = values * projection.logit_derivative()[:, None]
    derivative = projection.softcap_derivative(scores.normalizer[:, None] + scores.logprobs * LOG2E)
    return values if derivative is None else values * derivative


class _BlockGradient:
    """Gradients of one block, for its rows with a nonzero upstream gradient.

    dL/d(layer's output) is ``coefficient[:, None] * tile``. ``plain``: one target, no entropy gradient and no soft cap, so a
    tile is a scaled softmax and needs no further pass.
    """

    def __init__(
        self, projection: Projection, tiling: Tiling, rows: slice, scores: ScanOutput, upstream: Upstream, into: HeadGradients
    ) -> None:
        self.tiling, self.rows, self.into, self.cache = tiling, rows, into, scores.cache
        upstream = upstream.select(rows)
        active = upstream.active()
        self.active = None if len(active) == rows.stop - rows.start else active
        chosen = rows if self.active is None else active + rows.start
        upstream = upstream if self.active is None else upstream.select(active)
        self.scores = scores.select(chosen)
        self.block = RowBlock(projection.select(chosen), tiling)
        self.projection = self.block.projection
        self.plain = upstream.entropy is None and projection.one_target and projection.softcap is None
        self.narrow = projection.dtype != projection.work_dtype
        self._coefficients(upstream)
        self.targets = target_gradient(self.projection, self.scores, upstream).mul_(self.coefficient[:, None]).reshape(-1)
        self.alpha = common_value(self.coefficient)
        self.weighted_xs = [
            None if weight is None else x if self.alpha is not None else (x * self.coefficient[:, None]).to(x.dtype)
            for (x, _), weight in zip(self.projection.pairs, into.weights, strict=True)
        ]
        self.xs = [self._accumulator(out) for out in into.xs]

    def _coefficients(self, upstream: Upstream) -> None:
        derivative = self.projection.logit_derivative()
        total = upstream.logprobs.sum(1) * derivative
        self.factor = self.scores.factor[:, None]
        if self.plain:
            # Fold |g| into the exponent (or into a cast that is needed anyway), and the sign of g into the rows, so that
            # multiplying by g needs no pass over the tile.
            self.coefficient = -total.sign()
            self.shift = (self.scores.normalizer - total.abs().log2())[:, None]
            self.factor = self.factor * total.abs()[:, None]
            if self.cache is not None and not self.narrow:
                self.coefficient = self.coefficient * self.factor[:, 0]
            return
        self.coefficient = torch.ones_like(total)
        self.shift = self.scores.normalizer[:, None]
        self.constant, self.per_bit = -total[:, None], None
        if upstream.entropy is not None:
            assert self.scores.entropy is not None
            of_entropy = upstream.entropy * derivative
            self.constant = self.constant - (of_entropy * self.scores.entropy)[:, None]
            self.per_bit = (of_entropy * -LN2)[:, None]

    def _accumulator(self, out: Tensor | None) -> Tensor | None:
        if out is None:
            return None
        return out[self.rows] if self.active is None else out.new_zeros(len(self.active), out.shape[1])

    def add(self, index: int, tile: slice, buffer: Tensor, sinks: list[Tensor | None], *, first: bool) -> None:
        """Add the gradients of one tile. ``sinks``: the tile's rows of the weights' gradients, overwritten if ``first``."""
        values = self._values(index, tile, buffer).to(self.projection.dtype)
        for (_, weight), x, weighted_x, sink in zip(self.projection.pairs, self.xs, self.weighted_xs, sinks, strict=True):
            if x is not None:
                add_product(values, weight[tile], x)
            if sink is not None and weighted_x is not None:
                (product if first else add_product)(values.T, weighted_x, sink, self.alpha)
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
        out, second = buffer_view(buffer[0], shape), buffer_view(buffer[-1], shape)
        if self.cache is None:
            bits = self.block.bits(tile, out)
            if self.block.rounds_products:
                self.block.recompute_likely(bits, tile, self.scores.normalizer + LIKELY_BITS)
            bits.sub_(self.shift)
            values = bits.exp2_() if self.plain else self._general(bits, torch.exp2(bits, out=second))
        else:
            exponentials = self.tiling.view(self.cache, self.rows, tile)
            if self.active is not None:
                exponentials = exponentials[self.active]
            if self.plain:
                # The forward pass has already written the values at the targets.
                return torch.mul(exponentials, self.factor, out=out) if self.narrow else exponentials
            log_p = torch.log2(exponentials, out=out).add_(self.factor.log2()).clamp_(min=LEAST_BITS)
            values = self._general(log_p, torch.mul(exponentials, self.factor, out=second))
        rows, columns, indices = self.block.targets_by_tile[index]
        values.index_put_((rows, columns), self.targets[indices], accumulate=not self.projection.one_target)
        return values

    def _general(self, log_p: Tensor, p: Tensor) -> Tensor:
        """Compute a tile with an entropy gradient, a soft cap, or several targets. Overwrites both arguments."""
        derivative = self.projection.softcap_derivative(log_p + self.shift) if self.projection.softcap is not None else None
        weights = self.constant if self.per_bit is None else log_p.mul_(self.per_bit).add_(self.constant)
        p.mul_(weights)
        return p if derivative is None else p.mul_(derivative)


def _sink(out: Tensor | None, projection: Projection, several: bool) -> Tensor | None:
    """Return the accumulation buffer of a tile of a weight's gradient: float32 if ``several`` products are summed."""
    if out is None or not several or out.dtype == projection.work_dtype:
        return out
    return torch.empty_like(out, dtype=projection.work_dtype)


RECOMPUTE, CACHED, FROZEN = "recompute", "cached", "frozen"
# Positions of the operands that can require a gradient: hidden, weight, bias, low_hidden, low_weight.
TRAINABLE = (0, 1, 3, 4, 5)


class Operands(NamedTuple):
    """Operands of the operator, in its order, checked and of one dtype. An adapter is the pair low_hidden and low_weight."""

    hidden: Tensor
    weight: Tensor
    # (N, K)
    targets: Tensor
    bias: Tensor | None
    low_hidden: Tensor | None
    low_weight: Tensor | None
    # (N,)
    temperature: Tensor | None
    scale: float
    softcap: float | None

    @property
    def work_dtype(self) -> torch.dtype:
        return torch.promote_types(self.weight.dtype, torch.float32)

    @property
    def trained(self) -> bool:
        """Whether a parameter of the layer requires a gradient, not only the hidden states."""
        parameters = (self.weight, self.bias, self.low_weight)
        return torch.is_grad_enabled() and any(parameter is not None and parameter.requires_grad for parameter in parameters)

    def projection(self) -> Projection:
        low = () if self.low_hidden is None or self.low_weight is None else ((self.low_hidden, self.low_weight),)
        pairs = ((self.hidden, self.weight), *low)
        return Projection(pairs, self.targets, self.bias, self.temperature, self.scale, self.softcap)


@torch.library.custom_op("cookbook::linear_logprobs", mutates_args=())
def forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    low_hidden: Tensor | None,
    low_weight: Tensor | None,
    temperature: Tensor | None,
    scale: float,
    softcap: float | None,
    mode: str,
    entropy: bool,
    entropy_gradient: bool,
    hit: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return logprobs ``(N, K)``; entropy and hit, ``(N,)`` or empty; normalizer and factor, ``(N,)``; kept values or empty."""
    operands = Operands(hidden, weight, targets, bias, low_hidden, low_weight, temperature, scale, softcap)
    projection = operands.projection()
    frozen = mode == FROZEN
    spec = ScanSpec(keep=mode == CACHED, mixture=frozen, entropy=entropy, entropy_mixture=frozen and entropy_gradient, hit=hit)
    scores = scan(projection, Tiling.of(projection), spec)
    work = scores.logprobs
    return (
        scores.logprobs,
        work.new_empty(0) if scores.entropy is None else scores.entropy,
        targets.new_empty(0, dtype=torch.bool) if scores.hit is None else scores.hit,
        scores.normalizer,
        scores.factor,
        work.new_empty(0) if scores.cache is None else scores.cache,
    )


@forward.register_fake
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, *others: object
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    _, _, low_weight, _, _, _, mode, entropy, entropy_gradient, hit = others
    rows, dtype = targets.shape[0], torch.promote_types(weight.dtype, torch.float32)
    width = weight.shape[1] + (low_weight.shape[1] if isinstance(low_weight, Tensor) else 0)
    mixtures = 2 * width if entropy_gradient else width
    num_cached = {CACHED: (rows * weight.shape[0],), FROZEN: (rows, mixtures)}.get(str(mode), (0,))
    per_row = hidden.new_empty(rows, dtype=dtype)
    return (
        hidden.new_empty(targets.shape, dtype=dtype),
        hidden.new_empty(rows if entropy else 0, dtype=dtype),
        hidden.new_empty(rows if hit else 0, dtype=torch.bool),
        per_row,
        torch.empty_like(per_row),
        hidden.new_empty(num_cached, dtype=dtype),
    )


@torch.library.custom_op("cookbook::linear_logprobs_backward", mutates_args=())
def backward(
    logprobs_grad: Tensor,
    entropy_grad: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    low_hidden: Tensor | None,
    low_weight: Tensor | None,
    temperature: Tensor | None,
    logprobs: Tensor,
    entropy: Tensor,
    normalizer: Tensor,
    factor: Tensor,
    cache: Tensor,
    scale: float,
    softcap: float | None,
    mode: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of hidden, weight, bias, low_hidden and low_weight; empty where the flag in ``needs`` is false."""
    operands = Operands(hidden, weight, targets, bias, low_hidden, low_weight, temperature, scale, softcap)
    projection = operands.projection()
    scores = ScanOutput(
        logprobs, normalizer, factor, entropy if len(entropy) else None, cache=None if mode == RECOMPUTE else cache
    )
    upstream = Upstream(logprobs_grad, entropy_grad)
    parameters = [hidden, weight, bias, low_hidden, low_weight]
    x, w, b, low_x, low_w = (parameter if need else None for parameter, need in zip(parameters, needs, strict=True))
    work, pairs = projection.work_dtype, len(projection.pairs)
    xs = [None if operand is None else torch.zeros_like(operand, dtype=work) for operand in (x, low_x)]
    weights = [None if operand is None else torch.empty_like(operand) for operand in (w, low_w)]
    into = HeadGradients(xs[:pairs], weights[:pairs], None if b is None else torch.zeros_like(b, dtype=work))
    if mode == FROZEN:
        add_frozen_gradients(projection, scores, upstream, into)
    else:
        add_gradients(projection, Tiling.of(projection), scores, upstream, into)
    gradients = (xs[0], weights[0], into.bias, xs[1], weights[1])
    return tuple(
        hidden.new_empty(0) if value is None or like is None else value.to(like.dtype)
        for value, like in zip(gradients, parameters, strict=True)
    )  # type: ignore[return-value]


@backward.register_fake
def _(logprobs_grad: Tensor, entropy_grad: Tensor | None, *others: object) -> tuple[Tensor, ...]:
    hidden, *_, needs = others
    likes = [others[index] for index in TRAINABLE]
    return tuple(
        torch.empty_like(like) if need and isinstance(like, Tensor) else cast(Tensor, hidden).new_empty(0)
        for like, need in zip(likes, cast(list[bool], needs), strict=True)
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale, ctx.softcap, ctx.mode, _, _, _ = inputs
    logprobs, entropy, hit, normalizer, factor, cache = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(hit, normalizer, factor, cache)
    ctx.save_for_backward(*tensors, logprobs, entropy, normalizer, factor, cache)


def _backward(ctx: Any, logprobs_grad: Tensor | None, entropy_grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    needs = [ctx.needs_input_grad[index] for index in TRAINABLE]
    upstream = torch.zeros_like(saved[7]) if logprobs_grad is None else logprobs_grad
    gradients = backward(upstream, entropy_grad, *saved, ctx.scale, ctx.softcap, ctx.mode, needs)
    hidden, weight, bias, low_hidden, low_weight = (
        gradient if need else None for gradient, need in zip(gradients, needs, strict=True)
    )
    return (hidden, weight, None, bias, low_hidden, low_weight, *[None] * 7)


forward.register_autograd(_backward, setup_context=_setup)
