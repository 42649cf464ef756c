"""RMS norm, gated MLP and rotary embedding, with backward passes that save and read less memory than autograd's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import gelu, silu


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * (offset + weight)`` over the last dimension.

    ``x``: ``(..., H)``. ``weight``: ``(H,)``. Half precision is computed in float32 and rounded once, to ``dtype`` (None: that
    of ``x``). Gemma has an ``offset`` of 1.

    Source: Zhang & Sennrich, Root Mean Square Layer Normalization, eq. 4.
    """
    dtype = dtype or x.dtype
    # For these arguments torch has a fused kernel.
    if x.is_cuda and not offset and x.dtype == weight.dtype == dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    # Without autograd.Function: in sampling, Python overhead takes nearly as long as the arithmetic of a token.
    if not torch.is_grad_enabled():
        return _normalized(x, weight, eps, offset, dtype)[0]
    return cast("Tensor", _RMSNorm.apply(x, weight, eps, offset, dtype))  # type: ignore[no-untyped-call]


class _RMSNorm(torch.autograd.Function):
    """RMS norm that saves ``x`` and one number per row for its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype) -> Tensor:
        out, r = _normalized(x, weight, eps, offset, dtype)
        ctx.save_for_backward(x, weight, r)
        ctx.offset = offset
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """With ``n = x r`` and ``s = gradient * gain``: ``dx = r (s - n mean(s n))``, ``dweight = sum(gradient n)``.

        torch's layer norm kernel computes both in one pass if it gets 0 as the mean of ``x``. It also subtracts ``r mean(s)``
        from ``dx``, which is added back afterwards.
        """
        x, weight, r = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        width = x.shape[-1]
        gradient, gain = _at_least_float32(gradient).contiguous(), _gain(weight, ctx.offset)
        dx, dweight, _ = torch.ops.aten.native_layer_norm_backward(
            gradient, _at_least_float32(x), [width], torch.zeros_like(r), r, gain, None, [needs_x, needs_weight, False]
        )
        if needs_x:
            mean = torch.mv(gradient.view(-1, width), gain).view(r.shape)
            dx = dx.add_(mean.mul_(r).div_(width)).to(x.dtype)
        return dx, dweight.to(weight.dtype) if needs_weight else None, None, None, None


def _normalized(x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the normalized ``x``, and ``r = 1 / sqrt(mean(x^2) + eps)``."""
    # vector_norm reads x once, while the mean of x^2 would take two passes.
    rows = _at_least_float32(x)
    r = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    r.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (rows * r).mul_(_gain(weight, offset)).to(dtype), r


def _at_least_float32(values: Tensor) -> Tensor:
    return values.float() if values.element_size() < 4 else values


def _gain(weight: Tensor, offset: float) -> Tensor:
    return _at_least_float32(weight) + offset if offset else _at_least_float32(weight)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
}


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return ``activation(gate) * up`` for two tensors of one shape; ``activation``: a name in :data:`ACTIVATIONS`.

    Source: Shazeer, GLU Variants Improve Transformer, eq. 6: SwiGLU and GeGLU.
    """
    if not torch.is_grad_enabled():
        return ACTIVATIONS[activation](gate).mul_(up)
    return cast("Tensor", _Gated.apply(gate, up, activation))  # type: ignore[no-untyped-call]


class _Gated(torch.autograd.Function):
    """Gated product that saves ``gate`` and ``up``; autograd also saves ``activation(gate)``, a third of a layer's bytes."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return ACTIVATIONS[activation](gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        return _activation_backward(ctx.activation, gradient * up, gate), ACTIVATIONS[ctx.activation](gate).mul_(gradient), None


def _activation_backward(activation: str, gradient: Tensor, gate: Tensor) -> Tensor:
    """Multiply the gradient by the derivative of the activation, in place."""
    if activation == "silu":
        return cast("Tensor", torch.ops.aten.silu_backward.grad_input(gradient, gate, grad_input=gradient))
    return cast("Tensor", torch.ops.aten.gelu_backward.grad_input(gradient, gate, approximate="tanh", grad_input=gradient))


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding: rotate the pairs ``(i, i + D/2)`` of each head by an angle proportional to the position.

    ``q`` and ``k``: ``(B, heads, T, D)``; the numbers of heads may differ. ``cos`` and ``sin``: ``(B or 1, T, D)``, without
    gradient. Hugging Face's convention: ``x * cos + rotate_half(x) * sin``.

    Source: Su et al., RoFormer, section 3.4.2.
    """
    cos, (low, high) = cos.unsqueeze(1), sin.unsqueeze(1).chunk(2, -1)
    if not torch.is_grad_enabled():
        return _rotated(q, cos, low, high), _rotated(k, cos, low, high)
    return cast("tuple[Tensor, Tensor]", _Rotary.apply(q, k, cos, low, high))  # type: ignore[no-untyped-call]


class _Rotary(torch.autograd.Function):
    """Rotation that saves only ``cos`` and ``sin``, which all layers share; autograd would save tensors per layer."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, low, high)
        return _rotated(q, cos, low, high), _rotated(k, cos, low, high)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """Multiply by the transposed rotation matrix: swap the halves of ``sin`` and change their sign."""
        cos, low, high = ctx.saved_tensors
        return _rotated(dq, cos, -high, -low), _rotated(dk, cos, -high, -low), None, None, None


