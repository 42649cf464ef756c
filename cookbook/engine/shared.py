"""One copy of a model's weights under the adapters of many runs."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

CACHE_LINE = 64  # bytes


class SharedBase:
    """A network whose weights several models read and none writes.

    ``name`` is where it came from. :meth:`under_adapter` costs the Python objects of a network and no weights.
    """

    def __init__(self, name: str, network: Any) -> None:
        self.name = name
        self._network = network.requires_grad_(False)

    def under_adapter(self) -> Any:
        """A network of the shared weights, frozen, to lay an adapter on."""
        tensors = itertools.chain(self._network.parameters(), self._network.buffers())
        return copy.deepcopy(self._network, {id(tensor): tensor for tensor in tensors})

    def copied(self) -> Any:
        """A network of its own weights, all to be trained."""
        return network_copy(self._network).requires_grad_(True)


def network_copy(network: Any, shared: Mapping[int, Tensor] | None = None) -> Any:
    """A copy of ``network`` that computes the same bits; tensors whose ids are keys of ``shared`` are not copied.

    On a CPU the order of a matrix product's sums depends on where in a cache line its operands begin. Weights from a file begin
    where its header ends, and torch's own copies at a cache line, so gradients of a plain copy differ by roundings.
    """
    made = copy.deepcopy(network, dict(shared or {}))
    for one, other in zip(network.parameters(), made.parameters(), strict=True):
        if one is not other and one.data_ptr() % CACHE_LINE and one.device.type == "cpu" and one.is_contiguous():
            other.data = _at_the_same_place(one.detach())
    return made


def _at_the_same_place(tensor: Tensor) -> Tensor:
    """A copy that begins at the same byte of a cache line."""
    line = CACHE_LINE // tensor.element_size()
    room = torch.empty(tensor.numel() + line, dtype=tensor.dtype)
    start = (tensor.data_ptr() - room.data_ptr()) % CACHE_LINE // tensor.element_size()
    return room[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)
