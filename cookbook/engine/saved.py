"""How much memory autograd keeps between a forward and its backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


class SavedBytes:
    """The bytes of everything saved for the backward pass, each storage once; weights, which stay anyway, left out.

    What activation checkpointing keeps passes by unseen: it holds its inputs by other means.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._weights = {parameter.untyped_storage()._cdata for parameter in parameters}
        self._sizes: dict[int, int] = {}  # by storage, which the graph keeps alive

    @property
    def total(self) -> int:
        return sum(self._sizes.values())

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Counts while it is entered."""

        def pack(saved: Tensor) -> Tensor:
            storage = saved.untyped_storage()
            if storage._cdata not in self._weights:
                self._sizes[storage._cdata] = storage.nbytes()
            return saved.detach()  # the tensor itself would hold its graph, and the graph it: nobody could free them

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            yield
