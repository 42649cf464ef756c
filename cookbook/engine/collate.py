"""Laying the datums of a micro-batch out as the model reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cookbook.engine.attention import Block, Layout
from cookbook.engine.planning import MicroBatch, tokens_of
from cookbook.types import Array, Datum


@dataclass(frozen=True)
class Inputs:
    """Tensors of one forward pass.

    ``places``, on the CPU, finds every token of every datum in the flattened output, datum by datum in the order of the
    micro-batch: a place stands there once for each datum that shares it. ``layout`` goes to the attention; None: rows of one
    datum.
    """

    input_ids: Tensor
    position_ids: Tensor | None
    places: Tensor
    layout: Layout | None

    @property
    def arguments(self) -> dict[str, Any]:
        """What the model is called with."""
        if self.layout is None:
            return {"input_ids": self.input_ids}
        return {"input_ids": self.input_ids, "position_ids": self.position_ids, "layout": self.layout}


def collate(data: Sequence[Datum], batch: MicroBatch, device: torch.device) -> Inputs:
    """``data``: every datum of the call, of which ``batch`` names some."""
    sequences = {index: tokens_of(data[index]) for index in batch.indices}
    return _padded(sequences, batch, batch.width, device) if batch.width is not None else _packed(sequences, batch, device)


def _padded(sequences: Mapping[int, Array], batch: MicroBatch, width: int, device: torch.device) -> Inputs:
    """A causal model never looks right, so padding at the end of a row needs no mask, and any token will do: 0, since a
    tokenizer's own may lie outside the model's vocabulary."""
    ids = np.zeros((len(batch.groups), width), dtype=np.int64)
    places = []
    for row, index in enumerate(batch.indices):
        ids[row, : len(sequences[index])] = sequences[index]
        places.append(np.arange(row * width, row * width + len(sequences[index])))
    return Inputs(_tensor(ids, device), None, torch.from_numpy(np.concatenate(places)), None)


@dataclass
class _Run:
    """Tokens of a datum that stand together: a group's prefix, or what a member has after it."""

    index: int
    start: int
    stop: int
    prefix: _Run | None
    places: Array  # where in the row

    @property
    def shape(self) -> tuple[int, int]:
        """Queries and keys."""
        return self.stop - self.start, self.stop


def _packed(sequences: Mapping[int, Array], batch: MicroBatch, device: torch.device) -> Inputs:
    prefixes, branches = _runs(sequences, batch)
    # Runs of one shape stand together: the attention computes them at once.
    runs = sorted([*prefixes, *branches.values()], key=lambda run: run.shape)
    end = 0
    for run in runs:
        run.places = np.arange(end, end := end + run.stop - run.start)
    blocks = tuple(Block(len(list(same)), *shape) for shape, same in groupby(run.shape for run in runs))
    keys = [part for run in runs for part in ((run.prefix.places, run.places) if run.prefix else (run.places,))]
    places = []
    for group, prefix in zip(batch.groups, prefixes, strict=True):
        for index in group.members:
            places += [prefix.places, branches[index].places] if index in branches else [prefix.places]
    ids = np.concatenate([sequences[run.index][run.start : run.stop] for run in runs])
    positions = np.concatenate([np.arange(run.start, run.stop) for run in runs])
    key_index = _tensor(np.concatenate(keys), device) if branches else None
    return Inputs(
        _tensor(ids[None], device),
        _tensor(positions[None], device),
        torch.from_numpy(np.concatenate(places)),
        Layout(blocks, key_index, device),
    )


def _runs(sequences: Mapping[int, Array], batch: MicroBatch) -> tuple[list[_Run], dict[int, _Run]]:
    """The prefix of every group, and by datum what follows it, where anything does."""
    nowhere = np.empty(0, dtype=np.int64)
    prefixes = [_Run(group.members[0], 0, group.prefix, None, nowhere) for group in batch.groups]
    branches = {
        index: _Run(index, group.prefix, len(sequences[index]), prefix, nowhere)
        for group, prefix in zip(batch.groups, prefixes, strict=True)
        for index in group.members
        if len(sequences[index]) > group.prefix
    }
    return prefixes, branches


def _tensor(array: Array, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
