"""Keys and values of samples that share their prompts: a prompt's once, and of every sample those of the tokens since.

What a step reads lies in memory without gaps: a CPU reads it two to four times as fast as the same numbers with gaps. So a step
writes to a short tail, and when that is full, or rows come or go, the rest is copied to hold it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from cookbook.engine.attention_scores import Prompts
from cookbook.engine.kv_cache import check_keys_and_values

TAIL = 16  # columns


class PromptCache:
    """Prompts once, and of every row the tokens since: what :class:`Prompts` reads."""

    in_place = True

    def __init__(self, layers: int) -> None:
        self._layers = [_Layer() for _ in range(layers)]
        self._states = Cache(layers=self._layers)
        self._of: list[int] = []  # the prompt of every row
        self._starts: list[int] = []  # the first column of every row's own
        self._mask: Tensor  # 1 where a column of a prompt holds a token, (prompts, columns)

    @classmethod
    def of(cls, prefilled: DynamicCache) -> PromptCache:
        check_keys_and_values(prefilled)
        return cls(len(prefilled.layers))

    def enter(self, prefilled: DynamicCache, mask: Tensor, rows: list[int]) -> None:
        if not self._of:
            self._mask = mask[:0]
        self._of += [len(self._mask) + row for row in rows]
        self._starts += [self._layers[0].columns] * len(rows)
        self._mask = _below(self._mask[..., None], mask[..., None])[..., 0]
        for layer, read in zip(self._layers, prefilled.layers, strict=True):
            layer.enter(read.keys, read.values, len(rows))
        self._arrange()

    def keep(self, rows: list[int]) -> None:
        if rows == list(range(len(self._of))):
            return
        self._of, self._starts = [self._of[row] for row in rows], [self._starts[row] for row in rows]
        first, prompts = min(self._starts, default=0), sorted(set(self._of))
        self._starts = [start - first for start in self._starts]
        place = {prompt: number for number, prompt in enumerate(prompts)}
        self._of = [place[prompt] for prompt in self._of]
        self._mask = self._mask[prompts]
        padding = int(self._mask.any(0).int().argmax()) if rows else 0
        self._mask = self._mask[:, padding:]
        for layer in self._layers:
            layer.keep(rows, first, prompts, padding)
        if rows:
            self._arrange()

    def arguments(self, new: Tensor) -> dict[str, Any]:
        for layer in self._layers:
            layer.make_room()
        mask = None
        if self._seen is not None:
            columns = torch.arange(self._layers[0].columns + 1, device=new.device)
            mask = torch.cat([self._seen, columns >= self._first_columns], 1)[:, None, None]
        layers = [layer.read() for layer in self._layers]
        prompts = Prompts(layers, self._layers[0].written + 1, self._slots, self._members, self._places, mask)
        return {"past_key_values": self._states, "attention_mask": None, "prompts": prompts}

    def _arrange(self) -> None:
        """What of the next steps' arguments stays as it is until rows enter or leave."""
        members: list[list[int]] = [[] for _ in range(len(self._mask))]
        slots = []  # of every row among those of its prompt
        for row, prompt in enumerate(self._of):
            slots.append(len(members[prompt]))
            members[prompt].append(row)
        self._slots = max(map(len, members))
        places = [prompt * self._slots + slot for prompt, slot in zip(self._of, slots, strict=True)]
        filled = [row for of_one in members for row in of_one + of_one[:1] * (self._slots - len(of_one))]
        device, in_order = self._mask.device, filled == list(range(len(self._of)))
        self._members = None if in_order else torch.tensor(filled, device=device)
        self._places = None if in_order else torch.tensor(places, device=device)
        whole = bool(self._mask.all()) and not any(self._starts)
        self._seen = None if whole else self._mask[self._of].bool()
        self._first_columns = torch.tensor(self._starts, device=device)[:, None]


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, as transformers hands them out: the tail, of which ``written`` columns are filled."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0
        self._parts: list[_Part] = []

    @property
    def columns(self) -> int:
        """Of the rows' own, written ones."""
        return self._parts[0].own.shape[2] + self.written if self._parts else 0

    def read(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a step reads before the tail: keys and values of the prompts, and of the rows."""
        keys, values = self._parts
        return keys.prompts, values.prompts, keys.own, values.own

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """One token a row. Returns the whole tail."""
        keys, values = (part.tail for part in self._parts)
        keys[:, :, self.written : self.written + 1] = key_states
        values[:, :, self.written : self.written + 1] = value_states
        self.written += 1
        return keys, values

    def make_room(self) -> None:
        """For one more token a row."""
        if self.written == TAIL:
            self._empty_tail()

    def enter(self, keys: Tensor, values: Tensor, rows: int) -> None:
        """Adds prompts, and ``rows`` that have no column yet."""
        if self._parts:
            for part, prompts in zip(self._parts, (keys, values), strict=True):
                part.enter(prompts, rows)
        else:
            self._parts = [_Part.of(keys, rows), _Part.of(values, rows)]

    def keep(self, rows: list[int], first: int, prompts: list[int], padding: int) -> None:
        """Leaves only ``rows``, their columns from ``first`` on, and ``prompts``, theirs from ``padding`` on."""
        self._empty_tail()
        for part in self._parts:
            part.own = _chosen(part.own, rows, first)
            part.tail = part.tail[: len(rows)]
            part.prompts = _chosen(part.prompts, prompts, padding)
        self._parts = self._parts if rows else []

    def _empty_tail(self) -> None:
        for part in self._parts:
            part.own = torch.cat([part.own, part.tail[:, :, : self.written]], 2)
            part.tail = torch.zeros_like(part.tail)
        self.written = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("rows enter before the first step")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1


@dataclass
class _Part:
    """The keys, or the values: of the prompts, of the rows' own tokens but the last ones, and of those.

    ``(prompts or rows, heads, columns, D)`` each. What no token has written is 0: nobody sees it, but that only multiplies it
    by 0, and new memory may hold a nan.
    """

    prompts: Tensor
    own: Tensor
    tail: Tensor

    @classmethod
    def of(cls, prompts: Tensor, rows: int) -> _Part:
        _, heads, _, width = prompts.shape
        return cls(prompts.contiguous(), prompts.new_zeros(rows, heads, 0, width), prompts.new_zeros(rows, heads, TAIL, width))

    def enter(self, prompts: Tensor, rows: int) -> None:
        self.prompts = _below(self.prompts, prompts)
        self.own, self.tail = (torch.cat([part, part.new_zeros(rows, *part.shape[1:])]) for part in (self.own, self.tail))


def _chosen(states: Tensor, rows: list[int], first: int) -> Tensor:
    return states.index_select(0, torch.tensor(rows, device=states.device, dtype=torch.long))[:, :, first:].contiguous()


def _below(states: Tensor, more: Tensor) -> Tensor:
    """Rows and more of them, the shorter filled up at the front of their last dimension but one."""
    width = max(states.shape[-2], more.shape[-2])
    return torch.cat([pad(part, (0, 0, width - part.shape[-2], 0)) for part in (states, more)])
