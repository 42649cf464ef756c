"""KV caches for continuous batching: sequences are decoded in one batch, and rows leave and enter between steps.

:class:`InPlaceCache` holds a copy of the prompt for every sample. The newest tokens of all rows are in the same column, as in a
left-padded batch; a step writes one column in place and reads a view. :class:`PromptCache` holds each prompt once for all its
samples. :class:`WholeBatchCache` wraps transformers' own cache, for layers with states other than keys and values.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from cookbook.engine.attention import SharedPrefixKV
from cookbook.engine.fast_path import FastPathError
from cookbook.engine.precision import rounded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# A full buffer is copied to one that is wider by a quarter, but by at least this number of columns.
NEW_COLUMNS = 64


class InPlaceLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, ``(rows, heads, columns, D)`` each, in preallocated buffers.

    Columns ``first`` to ``end - 1`` are in use. ``first`` is negative if the oldest columns have been dropped from the buffers
    because they are outside the sliding window: the next token sees the last ``window - 1`` columns. All columns of a row
    before ``end`` are finite, because masked values are multiplied by 0, and uninitialized memory may hold NaN.
    """

    # Makes transformers build an explicit mask. With a mask, its sdpa reads grouped keys once for all heads of a group, which
    # is a third faster on the CPU than without.
    is_compileable = True

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.is_sliding = window is not None
        self.window = window
        self.rows = self.first = self.end = 0

    @property
    def seen(self) -> int:
        """First column that the next token sees."""
        return self.first if self.window is None else max(self.first, self.end - self.window + 1)

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Append one token per row. Return views of keys and values, which are valid until the next call."""
        if self.end == self.keys.shape[2]:
            self._move(self.seen, self.keys.shape[0])
        written, read = slice(self.end, self.end + 1), slice(self.seen, self.end + 1)
        key_states, value_states = rounded(key_states, value_states)
        self.keys[: self.rows, :, written] = key_states
        self.values[: self.rows, :, written] = value_states
        self.end += 1
        return self.keys[: self.rows, :, read], self.values[: self.rows, :, read]

    def enter(self, keys: Tensor, values: Tensor, rows: Tensor, width: int) -> None:
        """Append copies of the ``rows`` of ``keys`` and ``values`` as new rows.

        ``width``: number of prompt columns. In a layer with a sliding window, ``keys`` hold only its last columns.
        """
        keys, values = rounded(keys, values)
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        count, num_columns = self.rows + len(rows), keys.shape[2]
        if not self.rows:
            self.first, self.end = num_columns - width, num_columns
        self.first = min(self.first, self.end - width)
        if count > self.keys.shape[0] or not num_columns <= self.end <= self.keys.shape[2]:
            self._move(min(self.seen, self.end - num_columns), max(count, self.keys.shape[0]))
        start = self.end - num_columns
        for states, read in ((self.keys, keys), (self.values, values)):
            states[self.rows : count, :, :start] = 0
            states[self.rows : count, :, start : self.end] = read.index_select(0, rows)
        self.rows = count

    def keep(self, rows: list[int], width: int) -> None:
        """Keep only ``rows``, in this order, and their last ``width`` columns."""
        moves = [(source, target) for target, source in enumerate(rows) if source != target]
        self.rows = len(rows)
        self.first = max(self.first, self.end - width)
        if moves:
            source, target = torch.tensor(moves, device=self.keys.device).T
            used = slice(self.seen, self.end)
            for states in (self.keys, self.values):
                states[:, :, used].index_copy_(0, target, states[:, :, used].index_select(0, source))

    def _move(self, first: int, rows: int) -> None:
        """Copy to new buffers of ``rows`` rows that begin with the column ``first`` and have free columns at the end."""
        used, start = self.end - first, max(first, 0)
        columns = used + max(NEW_COLUMNS, used // 4)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(rows, old.shape[1], columns, old.shape[3])
            if self.rows:
                new[: self.rows, :, : start - first] = 0
                new[: self.rows, :, start - first : used] = old[: self.rows, :, start : self.end]
            setattr(self, name, new)
        self.first, self.end = self.first - first, used

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = key_states[:0, :, :0], value_states[:0, :, :0]
        self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns that ``query_length`` tokens read, and the first of them, counted from ``first``."""
        return self.end - self.seen + query_length, self.seen - self.first

    def get_seq_length(self) -> int:
        return self.end - self.first

    def get_max_length(self) -> int:
        return -1


