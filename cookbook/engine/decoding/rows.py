"""Decoding methods: how the rows of a decoding batch keep their past tokens, from KV caches to full recomputation.

:data:`METHODS` lists them from the fastest to one that needs only a forward pass. The decoder verifies which of them a model
supports.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cookbook.engine.attention import skip_masks
from cookbook.engine.decoding.kv_cache import InPlaceCache, PromptCache, RowCache, WholeBatchCache, empty_states
from cookbook.engine.fast_path import FastPathError

if TYPE_CHECKING:
    from cookbook.engine.decoding.sampler_pass import SamplerPass

# Logits of whole sequences that may be in memory at a time.
LOGITS_BYTES = 256 << 20
# Names of the cached states in the outputs and arguments of transformers' models.
STATES = ("past_key_values", "cache_params", "state")


class Rows(abc.ABC):
    """Interface of the rows of a decoding batch. ``in_place``: rows may enter while others are decoded."""

    in_place: bool

    @abc.abstractmethod
    def enter(self, prompts: Sequence[tuple[int, ...]], starts: list[int]) -> Tensor:
        """Prefill ``prompts``, and add one row for each entry of ``starts``, the index of its prompt.

        Returns:
            Next-token logits of the new rows, ``(N, V)`` float32.
        """

    @abc.abstractmethod
    def step(self, tokens: Tensor, unfinished: Tensor) -> Tensor:
        """Append one token per row, ``(rows,)``. Return the next-token logits, ``(rows, V)`` float32.

        ``unfinished``: ``(rows,)``, false for rows that have ended, whose token and logits are not used.
        """

    @abc.abstractmethod
    def keep(self, rows: list[int]) -> None:
        """Keep only ``rows``, in this order. No row may move to a higher index."""


class CachedRows(Rows):
    """Rows in one batch with a KV cache of class ``kind``. Each prompt is prefilled once, left-padded."""

    def __init__(self, forward: SamplerPass, kind: type[RowCache]) -> None:
        self._forward = forward
        self._model = forward.model
        self._cache = kind()
        self.in_place = self._cache.in_place
        # (rows, 1), position of each row's newest token.
        self._positions = torch.empty(0, 1, dtype=torch.long, device=self._model.device)

    def enter(self, prompts: Sequence[tuple[int, ...]], starts: list[int]) -> Tensor:
        ids, mask = self._padded(prompts)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        states = empty_states(self._model.network)
        logits = self._run(ids, positions, {"past_key_values": states, "attention_mask": None if mask.all() else mask})
        self._cache.enter(states, mask, starts)
        self._positions = torch.cat([self._positions, positions[starts, -1:]])
        return logits[starts]

    def step(self, tokens: Tensor, unfinished: Tensor) -> Tensor:
        """Append one token per row. A row that has ended keeps its position: the next position may exceed the context."""
        new = unfinished.long()[:, None]
        self._positions = self._positions + new
        return self._run(tokens[:, None], self._positions, self._cache.arguments(new))

    def keep(self, rows: list[int]) -> None:
        self._cache.keep(rows)
        self._positions = self._positions[rows]

    def _padded(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        """Return left-padded token ids and attention mask, ``(prompts, longest)`` each."""
        tokens = [torch.tensor(prompt) for prompt in prompts]
        ids = pad_sequence(tokens, batch_first=True, padding_side="left")
        mask = pad_sequence([torch.ones_like(prompt) for prompt in tokens], batch_first=True, padding_side="left")
        return ids.to(self._model.device), mask.to(self._model.device)

    def _run(self, ids: Tensor, positions: Tensor, arguments: dict[str, object]) -> Tensor:
        """Return the next-token logits after the last column, ``(rows, V)`` float32."""
        with skip_masks("prompts" in arguments):
            logits, _ = self._forward.run(input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1, **arguments)
        return logits


@dataclass
class _Batch:
    """Rows whose states the model keeps together. ``rows``: their current indices, None for a row that has left."""

    rows: list[int | None]
    states: dict[str, object]


class OwnStates(Rows):
    """Rows of a model with states of an unknown kind, such as recurrent states.

    Such states cannot be padded or split. So prompts of equal length form one batch, a batch is computed until its last row has
    left, and a prompt is prefilled once per row.
    """

    in_place = False

    def __init__(self, forward: SamplerPass) -> None:
        self._forward = forward
        self._model = forward.model
        self._batches: list[_Batch] = []

    def enter(self, prompts: Sequence[tuple[int, ...]], starts: list[int]) -> Tensor:
        sequences = [prompts[start] for start in starts]
        self._batches = [_Batch(list(rows), {}) for rows in _by_length(sequences)]
        return self._run(sequences)

    def step(self, tokens: Tensor, unfinished: Tensor) -> Tensor:
        return self._run(tokens[:, None].tolist())

    def keep(self, rows: list[int]) -> None:
        new_index = {row: index for index, row in enumerate(rows)}
        for batch in self._batches:
            batch.rows = [None if row is None else new_index.get(row) for row in batch.rows]
        self._batches = [batch for batch in self._batches if any(row is not None for row in batch.rows)]

    def _run(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append the ``tokens`` of each row. Return the next-token logits, ``(rows, V)`` float32."""
        logits: dict[int, Tensor] = {}
        for batch in self._batches:
            # Token 0 for rows that have left.
            ids = torch.tensor([[0] if row is None else tokens[row] for row in batch.rows], device=self._model.device)
            batch_logits, out = self._forward.run(input_ids=ids, use_cache=True, **batch.states)
            batch.states = {name: out[name] for name in STATES if getattr(out, name, None) is not None}
            if not batch.states:
                raise FastPathError("its forward pass returns no cached states")
            logits |= {row: row_logits for row, row_logits in zip(batch.rows, batch_logits, strict=True) if row is not None}
        return torch.stack([logits[row] for row in range(len(tokens))])


