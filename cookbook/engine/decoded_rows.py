"""Rows of tokens that are decoded side by side: logits of what follows each, while tokens are added and rows come and go.

:data:`WAYS` lists how a row's past can be held, from the fastest to one that needs nothing but a forward pass. Which one a
model allows is tried in :mod:`~cookbook.engine.probe`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from cookbook.engine import attention
from cookbook.engine.attention import by_layout
from cookbook.engine.fast_path import GivenUpError
from cookbook.engine.kv_cache import InPlaceCache, RowCache, WholeBatchCache, empty_states
from cookbook.engine.prompt_cache import PromptCache

if TYPE_CHECKING:
    from cookbook.engine.model import LanguageModel

LOGITS_BYTES = 256 << 20  # of the logits of whole sequences that exist at once
STATES = ("past_key_values", "cache_params", "state")  # what models call the states that they return and take


class Rows(Protocol):
    """What the decoding loop asks of rows."""

    @property
    def in_place(self) -> bool:
        """Whether rows may enter while others are there."""
        ...

    def enter(self, prompts: Sequence[tuple[int, ...]], starts: list[int]) -> Tensor:
        """Add a row for every number in ``starts``: it continues that prompt. Returns the new rows' logits, ``(N, V)``."""
        ...

    def step(self, tokens: Tensor, going_on: Tensor) -> Tensor:
        """Add one token a row, ``(rows,)``, and return what follows, ``(rows, V)`` float32.

        ``going_on``, ``(rows,)``: false for a row that has ended. Its token and its logits are not used.
        """
        ...

    def keep(self, rows: list[int]) -> None:
        """Leave only ``rows``, in this order. No row may move to a higher place."""
        ...


