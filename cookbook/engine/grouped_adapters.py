"""Several LoRA adapters in one pass: one product with the base weights for all tokens, and grouped products of the adapters.

The packed row of a shared pass holds the tokens of one adapter after those of another::

    tokens     a a a a b b c c c c c
    base       x W^T of all 11 tokens in one product
    adapters   rows 0 to 3 get s_a x A_a^T B_a^T, rows 4 to 5 get s_b x A_b^T B_b^T, rows 6 to 10 get s_c x A_c^T B_c^T

So the adapters may differ in rank and scale, but not in the layers that they adapt. Each product has the rows of one adapter
only, so every adapter gets its own gradient.

Source: Sheng et al., S-LoRA (arXiv 2311.03285), section 5; Chen et al., Punica (arXiv 2310.18547), section 4.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cookbook.engine.model import LanguageModel

ADAPTER = "default"


@dataclass(frozen=True)
class AdapterLayer:
    """A linear layer with its adapter: ``s x A^T B^T`` is added to the output. ``a``: ``(r, I)``. ``b``: ``(O, r)``."""

    module: Any
    a: nn.Parameter
    b: nn.Parameter
    scale: float


AdapterLayers = Mapping[str, AdapterLayer]


def adapter_layers(model: LanguageModel) -> AdapterLayers | None:
    """Return the adapted layers of the network by name, without the output layer, which a pass computes per adapter.

    None means that the model has no adapter, or one that is more than a pair of factors per linear layer, such as DoRA, trained
    embeddings, or adapters on experts.
    """
    if not model.is_lora:
        return None
    from peft.tuners.lora import Linear

    head = model.network.get_output_embeddings()
    layers: dict[str, AdapterLayer] = {}
    trained: set[int] = set()
    for name, module in model.network.named_modules():
        if type(module) is not Linear:
            continue
        if list(module.lora_A) != [ADAPTER] or module.lora_variant or module.merged or "forward" in vars(module):
            return None
        factors = module.lora_A[ADAPTER], module.lora_B[ADAPTER]
        if any(factor.bias is not None for factor in factors):
            return None
        trained.update(id(factor.weight) for factor in factors)
        if module is not head:
            layers[name] = AdapterLayer(module, factors[0].weight, factors[1].weight, float(module.scaling[ADAPTER]))
    has_other_parts = any(id(parameter) not in trained for _, parameter in model.trainable())
    return None if has_other_parts or not layers else layers


@contextlib.contextmanager
def grouped(host: AdapterLayers, adapters: Sequence[AdapterLayers | None], sizes: Sequence[int]) -> Iterator[None]:
    """Context in which the layers of ``host`` apply each of ``adapters`` to its rows.

    ``sizes``: number of consecutive rows of each adapter, in order. None in place of an adapter leaves its rows to the base.
    """
    for name, layer in host.items():
        parts = [None if adapter is None else adapter[name] for adapter in adapters]
        layer.module.forward = functools.partial(_forward, layer.module, parts, list(sizes))
    try:
        yield
    finally:
        for layer in host.values():
            del layer.module.forward


def _forward(
    module: Any, parts: Sequence[AdapterLayer | None], sizes: list[int], x: Tensor, *rest: Any, **named: Any
) -> Tensor:
    """Forward of an adapted layer: the base layer for all rows, and each part's factors for its own rows."""
    out: Tensor = module.base_layer(x, *rest, **named)
    # Autograd does not let a custom function change a view.
    out = out.clone() if out._is_view() else out
    scales = [0.0 if part is None else part.scale for part in parts]
    factors = [factor for part in parts for factor in ((None, None) if part is None else (part.a, part.b))]
    return cast("Tensor", _GroupedProducts.apply(out, x, sizes, scales, *factors))  # type: ignore[no-untyped-call]


class _GroupedProducts(torch.autograd.Function):
    """Add ``s x A^T B^T`` of each adapter to its rows of ``out``, in place.

    One function for all adapters of a layer: with autograd's own nodes, sixteen adapters would take sixteen times the Python
    time of one.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, sizes: list[int], scales: list[float], *factors: Tensor | None) -> Tensor:
        """``out``: ``(..., O)``. ``x``: ``(..., I)``. ``factors``: ``A`` ``(r, I)`` and ``B`` ``(O, r)`` of each adapter."""
        rows = x.reshape(-1, x.shape[-1]).to(out.dtype)
        multiplied = [None if factor is None else factor.to(out.dtype) for factor in factors]
        reduced: list[Tensor | None] = []
        parts = zip(torch.split(rows, sizes), torch.split(out.view(-1, out.shape[-1]), sizes), scales, strict=True)
        for (own, target, scale), a, b in zip(parts, multiplied[::2], multiplied[1::2], strict=True):
            if a is None or b is None:
                reduced.append(None)
                continue
            reduced.append(low := own @ a.T)
            target.addmm_(low, b.T, alpha=scale)
        ctx.mark_dirty(out)
        ctx.save_for_backward(rows, *reduced, *multiplied)
        ctx.sizes, ctx.scales, ctx.shape = sizes, scales, x.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """With ``g`` of an adapter's rows: ``dB = s g^T (x A^T)``, ``dA = (s g B)^T x``, ``dx = (s g B) A``."""
        rows, *saved = ctx.saved_tensors
        count = len(ctx.sizes)
        reduced, factors = saved[:count], saved[count:]
        dx = torch.zeros_like(rows)
        of_factors: list[Tensor | None] = []
        upstream = gradient.reshape(-1, gradient.shape[-1])
        parts = zip(torch.split(upstream, ctx.sizes), torch.split(rows, ctx.sizes), torch.split(dx, ctx.sizes), strict=True)
        for (g, own, target), low, scale, a, b in zip(parts, reduced, ctx.scales, factors[::2], factors[1::2], strict=True):
            if low is None:
                of_factors += [None, None]
                continue
            # With beta 0, the first argument gives the shape only.
            low_gradient = torch.addmm(low, g, b, beta=0, alpha=scale)
            torch.mm(low_gradient, a, out=target)
            of_factors += [low_gradient.T @ own, torch.addmm(b, g.T, low, beta=0, alpha=scale)]
        return gradient, dx.view(ctx.shape), None, None, *of_factors