# Cache layers of transformers that hold keys and values only. Subclasses hold further states, so the type must match exactly.
IN_PLACE = (DynamicLayer, DynamicSlidingWindowLayer)


class RowCache(abc.ABC):
    """Interface of the caches. ``in_place``: rows may enter while others are decoded, and unused columns are dropped."""

    in_place: bool

    @abc.abstractmethod
    def enter(self, prefilled: DynamicCache, mask: Tensor, rows: list[int]) -> None:
        """Add one row for each entry of ``rows``, the index of the prompt in ``prefilled`` that the row continues.

        ``mask``: ``(prompts, columns)``, 1 where a column of ``prefilled`` holds a token, 0 for left padding.

        Raises:
            FastPathError: the cache does not support the states of a layer.
        """

    @abc.abstractmethod
    def keep(self, rows: list[int]) -> None:
        """Keep only ``rows``, in this order. No row may move to a higher index."""

    @abc.abstractmethod
    def arguments(self, new: Tensor) -> dict[str, object]:
        """Return the network's arguments for one more token per row. ``new``: ``(rows, 1)``, 0 for rows that have ended."""


def check_keys_and_values(prefilled: DynamicCache) -> None:
    """Check that every layer caches its own keys and values, and nothing else.

    Raises:
        FastPathError: a layer has other states, or none.
    """
    for layer in prefilled.layers:
        if type(layer) not in IN_PLACE:
            raise FastPathError(f"a layer keeps its states in a {type(layer).__name__}")
        if not layer.is_initialized:
            raise FastPathError("a layer has no keys and values of its own")


def empty_states(network: PreTrainedModel) -> DynamicCache:
    """Return an empty cache for the prefill of prompts."""
    return DynamicCache(config=network.config.get_text_config())


class _MaskedCache(RowCache):
    """Base of the caches with one row per sequence: maintains the attention mask, which marks the columns with tokens."""

    in_place: bool

    def __init__(self) -> None:
        self._states: Cache
        # (rows, columns): 1 if a column holds a token of the row.
        self._mask = torch.empty(0, 0, dtype=torch.long)
        self._padded = False

    def arguments(self, new: Tensor) -> dict[str, object]:
        self._mask = torch.cat([self._mask, new], 1)
        return {"past_key_values": self._states, "attention_mask": self._mask if self._padded else None}

    def _enter(self, mask: Tensor) -> None:
        self._mask = _stacked_masks(self._mask, mask)
        self._padded = not bool(self._mask.all())

    def _keep(self, rows: list[int]) -> None:
        self._mask = self._mask[rows]
        if self.in_place:
            self._mask = self._mask[:, _padding(self._mask) :]
        self._padded = not bool(self._mask.all())


class WholeBatchCache(_MaskedCache):
    """transformers' own cache, for any kind of layer. Rows enter only when no other rows are left."""

    in_place = False

    def enter(self, prefilled: DynamicCache, mask: Tensor, rows: list[int]) -> None:
        prefilled.reorder_cache(torch.tensor(rows, device=mask.device))
        self._states = prefilled
        self._enter(mask[rows])

    def keep(self, rows: list[int]) -> None:
        if rows and rows != list(range(self._states.batch_size)):
            self._states.reorder_cache(torch.tensor(rows))
        self._keep(rows)


