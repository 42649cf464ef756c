"""Which datums of a call share a forward pass, and how. A statement about memory and speed: the result does not depend on it.

Three layouts. ``padded``: a row a datum, rows of similar length together. ``packed``: datums one after the other in one row,
nothing is padding. ``shared``: packed, and what several datums begin with is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cookbook.engine.prefixes import Group, alone, groups
from cookbook.types import Array, Datum

PACKINGS = ("auto", "packed", "padded")
PASS_OVERHEAD_TOKENS = 512  # what starting one more forward pass costs, in tokens' worth of computing
CPU_PASS_TOKENS = 4096  # longer passes leave the processor's caches: 8,192 tokens were 1.3 to 1.7 times as slow a token


@dataclass(frozen=True)
class Layouts:
    """What a row may hold: several sequences; several that share their beginning. ``reason``: why not, if so."""

    packed: bool = True
    shared: bool = True
    reason: str = ""


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass computes: ``groups`` in one row, or, with a ``width``, one datum a row of that many tokens."""

    groups: list[Group]
    width: int | None
    num_tokens: int

    @property
    def indices(self) -> list[int]:
        """The datums, in the order in which the pass returns them."""
        return [index for group in self.groups for index in group.members]


@dataclass(frozen=True)
class Plan:
    """The passes of a call. ``layout`` names the choice and ``reason`` says why it was made, for the log."""

    batches: list[MicroBatch]
    layout: str
    reason: str


def plan(data: Sequence[Datum], budget: int, layouts: Layouts) -> Plan:
    """Splits ``data`` into micro-batches of at most ``budget`` tokens, a longer datum alone. The same call, the same plan."""
    batches: list[MicroBatch] = []
    for indices in _by_kind(data):
        sequences = [tokens_of(data[index]) for index in indices]
        lengths = [len(sequence) for sequence in sequences]
        if layouts.packed:
            found = groups(sequences, budget) if layouts.shared else alone(lengths)
            some = _packed(found, lengths, budget)
        else:
            some = _padded(lengths, budget)
        batches += [_renamed(batch, indices) for batch in some]
    total = sum(datum.model_input.length for datum in data)
    computed = sum(batch.num_tokens for batch in batches)
    return Plan(batches, *_explained(layouts, total, computed))


def tokens_of(datum: Datum) -> Array:
    """The token ids, ``(T,)`` int64."""
    return np.fromiter(datum.model_input.tokens, np.int64, datum.model_input.length)


def _explained(layouts: Layouts, total: int, computed: int) -> tuple[str, str]:
    if not layouts.packed:
        return "padded", f"{layouts.reason or 'as asked'}; {computed / max(total, 1) - 1:.0%} of padding in this call"
    if computed < total:
        return "shared", f"common beginnings are computed once: {computed:,} tokens for {total:,} in this call"
    return "packed", f"{layouts.reason or 'no beginnings worth sharing'}; no padding"


def _by_kind(data: Sequence[Datum]) -> list[list[int]]:
    """Only targets of one shape share a pass: one a token, or ``K``."""
    kinds: dict[tuple[int, ...], list[int]] = {}
    for index, datum in enumerate(data):
        kinds.setdefault(datum.loss_fn_inputs["target_tokens"].array.shape[1:], []).append(index)
    return list(kinds.values())


def _renamed(batch: MicroBatch, indices: Sequence[int]) -> MicroBatch:
    """With the datums' places in the call in place of their places in the list that was planned."""
    renamed = [Group(tuple(indices[member] for member in group.members), group.prefix) for group in batch.groups]
    return MicroBatch(renamed, batch.width, batch.num_tokens)


def _padded(lengths: Sequence[int], budget: int) -> list[MicroBatch]:
    batches: list[MicroBatch] = []
    rows: list[Group] = []
    width = 0
    for group in _largest_first(alone(lengths), lengths):
        length = group.prefix
        full = (len(rows) + 1) * max(width, length) > budget
        # One more pass is worth its cost once it saves this much padding on the rows that would follow.
        wasteful = (width - length) * len(rows) > PASS_OVERHEAD_TOKENS and length < 0.8 * width
        if rows and (full or wasteful):
            batches.append(MicroBatch(rows, width, len(rows) * width))
            rows, width = [], 0
        rows.append(group)
        width = max(width, length)
    return [*batches, MicroBatch(rows, width, len(rows) * width)] if rows else batches


def _packed(found: Sequence[Group], lengths: Sequence[int], budget: int) -> list[MicroBatch]:
    """First fit, largest first."""
    batches: list[list[Group]] = []
    room: list[int] = []
    for group in _largest_first(found, lengths):
        need = group.num_tokens(lengths)
        slot = next((place for place, free in enumerate(room) if free >= need), None)
        if slot is None:
            batches.append([])
            room.append(budget)
            slot = len(batches) - 1
        batches[slot].append(group)
        room[slot] -= need
    return [MicroBatch(batch, None, sum(group.num_tokens(lengths) for group in batch)) for batch in batches]


def _largest_first(found: Sequence[Group], lengths: Sequence[int]) -> list[Group]:
    return sorted(found, key=lambda group: (-group.num_tokens(lengths), group.members))
