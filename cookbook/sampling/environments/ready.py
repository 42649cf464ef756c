"""Ready-made environments: sums with a second try, and the tasks of reasoning-gym."""

from __future__ import annotations

import functools
import random
import re
from dataclasses import dataclass, field
from typing import Any

from cookbook.errors import ConfigError
from cookbook.sampling.environments.config import EnvironmentConfig

AGAIN = "That is not right. Try again."
# One pair of numbers in this many is held out.
HELD_OUT = 5
LEAST_LIMIT = 4
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# Held-out questions of a task, after those of training: the largest eval.limit. Some tasks make all questions at the start, and
# word_ladder has no 100,000.
MORE_ROWS = 1000


@dataclass(frozen=True, kw_only=True)
class Arithmetic(EnvironmentConfig):
    """Sums of two numbers below ``limit``. After a wrong answer the model hears so and may try again, for half the reward."""

    max_turns: int = 2
    limit: int = 50
    workers: int = field(default=0, repr=False)
    timeout_s: float | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.limit < LEAST_LIMIT:
            raise ConfigError(f"env.limit must be at least {LEAST_LIMIT}, got {self.limit}")

    def make(self) -> object:
        return Sum(self.limit, self.rows)


class Sum:
    """One sum. Every fifth pair of numbers is held out: no sum of an evaluation occurs in training."""

    reward_range = (0.0, 1.0)

    def __init__(self, limit: int, rows: int) -> None:
        self._limit = limit
        self._rows = rows
        self._tries = 0

    def reset(self, seed: int, index: int) -> str:
        numbers = random.Random(seed)
        held_out, is_held_out = index >= self._rows, None
        while is_held_out is not held_out:
            first, second = numbers.randrange(1, self._limit), numbers.randrange(1, self._limit)
            is_held_out = (first * self._limit + second) % HELD_OUT == 0
        self._answer = str(first + second)
        return f"{first}+{second}="

    def step(self, text: str) -> tuple[str | None, float]:
        self._tries += 1
        if text.strip() == self._answer:
            return None, 1.0 / self._tries
        return AGAIN, 0.0


@dataclass(frozen=True, kw_only=True)
class ReasoningGym(EnvironmentConfig):
    """A task of the package reasoning-gym, by its name, with its own options.

    The answer is the text in ``<answer>`` tags if there are any, else the last line. The reward is the task's own score, from 0
    to 1, of the last answer; without ``partial``, a score below 1 earns nothing. After a wrong answer the model is shown
    ``again`` and may try again, up to ``max_turns`` answers. ``rewrite`` has regular expressions, and their replacements in a
    question, in this order.

    Raises:
        ConfigError: the package is not installed, the task or one of its options is unknown, or ``rewrite`` is invalid.

    Source: Stojanovski et al. 2025, "REASONING GYM", arXiv:2505.24760.
    """

    task: str
    options: dict[str, Any] = field(default_factory=dict)
    rewrite: dict[str, str] = field(default_factory=dict)
    again: str = AGAIN
    partial: bool = True
    max_turns: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        question = str(self.tasks[0]["question"])
        for pattern, replacement in self.rewrite.items():
            try:
                re.sub(pattern, replacement, question)
            except (re.error, IndexError) as error:
                raise ConfigError(
                    f"env.rewrite: {pattern!r}: {replacement!r} is not a regular expression and its replacement ({error}); "
                    "fix it"
                ) from None

    def make(self) -> object:
        return Puzzle(self)

    def question(self, entry: dict[str, Any]) -> str:
        """Return the text of a question as the model sees it."""
        text = str(entry["question"])
        for pattern, replacement in self.rewrite.items():
            text = re.sub(pattern, replacement, text)
        return text

    @functools.cached_property
    def tasks(self) -> Any:
        """The questions of the task, those of training first."""
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise ConfigError(
                f"env: reasoning-gym cannot be imported ({error}); pip install 'post-training-cookbook[reasoning-gym]'"
            ) from None
        if self.task not in DATASETS:
            raise ConfigError(f"env.task: reasoning-gym has no task {self.task!r}; it has {', '.join(sorted(DATASETS))}")
        # Row i is a function of this seed and i. Small tasks repeat questions, in the held-out rows too.
        options = {"seed": 0, "size": self.rows + MORE_ROWS, **self.options}
        try:
            return reasoning_gym.create_dataset(self.task, **options)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"env.options: reasoning-gym refuses the options of {self.task}: {error}") from None


class Puzzle:
    """One question of a reasoning-gym task."""

    reward_range = (0.0, 1.0)

    def __init__(self, config: ReasoningGym) -> None:
        self._config = config
        self._score = 0.0

    def reset(self, index: int) -> str:
        self._entry = self._config.tasks[index]
        self._question = self._config.question(self._entry)
        return self._question

    def step(self, text: str) -> str | None:
        tagged = TAGGED.findall(text)
        answer = tagged[-1] if tagged else (text.strip().splitlines() or [""])[-1]
        self._score = float(self._config.tasks.score_answer(answer.strip(), self._entry))
        return None if self._score >= 1.0 else self._config.again.replace("{question}", self._question)

    def get_reward(self) -> float:
        return self._score if self._config.partial or self._score >= 1.0 else 0.0
