"""Planning: split the datums of a call into micro-batches, each computed by one forward pass.

The plan determines memory and speed. The result of the call does not depend on the plan, up to float rounding.

An example with a budget of 14 tokens per pass. Each letter is a token; datums 0, 2 and 4 have the same 4-token prompt::

    0: P P P P a a a    1: b b b b b    2: P P P P c c    3: d d d    4: P P P P e        26 tokens

    padded                       packed                           shared
    one row per datum;           one row per pass, no             packed, and the prefix of a group
    similar lengths together     padding                          is computed once

    pass 1   P P P P a a a       P P P P a a a P P P P c c        P P P P a a a c c e d d d
             P P P P c c .       (datums 0, 2)                    (group of 0, 2, 4; datum 3)

    pass 2   b b b b b           b b b b b P P P P e d d d        b b b b b
             P P P P e           (datums 1, 4, 3)                 (datum 1)

    pass 3   d d d

    computed 27 tokens (1 pad)   26 tokens                        18 tokens

In every layout a token attends to tokens of its own datum only. Padding is at the end of a row, where causal attention does
not look. For a packed row, an :class:`~cookbook.engine.attention.AttentionLayout` lists the keys that each run of consecutive
tokens reads; in the shared layout, the run ``c c`` reads ``P P P P c c``, and ``e`` reads ``P P P P e``.

:func:`plan` works in three steps: separate the datums by the shape of their targets, find prefix groups, and pack the groups
into micro-batches. If several ranks train one model, the groups are first divided among the ranks by their cost in tokens.
:mod:`~cookbook.engine.batch.collate` then builds the tensors of one micro-batch; it sorts the runs of a packed row by shape,
and continues the example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np

from cookbook.types import Array, Datum

PACKINGS = ("auto", "packed", "padded")
# The fixed cost of one more forward pass, as the number of tokens that take the same time.
PASS_OVERHEAD_TOKENS = 512
# The activations of longer passes do not fit into the CPU caches: with 8,192 tokens, a token took 1.3 to 1.7 times as long.
CPU_PASS_TOKENS = 4096
# Least ratio of a group's tokens to the tokens computed for it. Below this ratio, the longer attention calls cost more time
# than prefix sharing saves.
WORTH_SHARING = 1.25


@dataclass(frozen=True)
class PackingSupport:
    """Layouts in which the model computes every sequence exactly.

    ``packed``: several sequences in one row. ``shared``: packed sequences whose common prefix is computed once. ``padded``:
    several rows, padded to one length. ``reason``: why a layout is not supported, for the log.
    """

    packed: bool = True
    shared: bool = True
    reason: str = ""
    padded: bool = True


# A pass computes a shared prefix once, but logprobs for every sequence: the tokens of all its sequences are at most this number
# of budgets.
MOST_COPIES = 8


@dataclass(frozen=True)
class PrefixGroup:
    """Sequences, by index, whose first ``prefix`` tokens are equal and computed once. A group of one is all prefix."""

    members: tuple[int, ...]
    prefix: int

    def num_tokens(self, lengths: Mapping[int, int]) -> int:
        """Number of tokens to compute: the prefix once, and the remaining tokens of every member."""
        return self.prefix + sum(lengths[index] - self.prefix for index in self.members)


@dataclass(frozen=True)
class MicroBatch:
    """Datums of one forward pass.

    ``width`` None: all ``groups`` are packed into one row. Otherwise each group is one datum in a row of ``width`` tokens.

    A micro-batch without groups is a filler: the pass computes dummy tokens with zero gradient, because sharded ranks must
    run the same number of passes.

    ``parts``: in a pass that several adapters share, the adapter's number of each datum; the tokens of an adapter are adjacent.
    """

    groups: list[PrefixGroup]
    width: int | None
    num_tokens: int
    parts: Mapping[int, int] = field(default_factory=dict)

    @property
    def indices(self) -> list[int]:
        """Indices of the datums in the call, in the order in which the pass returns them."""
        return [index for group in self.groups for index in group.members]


@dataclass(frozen=True)
class BatchPlan:
    """Passes of one rank in a call.

    ``layout`` and ``reason`` name and explain the chosen layout, for the log. ``most``: the largest number of passes of any
    rank.
    """

    batches: list[MicroBatch]
    layout: str
    reason: str
    most: int


def plan(data: Sequence[Datum], budget: int, support: PackingSupport, rank: int = 0, num_ranks: int = 1) -> BatchPlan:
    """Split ``data`` into micro-batches of at most ``budget`` tokens; a longer datum has a micro-batch of its own.

    The tokens of a shared prefix count once. Counted for every datum, a micro-batch has at most ``MOST_COPIES`` times as many.

    The plan is deterministic, so all ranks compute the same plan.

    Returns:
        The passes of ``rank``. Every datum is computed by exactly one rank.
    """
    # All targets of one pass must have the same shape, ``(T,)`` or ``(T, K)``.
    by_shape: dict[tuple[int, ...], dict[int, Array]] = {}
    for index, datum in enumerate(data):
        by_shape.setdefault(datum.loss_fn_inputs["target_tokens"].array.shape[1:], {})[index] = token_ids(datum)
    kinds, lengths = list(by_shape.values()), {index: datum.model_input.length for index, datum in enumerate(data)}
    shares = min(
        (
            _assign_to_ranks([_grouped(kind, limit, support) for kind in kinds], lengths, num_ranks)
            for limit in _group_size_limits(kinds, budget, support, num_ranks)
        ),
        key=lambda shares: max(share.num_tokens for share in shares),
    )
    passes = [share.passes(lengths, budget, support) for share in shares]
    total = sum(lengths.values())
    computed = sum(batch.num_tokens for of_rank in passes for batch in of_rank)
    return BatchPlan(passes[rank], *_describe_layout(support, total, computed), max(map(len, passes)))


@dataclass
class _RankShare:
    """The groups that one rank computes, one list per target shape, and the number of tokens to compute."""

    groups: list[list[PrefixGroup]]
    num_tokens: int = 0

    def passes(self, lengths: Mapping[int, int], budget: int, support: PackingSupport) -> list[MicroBatch]:
        batches: list[MicroBatch] = []
        for groups in self.groups:
            if support.packed:
                batches += _packed(groups, lengths, budget)
            else:
                batches += _padded(groups, lengths, budget if support.padded else 0)
        return batches


def _grouped(sequences: Mapping[int, Array], limit: int, support: PackingSupport) -> list[PrefixGroup]:
    if support.packed and support.shared:
        return prefix_groups(sequences, limit)
    return _singletons({index: len(sequence) for index, sequence in sequences.items()})


def _group_size_limits(kinds: Sequence[Mapping[int, Array]], budget: int, support: PackingSupport, num_ranks: int) -> list[int]:
    """Return the largest group sizes to try, in tokens. One group with all datums would leave the other ranks without work."""
    if num_ranks == 1 or not (support.packed and support.shared):
        return [budget]
    groups = [(kind, group) for kind in kinds for group in prefix_groups(kind, budget)]
    share = sum(group.num_tokens({index: len(kind[index]) for index in group.members}) for kind, group in groups) // num_ranks
    return [budget, *(limit for limit in (share, share * 5 // 4, share * 3 // 2) if 0 < limit < budget)]


def _assign_to_ranks(kinds: Sequence[list[PrefixGroup]], lengths: Mapping[int, int], num_ranks: int) -> list[_RankShare]:
    """Assign the groups to ranks: the largest first, to the rank that has the fewest tokens so far."""
    if num_ranks == 1:
        return [_RankShare(list(kinds))]
    shares = [_RankShare([[] for _ in kinds]) for _ in range(num_ranks)]
    costs = [(-group.num_tokens(lengths), number, group.members, group) for number, kind in enumerate(kinds) for group in kind]
    for cost, number, _, group in sorted(costs, key=lambda entry: entry[:3]):
        share = min(shares, key=lambda rank_share: rank_share.num_tokens)
        share.groups[number].append(group)
        share.num_tokens -= cost
    return shares


def token_ids(datum: Datum) -> Array:
    """Return the token ids, ``(T,)`` int64."""
    return np.fromiter(datum.model_input.tokens, np.int64, datum.model_input.length)


def _describe_layout(support: PackingSupport, total: int, computed: int) -> tuple[str, str]:
    """Return the name of the layout and the reason for the choice."""
    if not support.padded:
        return "one per pass", support.reason
    if not support.packed:
        return (
            "padded",
            f"{support.reason or 'backend.packing=padded'}; {computed / max(total, 1) - 1:.0%} padding in this call",
        )
    if computed < total:
        return "shared", f"common prefixes are computed once: {computed:,} of {total:,} tokens computed in this call"
    return "packed", f"{support.reason or 'no prefixes worth sharing'}; no padding"


# ---- micro-batches ---------------------------------------------------------------------------------------------------


def _padded(groups: Sequence[PrefixGroup], lengths: Mapping[int, int], budget: int) -> list[MicroBatch]:
    """Fill passes with rows, longest first. Begin a new pass if the budget is full, or if padding costs more than a pass."""
    batches: list[list[PrefixGroup]] = []
    for group in _largest_first(groups, lengths):
        rows = batches[-1] if batches else []
        width = rows[0].prefix if rows else group.prefix
        full = (len(rows) + 1) * width > budget
        # A shorter new pass pays off if the padding that it saves costs more than PASS_OVERHEAD_TOKENS.
        wasteful = (width - group.prefix) * len(rows) > PASS_OVERHEAD_TOKENS and group.prefix < 0.8 * width
        if not rows or full or wasteful:
            batches.append([group])
        else:
            rows.append(group)
    return [MicroBatch(rows, rows[0].prefix, len(rows) * rows[0].prefix) for rows in batches]


def _packed(groups: Sequence[PrefixGroup], lengths: Mapping[int, int], budget: int) -> list[MicroBatch]:
    """Bin packing: first fit, largest group first."""
    batches: list[list[PrefixGroup]] = []
    # Free tokens of each pass, with prefixes counted once, and with prefixes counted for every sequence.
    free: list[tuple[int, int]] = []
    for group in _largest_first(groups, lengths):
        once, each = group.num_tokens(lengths), sum(lengths[index] for index in group.members)
        slot = next((place for place, (left, copies) in enumerate(free) if left >= once and copies >= each), len(free))
        if slot == len(free):
            batches.append([])
            free.append((budget, MOST_COPIES * budget))
        batches[slot].append(group)
        free[slot] = free[slot][0] - once, free[slot][1] - each
    return [MicroBatch(batch, None, sum(group.num_tokens(lengths) for group in batch)) for batch in batches]


def _largest_first(groups: Sequence[PrefixGroup], lengths: Mapping[int, int]) -> list[PrefixGroup]:
    return sorted(groups, key=lambda group: (-group.num_tokens(lengths), group.members))


def _singletons(lengths: Mapping[int, int]) -> list[PrefixGroup]:
    """Return one group per sequence."""
    return [PrefixGroup((index,), length) for index, length in lengths.items()]


# ---- prefix groups ---------------------------------------------------------------------------------------------------


def prefix_groups(sequences: Mapping[int, Array], budget: int) -> list[PrefixGroup]:
    """Partition ``sequences`` into groups of at most ``budget`` tokens whose common prefix is worth computing once.

    After sorting, sequences with a common prefix are neighbors, and groups with a longer prefix nest in groups with a shorter
    prefix. Spans of neighbors are merged, longest common prefix first. A merged span becomes one group if that saves more
    tokens than the groups of its two halves.
    """
    order = sorted(sequences, key=lambda index: (sequences[index].tobytes(), index))
    lengths = {index: len(sequences[index]) for index in order}
    ends = list(accumulate(lengths.values(), initial=0))
    common = [_common_prefix_length(sequences[a], sequences[b]) for a, b in pairwise(order)]
    spans = {place: _Span(place, place + 1, 0, [(place, place + 1, lengths[index])]) for place, index in enumerate(order)}
    # Start of the span that ends at each position of the sorted order.
    first = list(range(len(order)))
    for place in sorted(range(len(common)), key=lambda place: (-common[place], place)):
        left, right = spans[first[place]], spans.pop(place + 1)
        spans[left.start] = merged = _merged(left, right, common[place], ends)
        first[merged.stop - 1] = merged.start
    parts = [part for span in spans.values() for part in span.parts]
    return [group for start, stop, prefix in parts for group in _split_to_budget(order[start:stop], prefix, lengths, budget)]


@dataclass
class _Span:
    """Sorted sequences ``start`` to ``stop``: their best partition, as (start, stop, prefix), and the tokens that it saves."""

    start: int
    stop: int
    saved: int
    parts: list[tuple[int, int, int]]


def _merged(left: _Span, right: _Span, prefix: int, ends: Sequence[int]) -> _Span:
    start, stop = left.start, right.stop
    saved = (stop - start - 1) * prefix
    if saved > left.saved + right.saved and _is_worth_sharing(ends[stop] - ends[start], saved):
        return _Span(start, stop, saved, [(start, stop, prefix)])
    left.parts.extend(right.parts)
    return _Span(start, stop, left.saved + right.saved, left.parts)


def _is_worth_sharing(tokens: int, saved: int) -> bool:
    return tokens >= WORTH_SHARING * (tokens - saved)


def _split_to_budget(members: Sequence[int], prefix: int, lengths: Mapping[int, int], budget: int) -> list[PrefixGroup]:
    """Split a group that exceeds the budget into as few groups as possible, each of which computes the prefix."""
    groups: list[PrefixGroup] = []
    chunk: dict[int, int] = {}
    size, copies = prefix, 0
    for index in members:
        copies += lengths[index]
        if chunk and (size + lengths[index] - prefix > budget or copies > MOST_COPIES * budget):
            groups += _group_or_single(chunk, prefix)
            chunk, size, copies = {}, prefix, lengths[index]
        chunk[index] = lengths[index]
        size += lengths[index] - prefix
    return groups + _group_or_single(chunk, prefix)


def _group_or_single(lengths: Mapping[int, int], prefix: int) -> list[PrefixGroup]:
    if len(lengths) > 1 and _is_worth_sharing(sum(lengths.values()), (len(lengths) - 1) * prefix):
        return [PrefixGroup(tuple(sorted(lengths)), prefix)]
    return _singletons(lengths)


def _common_prefix_length(first: Array, second: Array) -> int:
    """Return the number of leading tokens that are equal."""
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length
