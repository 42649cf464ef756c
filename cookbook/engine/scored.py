"""Which tokens of a pass have their logprob computed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cookbook.types import Datum, ModelInput


@dataclass(frozen=True)
class ScoredTokens:
    """The scored tokens of a pass, datum by datum, in the order of the pass.

    ``positions`` by datum: ``(n,)`` int64, ascending; ``lengths`` by datum: all its tokens, scored or not.
    """

    positions: dict[int, Tensor]
    lengths: dict[int, int]

    @classmethod
    def of(cls, data: Sequence[Datum], indices: Sequence[int], *, weighted_only: bool) -> ScoredTokens:
        """All tokens; with ``weighted_only`` those of weight other than 0, where a datum has weights."""
        lengths = {index: data[index].model_input.length for index in indices}
        return cls({index: _positions(data[index], weighted_only) for index in indices}, lengths)

    def __len__(self) -> int:
        return sum(map(len, self.positions.values()))

    @property
    def cuts(self) -> list[int]:
        """Where a datum ends and the next begins, in scored tokens."""
        return list(itertools.accumulate(map(len, self.positions.values())))

    def rows(self) -> Tensor:
        """Where the scored tokens are among all tokens of the pass's datums, ``(len(self),)``."""
        starts = itertools.accumulate(self.lengths.values(), initial=0)
        return torch.cat([positions + start for positions, start in zip(self.positions.values(), starts, strict=False)])

    def pieces(self, rows: slice) -> Iterator[tuple[int, Tensor]]:
        """The datums among whose scored tokens ``rows`` are, with the positions of these."""
        start = 0
        for index, positions in self.positions.items():
            first, last = max(rows.start - start, 0), min(rows.stop - start, len(positions))
            if first < last:
                yield index, positions[first:last]
            start += len(positions)

    def spread(self, values: Tensor) -> Iterator[tuple[int, Tensor]]:
        """``(len(self), ...)`` -> by datum ``(T, ...)``, 0 at tokens that were not scored."""
        parts = torch.split(values, [len(positions) for positions in self.positions.values()])
        for (index, positions), part in zip(self.positions.items(), parts, strict=True):
            if len(positions) == self.lengths[index]:
                yield index, part
            else:
                yield index, values.new_zeros(self.lengths[index], *values.shape[1:]).index_copy(0, positions, part)

    def gathered(self, columns: Mapping[int, Tensor]) -> Tensor:
        """By datum ``(T, ...)`` -> ``(len(self), ...)``."""
        return torch.cat([columns[index][positions] for index, positions in self.positions.items()])

    def left_out(self) -> dict[int, Tensor]:
        """Per datum that is not scored whole, which tokens are not, ``(T,)`` bool."""
        found = {}
        for index, positions in self.positions.items():
            if len(positions) < self.lengths[index]:
                mask = torch.ones(self.lengths[index], dtype=torch.bool)
                mask[positions] = False
                found[index] = mask
        return found


def piece_of(datum: Datum, positions: Tensor) -> Datum:
    """The datum's tokens at ``positions`` with what stands beside them, for a loss whose terms stand alone."""
    if len(positions) == datum.model_input.length:
        return datum
    places = positions.numpy()
    tokens = np.asarray(datum.model_input.tokens)[places]
    arrays = {key: value.array for key, value in datum.loss_fn_inputs.items()}
    inputs = {key: array[places] if array.ndim else array for key, array in arrays.items()}
    return Datum(ModelInput.from_ints(tokens), inputs)


def _positions(datum: Datum, weighted_only: bool) -> Tensor:
    weights = datum.loss_fn_inputs["weights"].array if weighted_only and "weights" in datum.loss_fn_inputs else None
    if weights is None or weights.ndim == 0:
        return torch.arange(datum.model_input.length)
    return torch.from_numpy(np.flatnonzero(weights.reshape(len(weights), -1).any(-1)))