class CachedRows:
    """Rows in one batch that a cache of ``kind`` holds. Every prompt is read once, padded to the left."""

    def __init__(self, model: LanguageModel, kind: type[RowCache]) -> None:
        self._model = model
        self._kind = kind
        self._cache: RowCache | None = None  # made of the first prompts' states
        self._positions: Tensor  # of every row's newest token, (rows, 1)

    @property
    def in_place(self) -> bool:
        return self._cache is None or self._cache.in_place

    def enter(self, prompts: Sequence[tuple[int, ...]], starts: list[int]) -> Tensor:
        ids, mask = self._padded(prompts)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        states = empty_states(self._model.network)
        logits = self._run(ids, positions, {"past_key_values": states, "attention_mask": None if mask.all() else mask})
        if self._cache is None:
            self._cache = self._kind.of(states)
            self._positions = positions[:0, -1:]
        self._cache.enter(states, mask, starts)
        self._positions = torch.cat([self._positions, positions[starts, -1:]])
        return logits[starts]

    def step(self, tokens: Tensor, going_on: Tensor) -> Tensor:
        """A row that has ended stays where it is: the next position may be outside the context."""
        assert self._cache is not None, "rows enter before the first step"
        new = going_on.long()[:, None]
        self._positions = self._positions + new
        return self._run(tokens[:, None], self._positions, self._cache.arguments(new))

    def keep(self, rows: list[int]) -> None:
        assert self._cache is not None, "rows enter before the first step"
        self._cache.keep(rows)
        self._positions = self._positions[rows]

    def _padded(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        """Left-padded ids, and 1 where they are not padding, ``(prompts, longest)`` each."""
        width = max(map(len, prompts))
        ids, mask = np.zeros((2, len(prompts), width), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = prompt
            mask[row, width - len(prompt) :] = 1
        return torch.from_numpy(ids).to(self._model.device), torch.from_numpy(mask).to(self._model.device)

    def _run(self, ids: Tensor, positions: Tensor, given: dict[str, Any]) -> Tensor:
        """Logits of what follows the last column, ``(rows, V)`` float32."""
        with by_layout("prompts" in given):
            out = self._model.network(input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1, **given)
        logits: Tensor = out.logits[:, -1].float()
        return logits


@dataclass
class _Batch:
    """Rows whose states the model keeps together. ``rows``: their numbers now, None for one that has left."""

    rows: list[int | None]
    states: dict[str, Any]


class OwnStates:
    """Rows whose past the model keeps in states of its own kind, of which nothing is known but their name.

    Such states cannot be padded or divided. So prompts of one length are one batch, a batch stays whole until its last row has
    left, and a prompt is read once for each of its rows.
    """

    in_place = False

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._batches: list[_Batch] = []

    def enter(self, prompts: Sequence[tuple[int, ...]], starts: list[int]) -> Tensor:
        self._batches = [_Batch(list(rows), {}) for rows in _of_one_length([prompts[start] for start in starts])]
        found = [self._run(batch, [prompts[starts[row]] for row in batch.rows if row is not None]) for batch in self._batches]
        return self._in_order(found, len(starts))

    def step(self, tokens: Tensor, going_on: Tensor) -> Tensor:
        chosen = tokens.tolist()
        found = [self._run(one, [[0 if row is None else chosen[row]] for row in one.rows]) for one in self._batches]
        return self._in_order(found, len(chosen))

    def keep(self, rows: list[int]) -> None:
        place = {row: number for number, row in enumerate(rows)}
        for batch in self._batches:
            batch.rows = [None if row is None else place.get(row) for row in batch.rows]
        self._batches = [batch for batch in self._batches if any(row is not None for row in batch.rows)]

    def _run(self, batch: _Batch, tokens: Sequence[Sequence[int]]) -> Tensor:
        ids = torch.tensor(tokens, device=self._model.device)
        out = self._model.network(input_ids=ids, use_cache=True, **batch.states)
        batch.states = {name: out[name] for name in STATES if getattr(out, name, None) is not None}
        if not batch.states:
            raise GivenUpError("its forward pass returns no states")
        logits: Tensor = out.logits[:, -1].float()
        return logits

    def _in_order(self, found: Sequence[Tensor], count: int) -> Tensor:
        """The batches' logits as ``(count, V)``, row by row."""
        logits = found[0].new_zeros(count, found[0].shape[-1])
        for batch, of_batch in zip(self._batches, found, strict=True):
            for row, values in zip(batch.rows, of_batch, strict=True):
                if row is not None:
                    logits[row] = values
        return logits


class WholeSequences:
    """Rows of which nothing is kept but the tokens: a forward pass reads the whole row again for each of its tokens."""

    in_place = True

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._rows: list[list[int]] = []

    def enter(self, prompts: Sequence[tuple[int, ...]], starts: list[int]) -> Tensor:
        entering = [list(prompts[start]) for start in starts]
        self._rows += entering
        return self._run(entering)

    def step(self, tokens: Tensor, going_on: Tensor) -> Tensor:
        live = going_on.nonzero()[:, 0].tolist()
        for row in live:
            self._rows[row].append(int(tokens[row]))
        found = self._run([self._rows[row] for row in live])
        return found.new_zeros(len(self._rows), found.shape[-1]).index_copy_(0, torch.tensor(live, device=found.device), found)

    def keep(self, rows: list[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def _run(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """As the model is trained: no mask, no padding, no cache."""
        found: list[Tensor | None] = [None] * len(sequences)
        vocabulary = int(self._model.network.config.get_text_config().vocab_size)
        for alike in _of_one_length(sequences):
            at_once = max(1, LOGITS_BYTES // (4 * vocabulary * len(sequences[alike[0]])))
            for start in range(0, len(alike), at_once):
                rows = alike[start : start + at_once]
                ids = torch.tensor([sequences[row] for row in rows], device=self._model.device)
                logits = self._model.network(input_ids=ids, use_cache=False).logits[:, -1].float()
                for row, values in zip(rows, logits, strict=True):
                    found[row] = values
        return torch.stack([values for values in found if values is not None])


def _of_one_length(sequences: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """The places of sequences of the same length, by length."""
    places: dict[int, list[int]] = {}
    for place, sequence in enumerate(sequences):
        places.setdefault(len(sequence), []).append(place)
    return iter(places.values())


@dataclass(frozen=True)
class Way:
    """A way to hold what rows have read. ``description`` continues a sentence that begins with the model's name."""

    name: str
    description: str
    rows: Callable[[LanguageModel], Rows]


SHARED_PROMPTS = Way(
    "shared prompts", "keeps a prompt once for all its samples", functools.partial(CachedRows, kind=PromptCache)
)
WAYS = (
    Way("prompt copies", "keeps a copy of its prompt for every sample", functools.partial(CachedRows, kind=InPlaceCache)),
    Way("whole batches", "samples one batch after the other", functools.partial(CachedRows, kind=WholeBatchCache)),
    Way("own states", "samples prompts of one length together, in states of its own", OwnStates),
    Way("no states", "computes every sequence again for each of its tokens", WholeSequences),
)


def may_share_prompts(model: LanguageModel, longest: int) -> bool:
    """Whether rows of up to ``longest`` tokens may read one copy of their prompt.

    The model's attention has to be cookbook's, and to hear of prompts as it does of layouts; no window may end in a row. Not in
    half precision: there a fused kernel keeps the scores in float32, and matrix products would round them. Nor if some layers
    read the states of others.
    """
    network = model.network
    precise = network.dtype in (torch.float32, torch.float64)
    if not (precise and attention.is_installed(network) and model.layouts.shared):
        return False
    layers = empty_states(network).layers
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    of_its_own = len(layers) == network.config.get_text_config().num_hidden_layers
    return of_its_own and all(window is None or window >= longest for window in windows)
