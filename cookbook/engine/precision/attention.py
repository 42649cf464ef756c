"""Attention at a precision of its own: its blocks are products too, and small ones are slower at a lower precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cookbook.engine.precision.choice import EXACT, Precision, instructions

# Below these sizes, blocks of attention are slower at medium precision: each is a product of its own.
LEAST_QUERIES, LEAST_WIDTH = 512, 64
# Least number of multiplications of the scores for products of bfloat16, which are compiled for each shape: a run of 125 tokens
# with 8 heads of 64, or of 396 with 4 of 32.
LEAST_MULTIPLICATIONS, LEAST_OF_NARROW_HEADS = 8_000_000, 20_000_000
# Queries of one block. The scores of a block of one run stay in the cache.
BLOCK_QUERIES = 128
# Most keys of a run whose weights are kept for the backward pass: 16 KB a token and layer with 8 heads, which see half of them.
MOST_KEYS_KEPT = 2048


def rounded(*states: Tensor) -> tuple[Tensor, ...]:
    """Return queries, keys or values in the dtype of autocast; unchanged outside autocast.

    Small and large calls of a training pass, and a sampler, then multiply the same numbers.
    """
    device = states[0].device.type
    if not torch.is_autocast_enabled(device):
        return states
    dtype = torch.get_autocast_dtype(device)
    return tuple(state.to(dtype) if state.dtype == torch.float32 else state for state in states)


def attended(compute: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, *options: object) -> Tensor:
    """Compute attention on a CPU in float32: exact if the blocks are small, else at the pass's precision.

    Float32 operands at medium precision are faster than torch's kernel for bfloat16: 1,536 tokens with 8 heads of 64 take 71 ms
    forward and backward, 95 ms in bfloat16, 122 ms exactly; 150 tokens with 4 heads of 32, ten times, 21 ms, 14 ms and 6 ms
    (AVX512-BF16).
    """
    small = query.shape[2] < LEAST_QUERIES or query.shape[3] < LEAST_WIDTH
    half = query.element_size() < 4 or torch.is_autocast_enabled("cpu")
    large = ("medium" if instructions() else EXACT) if half else torch.get_float32_matmul_precision()
    precision = Precision(EXACT if small else large)
    switch = _Switch(precision.matmul)
    operands: tuple[Tensor, ...] = _SwitchedBack.apply(switch, query.float(), key.float(), value.float())  # type: ignore[no-untyped-call]
    with torch.autocast("cpu", enabled=False), precision.backward():
        out = compute(*operands, *options)
    result: Tensor = _Switched.apply(switch, out)  # type: ignore[no-untyped-call]
    return result.to(query.dtype)


@dataclass
class _Switch:
    """Precision of the products of one part of a backward pass, and that of the products around it."""

    inside: str
    outside: str = EXACT


class _Switched(torch.autograd.Function):
    """Identity at the end of a part of the forward pass, where its backward pass begins.

    A graph of its own for the part would be simpler, but activation checkpointing would recompute the layer for each part.
    """

    @staticmethod
    def forward(ctx: Any, switch: _Switch, out: Tensor) -> Tensor:
        ctx.switch = switch
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ctx.switch.outside = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(ctx.switch.inside)
        return None, gradient


class _SwitchedBack(torch.autograd.Function):
    """Identity at the start of the part, where its backward pass ends. After an error, :func:`restored` does."""

    @staticmethod
    def forward(ctx: Any, switch: _Switch, *operands: Tensor) -> tuple[Tensor, ...]:
        ctx.switch = switch
        return tuple(operand.view_as(operand) for operand in operands)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        torch.set_float32_matmul_precision(ctx.switch.outside)
        return None, *gradients


def multiplies_half(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether :func:`half_attention` is faster than :func:`attended` for these operands, on this CPU."""
    half = query.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu")
    # Some models, such as DeepSeek's, have values of another width.
    half = half and value.shape[3] == query.shape[3] and instructions() is not None
    least = LEAST_MULTIPLICATIONS if query.shape[3] >= LEAST_WIDTH else LEAST_OF_NARROW_HEADS
    return half and query.numel() * key.shape[2] >= least


def kept_bytes_per_token(heads: int, tokens: int) -> int:
    """Return the bytes of weights that :func:`half_attention` keeps per token and layer, at most, for runs of ``tokens``."""
    return heads * min(tokens, MOST_KEYS_KEPT) if instructions() is not None else 0


def half_attention(query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float) -> Tensor:
    """Causal attention on a CPU with products of bfloat16 operands; the scores and their softmax are float32.

    ``query``: ``(N, heads, queries, D)``, the last of the tokens of ``key`` and ``value``, ``(N, key heads, keys, D)``.
    ``window``: number of keys that a query sees; None: all earlier ones. Returns bfloat16 in the shape of ``query``. Forward
    and backward take 0.45 (350 tokens, D=128) to 0.65 (1,536 tokens, D=64) of the time of torch's kernel for bfloat16
    (AVX512-BF16). Products of bfloat16 return bfloat16: scores of 20 would be off by 0.06, so they are products of float32.
    """
    out: Tensor = _HalfAttention.apply(window, scale, query, key, value)  # type: ignore[no-untyped-call]
    return out


