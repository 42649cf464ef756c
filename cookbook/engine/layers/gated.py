"""The product of a gated MLP's two projections, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import gelu, silu

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
}


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up`` of two tensors of one shape; ``activation`` is one of :data:`ACTIVATIONS`.

    Source: Shazeer, GLU Variants Improve Transformer, eq. 6: SwiGLU and GeGLU.
    """
    if not torch.is_grad_enabled():
        return ACTIVATIONS[activation](gate).mul_(up)
    return cast("Tensor", _Gated.apply(gate, up, activation))  # type: ignore[no-untyped-call]


class _Gated(torch.autograd.Function):
    """Keeps ``gate`` and ``up``; autograd would keep ``activation(gate)`` too, a third of what a layer keeps."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return ACTIVATIONS[activation](gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        return (
            _through(ctx.activation, gradient * up, gate),
            ACTIVATIONS[ctx.activation](gate).mul_(gradient),
            None,
        )


def _through(activation: str, gradient: Tensor, gate: Tensor) -> Tensor:
    """The gradient times the slope of the activation, in its place."""
    if activation == "silu":
        return cast("Tensor", torch.ops.aten.silu_backward.grad_input(gradient, gate, grad_input=gradient))
    return cast("Tensor", torch.ops.aten.gelu_backward.grad_input(gradient, gate, approximate="tanh", grad_input=gradient))