def _rotated(x: Tensor, cos: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return ``x * cos + rotate_half(x) * sin``, where ``low`` and ``high`` are the two halves of ``sin``."""
    if x.element_size() < 4 and not x.is_cuda:
        # On a CPU, rounded once instead of twice, which costs little. The sampler and the trainer do the same.
        return _rotated(x.float(), cos.float(), low.float(), high.float()).to(x.dtype)
    out = x * cos
    first, second = x.chunk(2, -1)
    out_first, out_second = out.chunk(2, -1)
    out_first.addcmul_(second, low, value=-1)
    out_second.addcmul_(first, high)
    return out


# ---- replacements for module.forward ----------------------------------------------------------------------------------


class _Norm(Protocol):
    weight: Tensor
    forward: Callable[..., Tensor]


class _GatedMLP(Protocol):
    gate_proj: Callable[[Tensor], Tensor]
    up_proj: Callable[[Tensor], Tensor]
    down_proj: Callable[[Tensor], Tensor]
    forward: Callable[..., Tensor]


def normalize(module: _Norm, eps: float, offset: float, x: Tensor, *others: object, **named: object) -> object:
    """Forward of an RMS norm. Uses the module's own code for arguments other than those that were verified."""
    # Models differ in how they round a product of two dtypes. With further arguments, as in Mamba2, a norm is gated.
    if others or named:
        return type(module).forward(module, x, *others, **named)
    if torch.is_autocast_enabled(x.device.type):
        # The sum of the layers' outputs becomes the operand of products, and a product joins that sum or is turned.
        half = torch.get_autocast_dtype(x.device.type)
        return rms_norm(x, module.weight, eps, offset, module.weight.dtype if x.dtype == half else half)
    if x.dtype != module.weight.dtype:
        return type(module).forward(module, x)
    return rms_norm(x, module.weight, eps, offset)


def project(module: _GatedMLP, activation: str, x: Tensor, *others: object, **named: object) -> object:
    """Forward of a gated MLP. Uses the module's own code for arguments other than those that were verified."""
    if others or named:
        return type(module).forward(module, x, *others, **named)
    projected: Tensor = module.down_proj(gated(module.gate_proj(x), module.up_proj(x), activation))
    return projected


def rotate(
    original: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, *others: Tensor, **named: object
) -> tuple[Tensor, Tensor]:
    """Call :func:`rotary` for verified arguments, four tensors with ``cos`` over the whole head; else ``original``."""
    if len(others) == 2 and not named and q.ndim == 4 and others[0].ndim == 3:
        cos, sin = others
        if torch.is_autocast_enabled(q.device.type):
            q, k = q.to(cos.dtype), k.to(cos.dtype)
        if q.shape[-1] == k.shape[-1] == cos.shape[-1] and q.dtype == k.dtype == cos.dtype:
            return rotary(q, k, cos, sin)
    return original(q, k, *others, **named)


LayerOutput = Tensor | tuple[Tensor, ...]
"""Output of a layer; a mixture of experts may also return its routing."""


@contextlib.contextmanager
def only_rows(modules: Sequence[nn.Module], rows: Tensor) -> Iterator[None]:
    """Context in which ``modules`` compute only the tokens ``rows``, ``(n,)`` ascending, and return zeros for the others."""
    with contextlib.ExitStack() as hooks:
        for module in modules:
            selection = _RowSelection(rows)
            hooks.enter_context(module.register_forward_pre_hook(selection.gather))
            hooks.enter_context(module.register_forward_hook(selection.scatter))
        yield


class _RowSelection:
    """Hooks of one module: pass selected rows of the input, and scatter the output into zeros."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        # Shape of the module's input, without the last dimension.
        self.shape = torch.Size()

    def gather(self, _: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.shape = args[0].shape[:-1]
        return args[0].flatten(0, -2).index_select(0, self.rows)[None], *args[1:]

    def scatter(self, module: nn.Module, args: object, out: LayerOutput) -> LayerOutput:
        states, *routing = out if isinstance(out, tuple) else (out,)
        rows = states.new_zeros(self.shape.numel(), states.shape[-1]).index_copy_(0, self.rows, states[0])
        whole = rows.view(*self.shape, -1)
        return (whole, *routing) if isinstance(out, tuple) else whole