class _HalfAttention(torch.autograd.Function):
    """Attention by blocks of queries. The backward pass of long runs recomputes the weights."""

    @staticmethod
    def forward(ctx: Any, window: int | None, scale: float, *operands: Tensor) -> Tensor:
        ctx.dtypes = [operand.dtype for operand in operands]
        query, key, value = (operand.bfloat16() for operand in operands)
        ctx.window, ctx.scale = window, scale
        keeps = any(ctx.needs_input_grad) and key.shape[2] <= MOST_KEYS_KEPT
        grouped, keys, values = _by_key_head(query, key, value)
        out = torch.empty_like(grouped)
        saved_weights = []
        for (queries, seen), weights in zip(
            _blocks_of(grouped, keys, window), _weights(grouped, keys, window, scale), strict=True
        ):
            out[:, :, queries] = torch.bmm(weights, values[:, seen]).view_as(out[:, :, queries])
            saved_weights += [weights] if keeps else []
        ctx.save_for_backward(query, key, value, *saved_weights)
        return out.view(query.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Backward of a softmax between two products.

        With weights ``P`` and ``dP = dO V^T``: ``dV = P^T dO``, ``dS = P (dP - rowsum(P dP))``, ``dQ = scale dS K``, and ``dK =
        scale dS^T Q``.
        """
        query, key, value, *saved_weights = ctx.saved_tensors
        grouped, keys, values = _by_key_head(query, key, value)
        upstream = gradient.bfloat16().reshape(grouped.shape)
        d_query = torch.empty_like(grouped)
        d_key, d_value = (torch.zeros(operand.shape) for operand in (keys, values))
        blocks = _blocks_of(grouped, keys, ctx.window)
        for (queries, seen), weights in zip(
            blocks, saved_weights or _weights(grouped, keys, ctx.window, ctx.scale), strict=True
        ):
            rows, slopes = (tensor[:, :, queries].flatten(1, 2) for tensor in (grouped, upstream))
            d_value[:, seen] += torch.bmm(weights.transpose(1, 2), slopes)
            d_weights = torch.bmm(slopes, _transposed(values[:, seen]))
            d_scores = torch.ops.aten._softmax_backward_data.out(d_weights, weights, -1, weights.dtype, grad_input=d_weights)
            d_query[:, :, queries] = torch.bmm(d_scores, keys[:, seen]).view_as(d_query[:, :, queries])
            d_key[:, seen] += torch.bmm(d_scores.transpose(1, 2), rows)
        d_query *= ctx.scale
        d_key *= ctx.scale
        pairs = zip((d_query, d_key, d_value), (query, key, value), ctx.dtypes, strict=True)
        return None, None, *(gradient.view(like.shape).to(dtype) for gradient, like, dtype in pairs)


def _by_key_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Group query heads by key head.

    Returns ``query`` as ``(N * key heads, heads of one key head, queries, D)``, and ``key`` and ``value`` as ``(N * key heads,
    keys, D)``.
    """
    heads = query.shape[0] * key.shape[1]
    return query.reshape(heads, -1, *query.shape[2:]), key.flatten(0, 1), value.flatten(0, 1)


def _transposed(states: Tensor) -> Tensor:
    """Return ``(N, keys, D)`` as ``(N, D, keys)``. A product would copy a view of other strides element by element."""
    return states.contiguous().transpose(1, 2)


def query_blocks(queries: int, keys: int, window: int | None, size: int) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of at most ``size`` queries, and the keys that a block sees. The queries are the last of the ``keys``."""
    before = keys - queries
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        yield slice(start, stop), slice(0 if window is None else max(0, before + start - window + 1), before + stop)


def _blocks_of(query: Tensor, key: Tensor, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Yield :func:`query_blocks` of arguments as :func:`_by_key_head` returns them."""
    return query_blocks(query.shape[2], key.shape[1], window, BLOCK_QUERIES)


def _weights(query: Tensor, key: Tensor, window: int | None, scale: float) -> Iterator[Tensor]:
    """Yield the weights of each block, ``(N * key heads, queries of the block, keys that it sees)``."""
    heads, group, _, _ = query.shape
    # Products of two bfloat16 numbers are exact in float32, so medium precision changes nothing. It would round keys that are
    # scaled, so the result is scaled.
    precision = Precision("medium")
    exact, unused = key.float(), torch.zeros(1)
    # One piece of memory for the scores of every block.
    rows, keys = min(BLOCK_QUERIES, query.shape[2]), key.shape[1]
    memory = torch.empty(heads * group * rows * (keys if window is None else min(keys, window + rows - 1)))
    for queries, seen in _blocks_of(query, key, window):
        grouped = query[:, :, queries].flatten(1, 2).float()
        shape = heads, grouped.shape[1], seen.stop - seen.start
        with torch.autocast("cpu", enabled=False), precision.backward():
            out = memory[: math.prod(shape)].view(shape)
            scores = torch.baddbmm(unused, grouped, _transposed(exact[:, seen]), beta=0, alpha=scale, out=out)
        size = queries.stop - queries.start
        by_query = scores.view(heads, group, size, -1)
        by_query[..., -size:] += torch.full((size, size), -torch.inf).triu_(1)
        # Relative to the first key that the first query sees, or would see if it existed.
        first = None if window is None else key.shape[1] - query.shape[2] + queries.start - window + 1 - seen.start
        if first is not None and first + size > 1:
            by_query.masked_fill_(torch.ones(by_query.shape[2:], dtype=torch.bool).tril(first - 1), -torch.inf)
        yield torch.softmax(scores, -1, out=scores).bfloat16()
