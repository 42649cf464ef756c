"""How the datums of a call share forward passes. A statement about memory and speed: the result does not depend on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cookbook.types import Datum

PASS_OVERHEAD_TOKENS = 512  # what starting one more forward pass costs, in tokens' worth of computing
WORTH_PACKING = 0.15  # share of padding above which packing pays for its attention mask
PACKED_ROW_TOKENS = 512  # a packed row is at least this long, so that few rows are left half empty


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass reads: ``rows[r]`` lists the datums, by index, that share row ``r`` of the input."""

    rows: list[list[int]]
    width: int

    @property
    def num_tokens(self) -> int:
        return len(self.rows) * self.width

    @property
    def indices(self) -> list[int]:
        return [index for row in self.rows for index in row]


@dataclass(frozen=True)
class Inputs:
    """Tensors of one forward pass. ``places`` finds every real token in the flattened ``(rows * width)`` output."""

    input_ids: Tensor
    position_ids: Tensor | None
    places: Tensor


def plan(lengths: Sequence[int], budget: int, packing: str) -> list[MicroBatch]:
    """Splits datums of these ``lengths`` into micro-batches of at most ``budget`` tokens, a longer datum alone.

    ``packing``: ``padded`` puts one datum in a row, rows of similar length together; ``packed`` fills rows with several
    datums; ``auto`` packs when padding would waste more than ``WORTH_PACKING``.
    """
    padded = _padded(lengths, budget)
    if packing == "padded":
        return padded
    waste = 1 - sum(lengths) / max(sum(batch.num_tokens for batch in padded), 1)
    return _packed(lengths, budget) if packing == "packed" or waste > WORTH_PACKING else padded


def _padded(lengths: Sequence[int], budget: int) -> list[MicroBatch]:
    batches: list[MicroBatch] = []
    rows: list[list[int]] = []
    width = 0
    for index in _longest_first(lengths):
        length = lengths[index]
        full = (len(rows) + 1) * max(width, length) > budget
        # One more pass is worth its cost once it saves this much padding on the rows that would follow.
        wasteful = (width - length) * len(rows) > PASS_OVERHEAD_TOKENS and length < 0.8 * width
        if rows and (full or wasteful):
            batches.append(MicroBatch(rows, width))
            rows, width = [], 0
        rows.append([index])
        width = max(width, length)
    return [*batches, MicroBatch(rows, width)] if rows else batches


def _packed(lengths: Sequence[int], budget: int) -> list[MicroBatch]:
    """First fit, longest first, into rows as long as the longest datum, then rows into passes."""
    width = max(max(lengths, default=0), min(PACKED_ROW_TOKENS, budget))
    rows: list[list[int]] = []
    room: list[int] = []
    for index in _longest_first(lengths):
        slot = next((r for r, free in enumerate(room) if free >= lengths[index]), None)
        if slot is None:
            rows.append([])
            room.append(width)
            slot = len(rows) - 1
        rows[slot].append(index)
        room[slot] -= lengths[index]
    per_pass = max(1, budget // width)
    groups = [rows[start : start + per_pass] for start in range(0, len(rows), per_pass)]
    return [MicroBatch(group, max(sum(lengths[i] for i in row) for row in group)) for group in groups]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


def collate(data: Sequence[Datum], batch: MicroBatch, device: torch.device) -> Inputs:
    """Lays the datums of ``batch`` out as the model reads them.

    A causal model never looks right, so padding at the end of a row needs no attention mask, and any token will do: 0,
    since a tokenizer's own may lie outside the model's vocabulary. Sequences that share a row are told apart by their
    positions, which start again at 0 (transformers builds the block mask from that).
    """
    ids = np.zeros((len(batch.rows), batch.width), dtype=np.int64)
    positions = np.zeros_like(ids)
    places = []
    shares = any(len(row) > 1 for row in batch.rows)
    for r, row in enumerate(batch.rows):
        start = 0
        for index in row:
            tokens = data[index].model_input.tokens
            stop = start + len(tokens)
            ids[r, start:stop] = tokens
            positions[r, start:stop] = np.arange(len(tokens))
            places.append(np.arange(r * batch.width + start, r * batch.width + stop))
            start = stop
        positions[r, start:] = np.arange(batch.width - start)  # the padding is a sequence of its own
    return Inputs(
        torch.from_numpy(ids).to(device),
        torch.from_numpy(positions).to(device) if shares else None,
        torch.from_numpy(np.concatenate(places)).to(device),
    )
