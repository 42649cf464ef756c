"""Keys and values of one layer, in buffers that steps write into and that rows take turns to use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

COLUMNS_AT_ONCE = 64  # a full buffer is copied to one this much wider, or a quarter


class Layer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, ``(rows, heads, columns, D)`` each.

    Columns are numbered through; the buffers start with number ``base``. Those from ``first`` to before ``end`` are in use:
    of a layer with a sliding window the last ``window - 1``, which is what its next token still sees. All columns of a row
    before ``end`` hold numbers: what a mask hides is multiplied by 0, and memory that was never written may hold a nan.
    """

    # With a mask that is always written out, transformers' sdpa reads grouped keys once for all heads of their group. On
    # the CPU that is a third faster than its way without.
    is_compileable = True

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.is_sliding = window is not None
        self.window = window
        self.rows = self.first = self.end = self.base = 0

    @property
    def seen(self) -> int:
        """The first column that the next token sees."""
        return self.first if self.window is None else max(self.first, self.end - self.window + 1)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """One token a row. Returns views that hold until the next call."""
        if self.end == self.base + self.keys.shape[2]:
            self._move(self.seen, self.keys.shape[0])
        start, place = self.seen, self.end - self.base
        self.keys[: self.rows, :, place : place + 1] = key_states
        self.values[: self.rows, :, place : place + 1] = value_states
        self.end += 1
        return self.read(start)

    def read(self, start: int | None = None) -> tuple[Tensor, Tensor]:
        """Views of the rows' columns from number ``start`` (all that are seen) to the last."""
        columns = slice((self.seen if start is None else start) - self.base, self.end - self.base)
        return self.keys[: self.rows, :, columns], self.values[: self.rows, :, columns]

    def enter(self, keys: Tensor, values: Tensor, rows: Tensor, width: int) -> None:
        """``rows`` of ``keys`` and ``values``, which stand in the last of ``width`` columns."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        count, held = self.rows + len(rows), keys.shape[2]
        if not self.rows:
            self.first, self.end, self.base = 0, width, width - held
        self.first = min(self.first, self.end - width)
        too_narrow = self.end - held < self.base or self.end - self.base > self.keys.shape[2]
        if count > self.keys.shape[0] or too_narrow:
            self._move(min(self.seen, self.end - held), max(count, self.keys.shape[0]))
        start, stop = self.end - held - self.base, self.end - self.base
        for states, read in ((self.keys, keys), (self.values, values)):
            states[self.rows : count, :, :start] = 0
            states[self.rows : count, :, start:stop] = read.index_select(0, rows)
        self.rows = count

    def keep(self, rows: list[int], width: int) -> None:
        """Leaves only ``rows``, in this order, and of them the last ``width`` columns."""
        moves = [(source, place) for place, source in enumerate(rows) if source != place]
        self.rows = len(rows)
        self.first = max(self.first, self.end - width)
        if moves:
            source, place = torch.tensor(moves, device=self.keys.device).T
            used = slice(self.seen - self.base, self.end - self.base)
            for states in (self.keys, self.values):
                states[:, :, used].index_copy_(0, place, states[:, :, used].index_select(0, source))

    def _move(self, first: int, rows: int) -> None:
        """To new buffers of at least ``rows`` rows that begin with the column ``first`` and have room behind the last."""
        used = self.end - first
        columns = used + max(COLUMNS_AT_ONCE, used // 4)
        start = max(first, self.base)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(rows, old.shape[1], columns, old.shape[3])
            if self.rows:
                new[: self.rows, :, : start - first] = 0
                new[: self.rows, :, start - first : used] = old[: self.rows, :, start - self.base : self.end - self.base]
            setattr(self, name, new)
        self.base = first

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_zeros(0, key_states.shape[1], 0, key_states.shape[3])
        self.values = value_states.new_zeros(0, value_states.shape[1], 0, value_states.shape[3])
        self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many columns the attention of ``query_length`` tokens reads, and the first, counted from ``first``."""
        return self.end - self.seen + query_length, self.seen - self.first

    def get_seq_length(self) -> int:
        return self.end - self.first

    def get_max_length(self) -> int:
        return -1
