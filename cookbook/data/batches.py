"""Batches of rows in an order that depends on the seed and the epoch alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from cookbook.errors import ConfigError

T = TypeVar("T")


class Batches(Generic[T]):
    """Rows in a seeded order, ``size`` at a time. ``batches[i]`` is a pure function, so resuming needs no iterator state.

    An epoch's last batch may be smaller; no row is dropped. Indices may exceed ``len``: every epoch has an order of its own.
    """

    def __init__(self, rows: Sequence[T], size: int, epochs: int, seed: int, shuffle: bool = True) -> None:
        if not rows:
            raise ConfigError("data: there is no row to train on; look at data.path, data.limit and data.on_empty")
        if size < 1 or epochs < 1:
            raise ConfigError(f"recipe: batch size and epochs must be at least 1, got {size} and {epochs}")
        self._rows = rows
        self._size = size
        self._seed = seed
        self._shuffle = shuffle
        self.per_epoch = -(-len(rows) // size)
        self._length = epochs * self.per_epoch
        self._order: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> list[T]:
        epoch, place = divmod(index, self.per_epoch)
        if self._order[0] != epoch:
            draw = np.random.Generator(np.random.PCG64([self._seed, epoch]))
            self._order = (epoch, draw.permutation(len(self._rows)) if self._shuffle else range(len(self._rows)))
        return [self._rows[i] for i in self._order[1][place * self._size : (place + 1) * self._size]]
