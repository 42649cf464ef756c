"""The loop that completes prompts side by side, tokens at a time, while sequences leave and others enter.

One batch of rows takes a step after the other. What a step decides stays in tensors; every :data:`ROUND` tokens, or when many
rows have ended, it is told to the lanes, ended ones leave, and waiting ones are read and enter.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cookbook.engine import attention
from cookbook.engine.attention import by_layout
from cookbook.engine.choosing import Chooser
from cookbook.engine.kv_cache import RowCache, empty_states, open_cache
from cookbook.engine.requests import Lane
from cookbook.engine.stopping import Endings
from cookbook.errors import RolloutError

if TYPE_CHECKING:
    from cookbook.engine.model import LanguageModel

ROUND = 16  # tokens
LEAVE_AT = 0.25  # a round is over early when this share of its rows has ended


class Decoder:
    """Completes ``lanes``, as many at once as fit in ``max_batch_tokens``: rows times the longest that one of them may get."""

    def __init__(self, model: LanguageModel, lanes: Sequence[Lane], max_batch_tokens: int, round_tokens: int = ROUND) -> None:
        self.model = model
        self.budget = max_batch_tokens
        self.round_tokens = round_tokens
        self.longest = max((lane.need for lane in lanes), default=0)
        # Alike ones together: little of a batch is padding, and a prompt is read once for all that begin with it.
        self.waiting = deque(sorted(lanes, key=lambda lane: (lane.need, lane.prompt, lane.request, lane.number)))
        self.rows: list[Lane] = []
        self.cache: RowCache | None = None  # chosen by the first prompts' states
        self.logits: Tensor  # of every row's next token, (rows, V)
        self.positions: Tensor  # of its newest, (rows, 1)

    @torch.no_grad()
    def rounds(self) -> Iterator[list[Lane]]:
        """Yields, after every round, the lanes that got tokens in it; those that ended have a ``stop_reason``."""
        self._enter()
        while self.rows:
            tokens, going_on = self._round()
            yield list(self.rows)
            self._leave(tokens, going_on)
            self._enter()

    def _round(self) -> tuple[Tensor, Tensor]:
        """Returns every row's last token, and which rows have not ended, ``(rows,)`` each."""
        rows, steps = len(self.rows), self.round_tokens
        uniform = torch.from_numpy(np.stack([lane.draws(steps) for lane in self.rows])).to(self.model.device)
        left = torch.tensor([lane.room - len(lane.tokens) for lane in self.rows], device=self.model.device)
        tokens, logprobs = left.new_empty(rows, steps), self.logits.new_empty(rows, steps)
        counts, stopped = torch.zeros_like(left), torch.zeros_like(left, dtype=torch.bool)
        going_on = ~stopped
        for step in range(steps):
            tokens[:, step], logprobs[:, step] = chosen, _ = self.chooser.choose(self.logits, uniform[:, step])
            counts += going_on
            stopped |= going_on & (self.endings.reached(chosen) | self._completes_string(tokens[:, : step + 1], going_on))
            going_on = ~stopped & (counts < left)
            if step + 1 == steps or int(going_on.sum()) <= (1 - LEAVE_AT) * rows:
                break
            self._forward(chosen, going_on)
        self._tell(tokens[:, : step + 1], logprobs[:, : step + 1], counts, stopped)
        return chosen, going_on

    def _completes_string(self, tokens: Tensor, going_on: Tensor) -> Tensor:
        """Which rows' newest token completes a stop string."""
        found = torch.zeros_like(going_on)
        if self.endings.has_strings:
            for row in (going_on & self.endings.suspected(tokens[:, -1])).nonzero()[:, 0].tolist():
                lane = self.rows[row]
                found[row] = lane.ending.is_reached(self.model.tokenizer, lane.tokens + tokens[row].tolist())
        return found

    def _tell(self, tokens: Tensor, logprobs: Tensor, counts: Tensor, stopped: Tensor) -> None:
        if logprobs.isnan().any():
            raise RolloutError("sample: the model's logits are not finite; its weights are broken, go back to a checkpoint")
        results = zip(tokens.tolist(), logprobs.tolist(), counts.tolist(), stopped.tolist(), strict=True)
        for lane, (chosen, scores, count, stop) in zip(self.rows, results, strict=True):
            lane.add(chosen[:count], scores[:count], stop)

    def _leave(self, tokens: Tensor, going_on: Tensor) -> None:
        """Rows that ended make room for those behind them; the rest take the step that their last token is due."""
        rows = _without_holes(going_on.tolist())
        self.rows = [self.rows[row] for row in rows]
        assert self.cache is not None
        self.cache.keep(rows)
        self.positions = self.positions[rows]
        self._learn()
        if rows:
            self._forward(tokens[rows], going_on[rows])

    def _enter(self) -> None:
        """Reads waiting prompts, each once, and gives every lane that starts with one a row."""
        lanes = self._admitted()
        if not lanes:
            return
        prompts = list(dict.fromkeys(tuple(lane.prompt) for lane in lanes))
        place = {prompt: row for row, prompt in enumerate(prompts)}
        starts = [place[tuple(lane.prompt)] for lane in lanes]
        ids, mask = self._padded(prompts)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        states = empty_states(self.model.network)
        given = {"past_key_values": states, "attention_mask": None if mask.all() else mask}
        logits = self._run(ids, positions, given)
        if self.cache is None:
            self.cache = open_cache(states, self.longest, shares=_shares_prompts(self.model, states))
        self.cache.enter(states, mask, starts)
        logits, positions = logits[starts], positions[starts, -1:]
        if self.rows:
            logits, positions = torch.cat([self.logits, logits]), torch.cat([self.positions, positions])
        self.logits, self.positions = logits, positions
        self.rows += lanes
        self._learn()

    def _admitted(self) -> list[Lane]:
        """The lanes that may enter now. At least one, where there is no row."""
        if self.rows and self.cache is not None and not self.cache.in_place:
            return []
        admitted: list[Lane] = []
        widest = max((lane.need for lane in self.rows), default=0)
        while self.waiting:
            first = self.waiting[0]
            widest = max(widest, first.need)
            room = self.budget // widest - len(self.rows) - len(admitted)
            if not (self.rows or admitted):
                room = max(room, 1)
            alike = len(next(_alike(self.waiting)))
            if room < 1 or (alike > room and alike * widest <= self.budget):
                break  # a prompt is read twice only where its completions never fit together
            admitted += [self.waiting.popleft() for _ in range(min(alike, room))]
        return admitted

    def _padded(self, prompts: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        """Left-padded ids, and 1 where they are not padding, ``(prompts, longest)`` each."""
        width = max(map(len, prompts))
        ids, mask = np.zeros((2, len(prompts), width), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = prompt
            mask[row, width - len(prompt) :] = 1
        return torch.from_numpy(ids).to(self.model.device), torch.from_numpy(mask).to(self.model.device)

    def _learn(self) -> None:
        """The rules of the rows there are now."""
        if not self.rows:
            return
        self.chooser = Chooser([lane.params for lane in self.rows], self.model.device)
        self.endings = Endings(self.model, [lane.ending for lane in self.rows], self.model.device)

    def _forward(self, tokens: Tensor, going_on: Tensor) -> None:
        """One step of all rows. One that has ended stays where it is: the next position may be outside the context."""
        assert self.cache is not None
        new = going_on.long()[:, None]
        self.positions = self.positions + new
        self.logits = self._run(tokens[:, None], self.positions, self.cache.arguments(new))

    def _run(self, ids: Tensor, positions: Tensor, given: dict[str, Any]) -> Tensor:
        """Logits of what follows the last column, ``(rows, V)`` float32."""
        with by_layout("prompts" in given):
            out = self.model.network(input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1, **given)
        logits: Tensor = out.logits[:, -1].float()
        return logits


def _without_holes(stays: list[bool]) -> list[int]:
    """The rows that stay, the last of them moved to the places of those that do not."""
    count = sum(stays)
    movers = iter([row for row in range(count, len(stays)) if stays[row]])
    return [row if stays[row] else next(movers) for row in range(count)]


def _alike(lanes: Iterable[Lane]) -> Iterator[list[Lane]]:
    """Lanes that follow each other and begin with the same prompt."""
    return (list(group) for _, group in itertools.groupby(lanes, key=lambda lane: lane.prompt))


def _shares_prompts(model: LanguageModel, states: Any) -> bool:
    """Whether the model's attention is cookbook's, and hears of prompts as it does of layouts.

    Not in half precision: there a fused kernel keeps the scores in float32, and matrix products would round them. Nor where
    some layers read the states of others.
    """
    network = model.network
    precise = network.dtype in (torch.float32, torch.float64)
    of_its_own = len(states.layers) == network.config.get_text_config().num_hidden_layers
    return precise and of_its_own and attention.is_installed(network) and model.layouts.shared