class InPlaceCache(_MaskedCache):
    """Keys and values in preallocated buffers that each step writes in place. New rows reuse the memory of rows that left."""

    in_place = True

    def __init__(self) -> None:
        super().__init__()
        self._layers: list[InPlaceLayer] = []

    def enter(self, prefilled: DynamicCache, mask: Tensor, rows: list[int]) -> None:
        check_keys_and_values(prefilled)
        if not self._layers:
            self._layers = [InPlaceLayer(getattr(layer, "sliding_window", None)) for layer in prefilled.layers]
            self._states = Cache(layers=self._layers)
        for layer, read in zip(self._layers, prefilled.layers, strict=True):
            layer.enter(read.keys, read.values, torch.tensor(rows, device=mask.device), mask.shape[1])
        self._enter(mask[rows])

    def keep(self, rows: list[int]) -> None:
        self._keep(rows)
        for layer in self._layers:
            layer.keep(rows, self._mask.shape[1])


def _padding(mask: Tensor) -> int:
    """Return the number of leading columns that are padding in every row."""
    return int(mask.any(0).int().argmax())


# Number of columns that are added for the rows' next tokens, when all are filled. That copies all tokens; but a CPU reads whole
# buffers two to four times as fast as a part of their columns, so the products read the free columns, too, and they are few.
FREE_COLUMNS = 16


class PromptCache(RowCache):
    """Each prompt once, and the later tokens of every row; read by :class:`SharedPrefixKV`."""

    in_place = True

    def __init__(self) -> None:
        self._layers: list[_SharedPromptLayer] = []
        self._states: Cache
        # The prompt of each row, and the column of its first own token.
        self._prompt_of_row: list[int] = []
        self._starts: list[int] = []
        # (prompts, columns): 1 if a column of a prompt holds a token.
        self._mask = torch.empty(0, 0, dtype=torch.long)

    def enter(self, prefilled: DynamicCache, mask: Tensor, rows: list[int]) -> None:
        check_keys_and_values(prefilled)
        if not self._layers:
            self._layers = [_SharedPromptLayer() for _ in prefilled.layers]
            self._states = Cache(layers=self._layers)
        self._prompt_of_row += [len(self._mask) + row for row in rows]
        self._starts += [self._layers[0].columns] * len(rows)
        self._mask = _stacked_masks(self._mask, mask)
        for layer, read in zip(self._layers, prefilled.layers, strict=True):
            layer.enter(read.keys, read.values, len(rows))
        self._assign_slots()

    def keep(self, rows: list[int]) -> None:
        if rows == list(range(len(self._prompt_of_row))):
            return
        self._prompt_of_row, self._starts = [self._prompt_of_row[row] for row in rows], [self._starts[row] for row in rows]
        first, prompts = min(self._starts, default=0), sorted(set(self._prompt_of_row))
        self._starts = [start - first for start in self._starts]
        new_index = {prompt: index for index, prompt in enumerate(prompts)}
        self._prompt_of_row = [new_index[prompt] for prompt in self._prompt_of_row]
        self._mask = self._mask[prompts]
        padding = _padding(self._mask)
        self._mask = self._mask[:, padding:]
        for layer in self._layers:
            layer.keep(rows, first, prompts, padding)
        if rows:
            self._assign_slots()

    def arguments(self, new: Tensor) -> dict[str, object]:
        layers = [layer.read() for layer in self._layers]
        mask = None
        if self._seen is not None:
            columns = torch.arange(self._layers[0].width, device=new.device)
            mask = torch.cat([self._seen, columns >= self._first_columns], 1)[:, None, None]
        prompts = replace(self._prompts, layers=layers, filled=self._layers[0].columns + 1, mask=mask)
        return {"past_key_values": self._states, "attention_mask": None, "prompts": prompts}

    def _assign_slots(self) -> None:
        """Assign rows to slots, and compute the arguments that do not change until rows enter or leave."""
        rows_of_prompt: list[list[int]] = [[] for _ in range(len(self._mask))]
        for row, prompt in enumerate(self._prompt_of_row):
            rows_of_prompt[prompt].append(row)
        slots = max(map(len, rows_of_prompt))
        # The first row of a prompt also fills its unused slots.
        filled = [row for rows in rows_of_prompt for row in rows + rows[:1] * (slots - len(rows))]
        # Reversed, so that a row with several slots gets its first.
        slot_of = {filled[slot]: slot for slot in reversed(range(len(filled)))}
        device = self._mask.device
        order: tuple[Tensor | None, Tensor | None] = None, None
        if filled != list(range(len(self._prompt_of_row))):
            slot_of_row = [slot_of[row] for row in range(len(self._prompt_of_row))]
            order = torch.tensor(filled, device=device), torch.tensor(slot_of_row, device=device)
        self._prompts = SharedPrefixKV([], 0, slots, *order)
        whole = bool(self._mask.all()) and not any(self._starts)
        self._seen = None if whole else self._mask[self._prompt_of_row].bool()
        self._first_columns = torch.tensor(self._starts, device=device)[:, None]


