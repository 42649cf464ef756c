"""Keys and values of sequences that are decoded side by side, kept where the next step finds them.

Every sequence has a row, and the newest token of all of them stands in the same column, as in a left-padded batch. Rows leave
and others enter between steps. Here every sample has a copy of its prompt's keys and values, and a step writes one column in
place and reads a view; :class:`~cookbook.engine.prompt_cache.PromptCache` holds a prompt once for all its samples.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from cookbook.engine.fast_path import GivenUpError
from cookbook.engine.kv_layer import Layer

IN_PLACE = (DynamicLayer, DynamicSlidingWindowLayer)  # exactly these: what derives from them keeps more


class RowCache(Protocol):
    """What the decoding loop asks of a cache.

    ``in_place``: rows may enter while others are there, and columns that none of them needs are left behind.
    """

    in_place: bool

    @classmethod
    def of(cls, prefilled: DynamicCache) -> RowCache:
        """An empty cache for states such as these. Raises GivenUpError: it cannot hold them."""
        ...

    def enter(self, prefilled: DynamicCache, mask: Tensor, rows: list[int]) -> None:
        """Adds a row for every number in ``rows``: it goes on from that row of ``prefilled``.

        ``mask``: 1 where a column of ``prefilled`` holds a token, 0 for padding to its left.
        """
        ...

    def keep(self, rows: list[int]) -> None:
        """Leaves only ``rows``, in this order. No row may move to a higher place."""
        ...

    def arguments(self, new: Tensor) -> dict[str, Any]:
        """What the network is given for one more token a row. ``new``, ``(rows, 1)``: 0 where it will be nobody's."""
        ...


def check_keys_and_values(prefilled: DynamicCache) -> None:
    """Raises GivenUpError: a layer keeps something else than keys and values, or nothing of its own."""
    for layer in prefilled.layers:
        if type(layer) not in IN_PLACE:
            raise GivenUpError(f"a layer keeps its states in a {type(layer).__name__}")
        if not layer.is_initialized:
            raise GivenUpError("a layer has no keys and values of its own")


def empty_states(network: Any) -> DynamicCache:
    """What a prompt is read into."""
    return DynamicCache(config=network.config.get_text_config())


class _Copies:
    """A row of keys and values for every sequence, and where they hold its tokens."""

    in_place: bool

    def __init__(self) -> None:
        self._states: Cache
        self._mask: Tensor | None = None  # 1 where a column holds a token of the row, (rows, columns)
        self._padded = False

    def arguments(self, new: Tensor) -> dict[str, Any]:
        assert self._mask is not None, "rows enter before the first step"
        self._mask = torch.cat([self._mask, new], 1)
        return {"past_key_values": self._states, "attention_mask": self._mask if self._padded else None}

    def _enter(self, mask: Tensor) -> None:
        self._mask = mask if self._mask is None else _stacked(self._mask, mask)
        self._padded = not bool(self._mask.all())

    def _keep(self, rows: list[int]) -> int:
        """Returns how many columns are left."""
        assert self._mask is not None
        kept = self._mask[rows]
        kept = _trimmed(kept) if self.in_place else kept
        self._mask = kept if rows else None
        self._padded = not bool(kept.all())
        return kept.shape[1]


class WholeBatchCache(_Copies):
    """transformers' own cache, for layers with states of other kinds: rows enter when all have left."""

    in_place = False

    @classmethod
    def of(cls, prefilled: DynamicCache) -> WholeBatchCache:
        return cls()

    def enter(self, prefilled: DynamicCache, mask: Tensor, rows: list[int]) -> None:
        prefilled.reorder_cache(torch.tensor(rows, device=mask.device))
        self._states = prefilled
        self._enter(mask[rows])

    def keep(self, rows: list[int]) -> None:
        if rows and rows != list(range(self._states.batch_size)):
            self._states.reorder_cache(torch.tensor(rows))
        self._keep(rows)


class InPlaceCache(_Copies):
    """Keys and values in buffers that steps write into and that rows take turns to use."""

    in_place = True

    def __init__(self, windows: list[int | None]) -> None:
        super().__init__()
        self._layers = [Layer(window) for window in windows]
        self._states = Cache(layers=self._layers)

    @classmethod
    def of(cls, prefilled: DynamicCache) -> InPlaceCache:
        check_keys_and_values(prefilled)
        return cls([getattr(layer, "sliding_window", None) for layer in prefilled.layers])

    def enter(self, prefilled: DynamicCache, mask: Tensor, rows: list[int]) -> None:
        for layer, read in zip(self._layers, prefilled.layers, strict=True):
            layer.enter(read.keys, read.values, torch.tensor(rows, device=mask.device), mask.shape[1])
        self._enter(mask[rows])

    def keep(self, rows: list[int]) -> None:
        width = self._keep(rows)
        for layer in self._layers:
            layer.keep(rows, width)


def _stacked(mask: Tensor, entering: Tensor) -> Tensor:
    """One above the other, the narrower filled up on its left."""
    width = max(mask.shape[1], entering.shape[1])
    return torch.cat([torch.nn.functional.pad(part, (width - part.shape[1], 0)) for part in (mask, entering)])


def _trimmed(mask: Tensor) -> Tensor:
    """Without the columns on the left that hold a token of no row."""
    return mask[:, int(mask.any(0).int().argmax()) :] if len(mask) else mask[:, :0]
