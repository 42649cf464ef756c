"""Attention at a precision of its own: its blocks are products too, and small ones are slower at a lower precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cookbook.engine.precision.choice import EXACT, Precision, instructions

# Below these sizes, blocks of attention are slower at medium precision: each is a product of its own.
LEAST_QUERIES, LEAST_WIDTH = 512, 64


def attended(compute: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
    """``compute(query, key, value, *rest)`` on a CPU, in float32: exact if the blocks are small, else reduced.

    float32 operands at medium precision are faster than bfloat16: 1,536 tokens with 8 heads of 64 take 71 ms forward and
    backward, 95 ms in bfloat16, 122 ms exactly; 150 tokens with 4 heads of 32, ten times, 21 ms, 14 ms and 6 ms (AVX512-BF16).
    """
    small = query.shape[2] < LEAST_QUERIES or query.shape[3] < LEAST_WIDTH
    half = query.element_size() < 4 or torch.is_autocast_enabled("cpu")
    large = ("medium" if instructions() else EXACT) if half else torch.get_float32_matmul_precision()
    precision = Precision(EXACT if small else large)
    out: Tensor = _Attended.apply(compute, precision, rest, query.float(), key.float(), value.float())  # type: ignore[no-untyped-call]
    return out.to(query.dtype)


class _Attended(torch.autograd.Function):
    """A function with a graph of its own, whose two halves run at a precision of their own."""

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[..., Tensor], precision: Precision, rest: tuple[object, ...], *operands: Tensor
    ) -> Tensor:
        ctx.precision, differentiable = precision, any(ctx.needs_input_grad)
        with torch.set_grad_enabled(differentiable), torch.autocast("cpu", enabled=False), precision.backward():
            ctx.operands = [one.detach().requires_grad_(differentiable) for one in operands]
            ctx.out = compute(*ctx.operands, *rest)
        return cast("Tensor", ctx.out.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        operands, out, ctx.operands, ctx.out = ctx.operands, ctx.out, None, None
        with ctx.precision.backward():
            return (None, None, None, *torch.autograd.grad(out, operands, gradient))