class _SharedPromptLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer. ``update`` returns those of the rows' own tokens, of which ``columns`` are filled."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = 0
        self._parts: list[_LayerStates] = []

    @property
    def width(self) -> int:
        """Number of columns after the prompts, filled or not."""
        return self._parts[0].own.shape[2]

    def read(self) -> tuple[Tensor, Tensor]:
        """Return keys and values of the prompts. Ensures a free column for the next token."""
        keys, values = self._parts
        if self.columns == self.width:
            for part in self._parts:
                part.own = pad(part.own, (0, 0, 0, FREE_COLUMNS))
        return keys.prompts, values.prompts

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Append one token per row. Return keys and values of all columns after the prompts."""
        keys, values = (part.own for part in self._parts)
        key_states, value_states = rounded(key_states, value_states)
        keys[:, :, self.columns : self.columns + 1] = key_states
        values[:, :, self.columns : self.columns + 1] = value_states
        self.columns += 1
        return keys, values

    def enter(self, keys: Tensor, values: Tensor, rows: int) -> None:
        """Add prompts, and ``rows`` new rows that have no own tokens yet. Half precision is kept in float32."""
        keys, values = (states.to(torch.promote_types(states.dtype, torch.float32)) for states in rounded(keys, values))
        if not self._parts:
            self.lazy_initialization(keys, values)
        for part, prompts in zip(self._parts, (keys, values), strict=True):
            part.prompts = _stacked(part.prompts, prompts).contiguous()
            part.own = torch.cat([part.own, part.own.new_zeros(rows, *part.own.shape[1:])])

    def keep(self, rows: list[int], first: int, prompts: list[int], padding: int) -> None:
        """Keep only ``rows``, from column ``first`` on, and ``prompts``, from column ``padding`` on."""
        if self._parts:
            # Once for keys and values: a GPU waits for every copy from the host.
            device = self._parts[0].own.device
            own, of_prompts = (torch.tensor(index, device=device, dtype=torch.long) for index in (rows, prompts))
            for part in self._parts:
                part.own = part.own[:, :, : self.columns].index_select(0, own)[:, :, first:].contiguous()
                part.prompts = part.prompts.index_select(0, of_prompts)[:, :, padding:].contiguous()
        self.columns, self._parts = (self.columns - first, self._parts) if rows else (0, [])

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._parts = [_LayerStates(states[:0, :, :0], states[:0, :, :0]) for states in (key_states, value_states)]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1


@dataclass
class _LayerStates:
    """The keys or the values of one layer: of the prompts, and of the rows' own tokens.

    Shape ``(prompts or rows, heads, columns, D)`` each. Unused columns are 0, because they are multiplied by weights of 0, and
    uninitialized memory may hold NaN.
    """

    prompts: Tensor
    own: Tensor


def _stacked(states: Tensor, more: Tensor) -> Tensor:
    """Concatenate along the rows; the part with fewer columns (dimension -2) is padded on the left."""
    if not len(states):
        return more
    width = max(states.shape[-2], more.shape[-2])
    return torch.cat([pad(part, (0, 0, width - part.shape[-2], 0)) for part in (states, more)])


def _stacked_masks(mask: Tensor, more: Tensor) -> Tensor:
    """Concatenate masks, ``(rows, columns)``, along the rows."""
    return _stacked(mask[..., None], more[..., None])[..., 0]
