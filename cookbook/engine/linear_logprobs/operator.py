"""The two passes as operators of torch, opaque to its compiler and differentiable through each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cookbook.engine.linear_logprobs.gradient import Gradients, Upstream, add_frozen_gradients, add_gradients
from cookbook.engine.linear_logprobs.projection import Projection, Tiling
from cookbook.engine.linear_logprobs.scan import Scores, Wanted, scan

RECOMPUTE, CACHED, FROZEN = "recompute", "cached", "frozen"


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
    tile_bytes: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Logprobs ``(N, K)``; entropy, hit ``(N,)`` or empty; normalizer, factor ``(N,)``; what the mode keeps."""
    projection = _projection(hidden, weight, targets, bias, low_hidden, low_weight, temperature, scale, softcap, tile_bytes)
    wanted = Wanted(
        keep=mode == CACHED,
        mixture=mode == FROZEN,
        entropy=entropy,
        entropy_mixture=mode == FROZEN and entropy_gradient,
        hit=hit,
    )
    scores = scan(projection, Tiling.of(projection), wanted)
    work = scores.logprobs
    return (
        scores.logprobs,
        work.new_empty(0) if scores.entropy is None else scores.entropy,
        targets.new_empty(0, dtype=torch.bool) if scores.hit is None else scores.hit,
        scores.normalizer,
        scores.factor,
        work.new_empty(0) if scores.kept is None else scores.kept,
    )


@forward.register_fake
def _(
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
    tile_bytes: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, dtype = targets.shape[0], torch.promote_types(weight.dtype, torch.float32)
    mixtures = (weight.shape[1] + (0 if low_weight is None else low_weight.shape[1])) * (1 + entropy_gradient)
    kept = {CACHED: (rows * weight.shape[0],), FROZEN: (rows, mixtures)}.get(mode, (0,))
    per_row = hidden.new_empty(rows, dtype=dtype)
    return (
        hidden.new_empty(targets.shape, dtype=dtype),
        hidden.new_empty(rows if entropy else 0, dtype=dtype),
        hidden.new_empty(rows if hit else 0, dtype=torch.bool),
        per_row,
        torch.empty_like(per_row),
        hidden.new_empty(kept, dtype=dtype),
    )


@torch.library.custom_op("cookbook::linear_logprobs_backward", mutates_args=())
def backward(
    by_logprobs: Tensor,
    by_entropy: Tensor | None,
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
    kept: Tensor,
    scale: float,
    softcap: float | None,
    mode: str,
    needs: list[bool],
    tile_bytes: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight, bias, low_hidden, low_weight; empty where ``needs``, in this order, says so."""
    projection = _projection(hidden, weight, targets, bias, low_hidden, low_weight, temperature, scale, softcap, tile_bytes)
    scores = Scores(logprobs, normalizer, factor, entropy if len(entropy) else None, kept=None if mode == RECOMPUTE else kept)
    upstream = Upstream(by_logprobs, by_entropy)
    parameters = [hidden, weight, bias, low_hidden, low_weight]
    wanted = [one if need else None for one, need in zip(parameters, needs, strict=True)]
    work = projection.work_dtype
    xs = [None if x is None else torch.zeros_like(x, dtype=work) for x in (wanted[0], wanted[3])]
    weights = [None if w is None else torch.empty_like(w) for w in (wanted[1], wanted[4])]
    into = Gradients(
        xs[: len(projection.pairs)],
        weights[: len(projection.pairs)],
        None if wanted[2] is None else torch.zeros_like(wanted[2], dtype=work),
    )
    if mode == FROZEN:
        add_frozen_gradients(projection, scores, upstream, into)
    else:
        add_gradients(projection, Tiling.of(projection), scores, upstream, into)
    found = [xs[0], weights[0], into.bias, xs[1], weights[1]]
    return tuple(
        hidden.new_empty(0) if value is None or like is None else value.to(like.dtype)
        for value, like in zip(found, parameters, strict=True)
    )  # type: ignore[return-value]


@backward.register_fake
def _(
    by_logprobs: Tensor,
    by_entropy: Tensor | None,
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
    kept: Tensor,
    scale: float,
    softcap: float | None,
    mode: str,
    needs: list[bool],
    tile_bytes: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    likes = (hidden, weight, bias, low_hidden, low_weight)
    return tuple(
        torch.empty_like(like) if need and like is not None else hidden.new_empty(0)
        for like, need in zip(likes, needs, strict=True)
    )  # type: ignore[return-value]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale, ctx.softcap, ctx.mode, _, _, _, ctx.tile_bytes = inputs
    logprobs, entropy, hit, normalizer, factor, kept = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(hit, normalizer, factor, kept)
    ctx.save_for_backward(*tensors, logprobs, entropy, normalizer, factor, kept)


def _backward(ctx: Any, by_logprobs: Tensor | None, by_entropy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    hidden, weight, targets, bias, low_hidden, low_weight, temperature, logprobs, *rest = ctx.saved_tensors
    needs = [ctx.needs_input_grad[place] for place in (0, 1, 3, 4, 5)]
    found = backward(
        torch.zeros_like(logprobs) if by_logprobs is None else by_logprobs,
        by_entropy,
        hidden,
        weight,
        targets,
        bias,
        low_hidden,
        low_weight,
        temperature,
        logprobs,
        *rest,
        ctx.scale,
        ctx.softcap,
        ctx.mode,
        needs,
        ctx.tile_bytes,
    )
    hidden_, weight_, bias_, low_hidden_, low_weight_ = (
        value if need else None for value, need in zip(found, needs, strict=True)
    )
    return (hidden_, weight_, None, bias_, low_hidden_, low_weight_, *[None] * 8)


forward.register_autograd(_backward, setup_context=_setup)


def _projection(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    low_hidden: Tensor | None,
    low_weight: Tensor | None,
    temperature: Tensor | None,
    scale: float,
    softcap: float | None,
    tile_bytes: int | None,
) -> Projection:
    low = () if low_hidden is None or low_weight is None else ((low_hidden, low_weight),)
    return Projection(((hidden, weight), *low), targets, bias, temperature, scale, softcap, tile_bytes)