class WholeSequences(Rows):
    """Rows without cached states: a forward pass over the whole row computes each token."""

    in_place = True

    def __init__(self, forward: SamplerPass) -> None:
        self._forward = forward
        self._model = forward.model
        self._rows: list[list[int]] = []

    def enter(self, prompts: Sequence[tuple[int, ...]], starts: list[int]) -> Tensor:
        entering = [list(prompts[start]) for start in starts]
        self._rows += entering
        return self._run(entering)

    def step(self, tokens: Tensor, unfinished: Tensor) -> Tensor:
        live = unfinished.nonzero()[:, 0]
        # On a GPU, a round goes a few steps beyond the end of its last row.
        if not len(live):
            return torch.zeros(len(self._rows), self._model.vocabulary_size, device=tokens.device)
        for row in live.tolist():
            self._rows[row].append(int(tokens[row]))
        logits = self._run([self._rows[row] for row in live.tolist()])
        return logits.new_zeros(len(self._rows), logits.shape[-1]).index_copy_(0, live, logits)

    def keep(self, rows: list[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def _run(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Return the next-token logits, from plain forward passes: no mask, no padding, no cache."""
        logits: dict[int, Tensor] = {}
        for indices in _by_length(sequences):
            batch_size = max(1, LOGITS_BYTES // (4 * self._model.vocabulary_size * len(sequences[indices[0]])))
            for start in range(0, len(indices), batch_size):
                rows = indices[start : start + batch_size]
                ids = torch.tensor([sequences[row] for row in rows], device=self._model.device)
                logits |= zip(rows, self._forward.run(input_ids=ids, use_cache=False)[0], strict=True)
        return torch.stack([logits[row] for row in range(len(sequences))])


def _by_length(sequences: Sequence[Sequence[int]]) -> Iterable[list[int]]:
    """Return the indices of the sequences, grouped by length."""
    groups: dict[int, list[int]] = {}
    for index, sequence in enumerate(sequences):
        groups.setdefault(len(sequence), []).append(index)
    return groups.values()


@dataclass(frozen=True)
class DecodingMethod:
    """How rows keep their past tokens. ``description``: completes a sentence that begins with the model's name, for the log."""

    name: str
    description: str
    rows: Callable[[SamplerPass], Rows]


SHARED_PROMPTS = DecodingMethod(
    "shared prompts", "caches each prompt once for all its samples", functools.partial(CachedRows, kind=PromptCache)
)
METHODS = (
    DecodingMethod(
        "prompt copies", "caches a copy of the prompt for each sample", functools.partial(CachedRows, kind=InPlaceCache)
    ),
    DecodingMethod("whole batches", "samples one whole batch at a time", functools.partial(CachedRows, kind=WholeBatchCache)),
    DecodingMethod("own states", "samples prompts of equal length together, with its own states", OwnStates),
    DecodingMethod("no states", "recomputes the whole sequence for each token", WholeSequences),
)
