"""One copy of a model's weights under the adapters of many runs."""

from __future__ import annotations

import copy
import itertools
from typing import Any


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
        return copy.deepcopy(self._network).requires_grad_(True)
