"""The prompts of a run's steps, if their number or choice depends on rewards: ``rollout.refill``, ``data.curriculum``."""

from __future__ import annotations

import base64
import logging
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cookbook.data import DataConfig, RenderedPrompt
from cookbook.data.datum_table import Batches
from cookbook.errors import ConfigError
from cookbook.sampling.rollouts import RolloutGroup
from cookbook.types import JsonObject

log = logging.getLogger("cookbook")

# Separates these draws from other draws of the same seed.
DRAWS = 1_668_641_397
# Option with the number of prompts of a step.
PROMPTS_KEY = "recipe.prompts_per_step"
CLASSES = ("new", "easy", "medium", "hard")
NEW, EASY, MEDIUM, HARD = range(len(CLASSES))
# The pass rate of a level is the mean over its prompts that were drawn last, so that it follows the model.
RECENT = 8
# By prompt: attempts and solved attempts of its last group, its last groups that were all solved, and the number of its last
# draw, counted from 1; 0: never drawn.
ROW = np.dtype([("attempts", "<u4"), ("solved", "<u4"), ("streak", "<u4"), ("drawn", "<u8")])


class PromptQueue(Batches[RenderedPrompt]):
    """Prompts in the order in which steps take them: ``queue[i]`` are the first of step i, :meth:`further` the next ones.

    Without ``data.curriculum`` the order is that of :class:`Batches`, epoch after epoch; what a step takes beyond its batch is
    not repeated in the next step. With ``data.curriculum`` every prompt is drawn: first its class, by the shares, then the
    prompt of the class that was drawn longest ago. A step draws no prompt twice, unless there are too few. With
    ``data.curriculum.by``, a prompt that was never drawn has the class of its level: the prompts with the same value in that
    column.

    The state is that of the last finished step, so that a checkpoint never has half of a step.

    Raises:
        ConfigError: a row lacks the column ``data.curriculum.by``.

    Source: Qu et al. 2025, "Can Prompt Difficulty be Online Predicted for Accelerating RL Finetuning of Reasoning Models?",
    arXiv:2507.04632 (draw prompts of a medium predicted pass rate); Chen et al. 2025, "Self-Evolving Curriculum for LLM
    Reasoning", arXiv:2505.14970 (one estimate for each category of prompts).
    """

    def __init__(self, prompts: Sequence[RenderedPrompt], size: int, seed: int, config: DataConfig) -> None:
        super().__init__(prompts, min(size, len(prompts)), 1, seed, config.shuffle, key=PROMPTS_KEY)
        self._curriculum = config.curriculum
        by = config.curriculum.by if config.curriculum is not None else None
        self._levels = None if by is None else _levels(prompts, by)
        self._table = np.zeros(len(prompts), ROW)
        # Prompts taken since the run began: now, at the start of the step, and at the end of the last finished step.
        self._taken = self._step_start = self._finished = 0
        self._finished_table = self._table.copy()
        # The step whose batch was taken last, the batch, and the index of every prompt of the step by its identity.
        self._step, self._batch = -1, list[RenderedPrompt]()
        self._indices: dict[int, tuple[RenderedPrompt, int]] = {}
        self._has_warned = False

    def __getitem__(self, index: int) -> list[RenderedPrompt]:
        if index != self._step:
            self._step, self._step_start, self._indices = index, self._taken, {}
            self._batch = self.further(self._size)
        return self._batch

    def further(self, count: int) -> list[RenderedPrompt]:
        """Take the next ``count`` prompts."""
        indices = self._in_order(count) if self._curriculum is None else self._drawn(count)
        self._taken += count
        prompts = [self._rows[index] for index in indices]
        # The prompt is kept with its index: the identity of a freed object may be that of another.
        self._indices |= {id(prompt): (prompt, index) for prompt, index in zip(prompts, indices, strict=True)}
        return prompts

    def numbers(self, prompts: Sequence[RenderedPrompt]) -> list[int]:
        """Return the number of every prompt among those of the data. The prompts are of the current step."""
        return [self._indices[id(prompt)][1] for prompt in prompts]

    def prompts(self, numbers: Sequence[int]) -> list[RenderedPrompt]:
        """Return the prompts with these numbers."""
        return [self._rows[number] for number in numbers]

    def observe(self, groups: Sequence[RolloutGroup], numbers: Sequence[int] | None = None) -> None:
        """Note the pass rates of a step's groups. ``numbers``: those of their prompts; None: the step is the current one."""
        if self._curriculum is not None:
            prompts = self.numbers([group.prompt for group in groups]) if numbers is None else numbers
            for group, number in zip(groups, prompts, strict=True):
                row = self._table[number]
                solved = sum(reward >= self._curriculum.solved_reward for reward in group.rewards)
                row["attempts"], row["solved"] = len(group.rewards), solved
                row["streak"] = row["streak"] + 1 if solved == len(group.rewards) else 0

    def finish_step(self) -> None:
        """Make the current state the one that a checkpoint stores."""
        self._finished, self._finished_table = self._taken, self._table.copy()

    def metrics(self) -> dict[str, float]:
        """Return the number of prompts by class, and of the retired ones; nothing without ``data.curriculum``."""
        if self._curriculum is None:
            return {}
        retired = self._retired()
        counts = np.bincount(self._classes()[~retired], minlength=len(CLASSES))
        named = {f"curriculum/{name}": float(count) for name, count in zip(CLASSES, counts, strict=True)}
        return {**named, "curriculum/retired": float(retired.sum())}

    def state(self) -> JsonObject:
        """Return the state of the last finished step, JSON-compatible."""
        table = base64.b64encode(zlib.compress(self._finished_table.tobytes())).decode()
        return {"taken": self._finished, **({} if self._curriculum is None else {"pass_rates": table})}

    def restore(self, state: JsonObject | None, steps: int) -> None:
        """Continue from a checkpoint after ``steps`` steps; without a state, as if each had taken one batch."""
        stated = state or {}
        self._taken = int(stated.get("taken", steps * self._size))
        if self._curriculum is not None and "pass_rates" in stated:
            table = np.frombuffer(zlib.decompress(base64.b64decode(stated["pass_rates"])), ROW)
            if len(table) == len(self._table):
                self._table = table.copy()
            else:
                log.warning(
                    "data.curriculum: the checkpoint has pass rates of %d prompts, and the data now have %d; all prompts "
                    "start as new",
                    len(table),
                    len(self._table),
                )
        self.finish_step()

    def _in_order(self, count: int) -> list[int]:
        places = (divmod(place, len(self._rows)) for place in range(self._taken, self._taken + count))
        return [int(self.order(epoch)[place]) for epoch, place in places]

    def _drawn(self, count: int) -> list[int]:
        """Draw prompts one by one; the draw numbers continue after ``self._taken``."""
        assert self._curriculum is not None
        random = np.random.Generator(np.random.PCG64([self._seed, DRAWS, self._taken]))
        indices: list[int] = []
        while len(indices) < count:
            waiting = self._waiting()
            while len(indices) < count and any(waiting):
                shares = np.array(
                    [share if queue else 0.0 for share, queue in zip(self._curriculum.shares, waiting, strict=True)]
                )
                # Possibly none of the remaining classes has a share.
                shares = shares if shares.any() else np.array([float(bool(queue)) for queue in waiting])
                bounds = np.cumsum(shares)
                of_class = int(np.searchsorted(bounds / bounds[-1], random.random(), side="right"))
                index = waiting[of_class].pop()
                indices.append(index)
                self._table["drawn"][index] = self._taken + len(indices)
        return indices

    def _waiting(self) -> list[list[int]]:
        """Return the prompts that can be drawn, by class; the last of each is the next."""
        if (retired := self._retired()).all():
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "data.curriculum: every attempt at all %d prompts is solved, so none is left to train on and all are drawn "
                    "again; add harder prompts, or lower recipe.steps",
                    len(retired),
                )
            self._table["streak"] = 0
            retired = self._retired()
        left = ~retired & (self._table["drawn"] <= self._step_start)
        candidates = np.flatnonzero(left if left.any() else ~retired)
        rank = np.empty(len(self._table), np.int64)
        rank[np.asarray(self.order(0))] = np.arange(len(rank))
        candidates = candidates[np.lexsort((rank[candidates], self._table["drawn"][candidates]))[::-1]]
        classes = self._classes()[candidates]
        return [candidates[classes == number].tolist() for number in range(len(CLASSES))]

    def _retired(self) -> npt.NDArray[np.bool_]:
        after = self._curriculum.retire_after if self._curriculum is not None else None
        return np.zeros(len(self._table), np.bool_) if after is None else self._table["streak"] >= after

    def _classes(self) -> npt.NDArray[np.int64]:
        """Return the class of every prompt. A prompt that was drawn and has no group, because its requests failed, is hard."""
        rates = self._table["solved"] / np.maximum(self._table["attempts"], 1)
        new = NEW if self._levels is None else self._of_levels(self._levels, rates)
        return np.where(self._table["drawn"] == 0, new, self._class_of(rates))

    def _of_levels(self, levels: npt.NDArray[np.int64], rates: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Return the class of every prompt's level, by the mean pass rate of its recent groups; new if it has no group."""
        measured = np.flatnonzero(self._table["attempts"])
        measured = measured[np.lexsort((self._taken - self._table["drawn"][measured].astype(np.int64), levels[measured]))]
        # The place of each prompt in its level; 0 was drawn last.
        places = np.arange(len(measured)) - np.searchsorted(levels[measured], levels[measured])
        recent = measured[places < RECENT]
        counts = np.bincount(levels[recent], minlength=len(levels))
        means = np.bincount(levels[recent], rates[recent], minlength=len(levels)) / np.maximum(counts, 1)
        return np.where(counts == 0, NEW, self._class_of(means))[levels]

    def _class_of(self, rates: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        assert self._curriculum is not None
        return np.select([rates > self._curriculum.easy_above, rates < self._curriculum.hard_below], [EASY, HARD], MEDIUM)


def _levels(prompts: Sequence[RenderedPrompt], column: str) -> npt.NDArray[np.int64]:
    """Return a number for every prompt, the same for prompts with the same value in a column."""
    numbers: dict[str, int] = {}
    levels = []
    for row in (prompt.row for prompt in prompts):
        if column not in row.values:
            raise ConfigError(
                f"data.curriculum.by: expected a column of the data, got {column!r}; {row.where} has {', '.join(row.values)}"
            )
        levels.append(numbers.setdefault(str(row.values[column]), len(numbers)))
    return np.array(levels, np.int64)
