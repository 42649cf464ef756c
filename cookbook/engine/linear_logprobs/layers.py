"""Which output layers are matrix products: a plain one, and one that PEFT put a LoRA adapter around."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from cookbook.engine.linear_logprobs.api import LowRank

LinearLayer = tuple[Tensor, Tensor | None, LowRank | None]
"""Weight ``(V, H)``, bias ``(V,)``, and the adapter that adds to the weight."""


def low_rank_of(layer: Any) -> LinearLayer | None:
    """What ``layer`` multiplies with, as it is now: adapters may be switched off and on, and weights exchanged.

    None for a layer that does anything else (quantized; DoRA; dropout, several adapters, merged ones): it has to be run itself.
    """
    lora = sys.modules.get("peft.tuners.lora.layer")  # who has such a layer has imported it
    if lora is None or type(layer) is not lora.Linear:
        return (layer.weight, layer.bias, None) if _is_plain(layer) else None
    if layer.merged or not _is_plain(layer.base_layer):
        return None
    low_rank = None
    if not layer.disable_adapters:
        low_rank = _adapter(layer)
        if low_rank is None:
            return None
    return layer.base_layer.weight, layer.base_layer.bias, low_rank


def _is_plain(layer: Any) -> bool:
    """Wrappers either subclass, with a forward of their own, or write one over the instance's."""
    return getattr(type(layer), "forward", None) is torch.nn.Linear.forward and "forward" not in vars(layer)


def _adapter(layer: Any) -> LowRank | None:
    """The one active adapter of a LoRA layer, where it is ``scaling * B A`` and nothing else."""
    if len(layer.active_adapters) != 1:
        return None
    name = layer.active_adapters[0]
    if name not in layer.lora_A or name in layer.lora_variant or layer.fan_in_fan_out:
        return None
    a, b, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    drops = dropout.training and getattr(dropout, "p", 0.0) > 0
    if drops or b.bias is not None or not (_is_plain(a) and _is_plain(b)):
        return None
    return LowRank(a.weight, b.weight, float(layer.scaling[name]))
