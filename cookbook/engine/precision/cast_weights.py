"""Weights of linear layers in the dtype of autocast, cast once per version of the weights instead of once per product."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

# Casts of frozen weights, which several adapters share. A cast lives as long as a sampler uses it.
_frozen_casts: WeakIdKeyDictionary = WeakIdKeyDictionary()


@dataclass(frozen=True)
class _Slot:
    """A parameter of a linear layer, and its cast. ``parameters``: the layer's own dictionary of parameters."""

    parameters: dict[str, nn.Parameter | None]
    name: str
    original: nn.Parameter
    cast: nn.Parameter


class CastWeights:
    """Weights of the linear layers of ``network`` in ``dtype``, which :meth:`in_use` puts in the place of the originals.

    autocast would cast a weight for every product: a decoding step of 32 rows took ten times as long. The layers compute the
    same bits with the casts. Weights that no linear layer holds, such as those of experts, are left to autocast.
    """

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        self._network = network
        self._dtype = dtype
        self._slots: list[_Slot] = []

    def drop(self) -> None:
        """Free the casts, because the weights change or the memory is needed. The next use casts the weights again."""
        self._slots = []

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Context in which the layers hold the casts. The caller computes no gradient."""
        if not self._slots:
            self._slots = list(self._cast())
        for slot in self._slots:
            slot.parameters[slot.name] = slot.cast
        try:
            yield
        finally:
            for slot in self._slots:
                slot.parameters[slot.name] = slot.original

    @torch.no_grad()
    def _cast(self) -> Iterator[_Slot]:
        for module in self._network.modules():
            if not isinstance(module, nn.Linear):
                continue
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dtype == torch.float32:
                    yield _Slot(module._parameters, name, parameter, self._cast_of(parameter))

    def _cast_of(self, parameter: nn.Parameter) -> nn.Parameter:
        shared = not parameter.requires_grad and parameter in _frozen_casts
        cast: nn.Parameter | None = _frozen_casts[parameter]() if shared else None
        if cast is None or cast.dtype != self._dtype:
            cast = nn.Parameter(parameter.to(self._dtype), requires_grad=False)
            if not parameter.requires_grad:
                _frozen_casts[parameter] = weakref.ref(cast)
        return cast
