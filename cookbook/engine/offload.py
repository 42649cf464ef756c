"""Activations kept in CPU memory between the forward and the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def offloading(parameters: Iterable[Tensor], device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """While it is entered, what autograd saves goes to CPU memory; weights, which stay anyway, are left where they are."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    pin = device.type == "cuda"

    def pack(saved: Tensor) -> Tensor | tuple[Tensor]:
        if saved.untyped_storage().data_ptr() in weights:
            return saved
        away = torch.empty(saved.size(), dtype=saved.dtype, pin_memory=pin)
        return (away.copy_(saved),)

    def unpack(kept: Tensor | tuple[Tensor]) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept[0].to(device, non_blocking=pin)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
