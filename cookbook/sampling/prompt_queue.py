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
DRAW_SEED = 1_668_641_397
# Option with the number of prompts of a step.
PROMPTS_KEY = "recipe.prompts_per_step"
CLASSES = ("new", "easy", "medium", "hard")
NEW, EASY, MEDIUM, HARD = range(len(CLASSES))
# The pass rate of a level is the mean over its prompts that were drawn last, so that it follows the model.
NUM_RECENT = 8
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
        if self._curriculum is None:
            return
        if numbers is None:
            numbers = self.numbers([group.prompt for group in groups])
        for group, number in zip(groups, numbers, strict=True):
            row = self._table[number]
            num_attempts = len(group.rewards)
            num_solved = sum(reward >= self._curriculum.solved_reward for reward in group.rewards)
            row["attempts"] = num_attempts
            row["solved"] = num_solved
            row["streak"] = row["streak"] + 1 if num_solved == num_attempts else 0

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
        if self._curriculum is None:
            return {"taken": self._finished}
        table = base64.b64encode(zlib.compress(self._finished_table.tobytes())).decode()
        return {"taken": self._finished, "pass_rates": table}

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
        indices = []
        for taken in range(self._taken, self._taken + count):
            epoch, place = divmod(taken, len(self._rows))
            indices.append(int(self.order(epoch)[place]))
        return indices

    def _drawn(self, count: int) -> list[int]:
        """Draw prompts one by one; the draw numbers continue after ``self._taken``."""
        assert self._curriculum is not None
        random = np.random.Generator(np.random.PCG64([self._seed, DRAW_SEED, self._taken]))
        indices: list[int] = []
        while len(indices) < count:
            waiting = self._waiting()
            while len(indices) < count and any(waiting):
                number = _draw_class(self._curriculum.shares, waiting, random)
                index = waiting[number].pop()
                indices.append(index)
                self._table["drawn"][index] = self._taken + len(indices)
        return indices

    def _waiting(self) -> list[list[int]]:
        """Return the prompts that can be drawn, by class; the last of each is the next."""
        retired = self._retired()
        if retired.all():
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "data.curriculum: every attempt at all %d prompts is solved, so none is left to train on and all are drawn "
                    "again; add harder prompts, or lower recipe.steps",
                    len(retired),
                )
            self._table["streak"] = 0
            retired = self._retired()
        drawn_at = self._table["drawn"]
        # A step draws a prompt twice only if there are too few others.
        fresh = ~retired & (drawn_at <= self._step_start)
        candidates = np.flatnonzero(fresh if fresh.any() else ~retired)
        # Among prompts that were never drawn, the order of the data decides.
        rank = np.empty(len(self._table), np.int64)
        rank[np.asarray(self.order(0))] = np.arange(len(rank))
        longest_ago_first = np.lexsort((rank[candidates], drawn_at[candidates]))
        candidates = candidates[longest_ago_first[::-1]]
        classes = self._classes()[candidates]
        return [candidates[classes == number].tolist() for number in range(len(CLASSES))]

    def _retired(self) -> npt.NDArray[np.bool_]:
        """Return for every prompt whether its last ``data.curriculum.retire_after`` groups were all solved."""
        if self._curriculum is None or self._curriculum.retire_after is None:
            return np.zeros(len(self._table), np.bool_)
        retired: npt.NDArray[np.bool_] = self._table["streak"] >= self._curriculum.retire_after
        return retired

    def _classes(self) -> npt.NDArray[np.int64]:
        """Return the class of every prompt. A prompt that was drawn and has no group, because its requests failed, is hard."""
        rates = self._table["solved"] / np.maximum(self._table["attempts"], 1)
        new = NEW if self._levels is None else self._of_levels(self._levels, rates)
        return np.where(self._table["drawn"] == 0, new, self._class_of(rates))

    def _of_levels(self, levels: npt.NDArray[np.int64], rates: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Return the class of every prompt's level, by the mean pass rate of its recent groups; new if it has no group."""
        measured = np.flatnonzero(self._table["attempts"])
        # Level by level, and within a level the prompt that was drawn last comes first.
        age = self._taken - self._table["drawn"][measured].astype(np.int64)
        measured = measured[np.lexsort((age, levels[measured]))]
        start_of_level = np.searchsorted(levels[measured], levels[measured])
        place_in_level = np.arange(len(measured)) - start_of_level
        recent = measured[place_in_level < NUM_RECENT]
        counts = np.bincount(levels[recent], minlength=len(levels))
        means = np.bincount(levels[recent], rates[recent], minlength=len(levels)) / np.maximum(counts, 1)
        return np.where(counts == 0, NEW, self._class_of(means))[levels]

    def _class_of(self, rates: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        assert self._curriculum is not None
        return np.select([rates > self._curriculum.easy_above, rates < self._curriculum.hard_below], [EASY, HARD], MEDIUM)


def _draw_class(shares: Sequence[float], waiting: Sequence[Sequence[int]], random: np.random.Generator) -> int:
    """Draw the number of a class that has prompts, with the probabilities ``shares``."""
    weights = [share if prompts else 0.0 for share, prompts in zip(shares, waiting, strict=True)]
    if not any(weights):
        # None of the remaining classes has a share, so all of them are equally likely.
        weights = [1.0 if prompts else 0.0 for prompts in waiting]
    bounds = np.cumsum(weights)
    return int(np.searchsorted(bounds / bounds[-1], random.random(), side="right"))


def _levels(prompts: Sequence[RenderedPrompt], column: str) -> npt.NDArray[np.int64]:
    """Return a number for every prompt, the same for prompts with the same value in a column."""
    numbers: dict[str, int] = {}
    levels = []
    for prompt in prompts:
        row = prompt.row
        if column not in row.values:
            raise ConfigError(
                f"data.curriculum.by: expected a column of the data, got {column!r}; {row.where} has {', '.join(row.values)}"
            )
        levels.append(numbers.setdefault(str(row.values[column]), len(numbers)))
    return np.array(levels, np.int64)
