"""The loop that completes prompts side by side, tokens at a time, while sequences leave and others enter.

One batch of rows takes a step after the other. What a step decides stays in tensors; every :data:`ROUND` tokens, or when many
rows have ended, it is told to the lanes, ended ones leave, and waiting ones are read and enter.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cookbook.engine.choosing import Chooser
from cookbook.engine.decoded_rows import Rows, Way
from cookbook.engine.requests import Lane
from cookbook.engine.stopping import Endings
from cookbook.errors import RolloutError

if TYPE_CHECKING:
    from cookbook.engine.model import LanguageModel

ROUND = 16  # tokens
LEAVE_AT = 0.25  # a round is over early when this share of its rows has ended


class Decoder:
    """Completes ``lanes``, as many at once as fit in ``max_batch_tokens``: rows times the longest that one of them may get."""

    def __init__(
        self,
        model: LanguageModel,
        lanes: Sequence[Lane],
        max_batch_tokens: int,
        round_tokens: int = ROUND,
        *,
        way: Way | None = None,  # None: the fastest that the model allows
    ) -> None:
        self.model = model
        self.budget = max_batch_tokens
        self.round_tokens = round_tokens
        self.longest = max((lane.need for lane in lanes), default=0)
        # Alike ones together: little of a batch is padding, and a prompt is read once for all that begin with it.
        self.waiting = deque(sorted(lanes, key=lambda lane: (lane.need, lane.prompt, lane.request, lane.number)))
        self.rows: list[Lane] = []
        self.past: Rows = (way or model.way_to_decode(self.longest)).rows(model)
        self.logits: Tensor  # of every row's next token, (rows, V)

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
            self.logits = self.past.step(chosen, going_on)
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
        self.past.keep(rows)
        self._learn()
        if rows:
            self.logits = self.past.step(tokens[rows], going_on[rows])

    def _enter(self) -> None:
        """Reads waiting prompts, each once, and gives every lane that starts with one a row."""
        lanes = self._admitted()
        if not lanes:
            return
        prompts = list(dict.fromkeys(tuple(lane.prompt) for lane in lanes))
        place = {prompt: row for row, prompt in enumerate(prompts)}
        logits = self.past.enter(prompts, [place[tuple(lane.prompt)] for lane in lanes])
        self.logits = torch.cat([self.logits, logits]) if self.rows else logits
        self.rows += lanes
        self._learn()

    def _admitted(self) -> list[Lane]:
        """The lanes that may enter now. At least one, where there is no row."""
        if self.rows and not self.past.in_place:
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

    def _learn(self) -> None:
        """Collects the rules of the rows there are now."""
        if not self.rows:
            return
        self.chooser = Chooser([lane.params for lane in self.rows], self.model.device)
        self.endings = Endings(self.model, [lane.ending for lane in self.rows], self.model.device)


def _without_holes(stays: list[bool]) -> list[int]:
    """The rows that stay, the last of them moved to the places of those that do not."""
    count = sum(stays)
    movers = iter([row for row in range(count, len(stays)) if stays[row]])
    return [row if stays[row] else next(movers) for row in range(count)]


def _alike(lanes: Iterable[Lane]) -> Iterator[list[Lane]]:
    """Lanes that follow each other and begin with the same prompt."""
    return (list(group) for _, group in itertools.groupby(lanes, key=lambda lane: lane.prompt))
