"""Rotary position embeddings, forward and backward."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turns the pairs ``(i, i + D/2)`` of every head by an angle that grows with the position.

    ``q`` and ``k``, ``(B, heads, T, D)``, each with its own number of heads; ``cos`` and ``sin``, ``(B or 1, T, D)``, get no
    gradient. Hugging Face's convention: ``x * cos + rotate_half(x) * sin``.

    Source: Su et al., RoFormer, section 3.4.2.
    """
    if not torch.is_grad_enabled():
        return _both(q, k, cos.unsqueeze(1), sin.unsqueeze(1))
    return cast("tuple[Tensor, Tensor]", _Rotary.apply(q, k, cos, sin))  # type: ignore[no-untyped-call]


class _Rotary(torch.autograd.Function):
    """Keeps ``cos`` and ``sin`` alone, which all layers share."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        ctx.save_for_backward(cos, sin)
        return _both(q, k, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """The transposed matrix: the halves of ``sin`` change places and sign."""
        cos, sin = ctx.saved_tensors
        low, high = sin.chunk(2, -1)
        return _turned(dq, cos, -high, -low), _turned(dk, cos, -high, -low), None, None


def _both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    low, high = sin.chunk(2, -1)
    return _turned(q, cos, low, high), _turned(k, cos, low, high)


def _turned(x: Tensor, cos: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """``x * cos`` minus ``low`` times the second half in the first, plus ``high`` times the first half in the second."""
    out = x * cos
    first, second = x.chunk(2, -1)
    out_first, out_second = out.chunk(2, -1)
    out_first.addcmul_(second, low, value=-1)
    out_second.addcmul_(first, high)
    return out
