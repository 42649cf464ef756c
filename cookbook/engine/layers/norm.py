"""Root mean square normalization, forward and backward."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * (offset + weight)`` over the last dimension.

    ``x`` is ``(..., H)`` and ``weight`` ``(H,)``. Half precision is computed in float32 and rounded once.

    Source: Zhang & Sennrich, Root Mean Square Layer Normalization, eq. 4. Gemma has an ``offset`` of 1.
    """
    if x.is_cuda and not offset and x.dtype == weight.dtype:  # torch has a kernel there, and computes so too
        return F.rms_norm(x, weight.shape, weight, eps)
    if not torch.is_grad_enabled():  # sampling: a token costs little more than the calls it takes
        return _normalized(x, weight, eps, offset)[0]
    return cast("Tensor", _RMSNorm.apply(x, weight, eps, offset))  # type: ignore[no-untyped-call]


class _RMSNorm(torch.autograd.Function):
    """Keeps ``x`` and a number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        out, r = _normalized(x, weight, eps, offset)
        ctx.save_for_backward(x, weight, r)
        ctx.offset = offset
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """With ``n = x r`` and ``s = gradient * gain``: ``dx = r (s - n mean(s n))``, ``dweight`` the sum of ``gradient n``.

        torch's kernel of the layer norm finds both in one pass, if it is told that the means of ``x`` are 0; but it also
        subtracts ``r mean(s)``, which is then added back.
        """
        x, weight, r = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        width = x.shape[-1]
        gradient, gain = _wide(gradient).contiguous(), _gain(weight, ctx.offset)
        dx, dweight, _ = torch.ops.aten.native_layer_norm_backward(
            gradient, _wide(x), [width], torch.zeros_like(r), r, gain, None, [wants_x, wants_weight, False]
        )
        if wants_x:
            mean = torch.mv(gradient.view(-1, width), gain).view(r.shape)
            dx = dx.add_(mean.mul_(r).div_(width)).to(x.dtype)
        return dx, dweight.to(weight.dtype) if wants_weight else None, None, None


def _normalized(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """Also ``r = 1 / sqrt(mean(x^2) + eps)``; from the norm: torch computes that in one pass, and ``mean(x^2)`` in two."""
    rows = _wide(x)
    r = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    r.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (rows * r).mul_(_gain(weight, offset)).to(x.dtype), r


def _wide(values: Tensor) -> Tensor:
    return values.float() if values.element_size() < 4 else values


def _gain(weight: Tensor, offset: float) -> Tensor:
    return _wide(weight) + offset if offset else _wide(weight)
