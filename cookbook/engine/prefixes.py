"""Which sequences of a call begin with the same tokens, and what computing their beginning once would save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from cookbook.types import Array

WORTH_SHARING = 1.25  # tokens of a group's sequences per token computed: below, longer attention calls eat the saving


@dataclass(frozen=True)
class Group:
    """Sequences, by index, whose first ``prefix`` tokens are the same and computed once. One alone is all prefix."""

    members: tuple[int, ...]
    prefix: int

    def num_tokens(self, lengths: Sequence[int]) -> int:
        """What is computed: the prefix, and of every member what follows."""
        return self.prefix + sum(lengths[index] - self.prefix for index in self.members)


def alone(lengths: Sequence[int]) -> list[Group]:
    return [Group((index,), length) for index, length in enumerate(lengths)]


def groups(sequences: Sequence[Array], budget: int) -> list[Group]:
    """Partitions ``sequences`` into groups of at most ``budget`` tokens, so that much is computed once.

    Sorted, sequences with a common beginning stand side by side, and longer beginnings nest in shorter ones. So runs of
    neighbours are merged, longest common beginning first, and a merged run is one group where that saves more than its parts.
    """
    order = sorted(range(len(sequences)), key=lambda index: (sequences[index].tobytes(), index))
    lengths = [len(sequences[index]) for index in order]
    ends = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    common = [_common(sequences[a], sequences[b]) for a, b in pairwise(order)]
    runs = {place: _Run(place, place + 1, 0, [(place, place + 1, lengths[place])]) for place in range(len(order))}
    first = list(range(len(order)))  # by the last place of a run, its first
    for place in sorted(range(len(common)), key=lambda place: (-common[place], place)):
        left, right = runs[first[place]], runs.pop(place + 1)
        runs[left.start] = merged = _merge(left, right, common[place], ends)
        first[merged.stop - 1] = merged.start
    found = [part for run in runs.values() for part in run.parts]
    return [group for start, stop, prefix in found for group in _within(order[start:stop], prefix, lengths[start:stop], budget)]


@dataclass
class _Run:
    """Neighbours ``start`` to ``stop``, the best way to part them (start, stop, prefix), and the tokens that saves."""

    start: int
    stop: int
    saved: int
    parts: list[tuple[int, int, int]]


def _merge(left: _Run, right: _Run, prefix: int, ends: Sequence[int]) -> _Run:
    start, stop = left.start, right.stop
    saved = (stop - start - 1) * prefix
    if saved > left.saved + right.saved and _pays(ends[stop] - ends[start], saved):
        return _Run(start, stop, saved, [(start, stop, prefix)])
    left.parts.extend(right.parts)
    return _Run(start, stop, left.saved + right.saved, left.parts)


def _pays(tokens: int, saved: int) -> bool:
    return tokens >= WORTH_SHARING * (tokens - saved)


def _within(members: Sequence[int], prefix: int, lengths: Sequence[int], budget: int) -> list[Group]:
    """One group where the budget holds it; else as few as can be, each with the prefix again, while that still pays."""
    found: list[Group] = []
    chunk: list[int] = []
    size = prefix
    for place, length in enumerate(lengths):
        if chunk and size + length - prefix > budget:
            found += _settled(members, lengths, chunk, prefix)
            chunk, size = [], prefix
        chunk.append(place)
        size += length - prefix
    return found + _settled(members, lengths, chunk, prefix)


def _settled(members: Sequence[int], lengths: Sequence[int], chunk: list[int], prefix: int) -> list[Group]:
    if len(chunk) > 1 and _pays(sum(lengths[place] for place in chunk), (len(chunk) - 1) * prefix):
        return [Group(tuple(sorted(members[place] for place in chunk)), prefix)]
    return [Group((members[place],), lengths[place]) for place in chunk]


def _common(one: Array, other: Array) -> int:
    """How many tokens they begin with in common."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    place = int(differs.argmax()) if length else 0
    return place if length and differs[place] else length
