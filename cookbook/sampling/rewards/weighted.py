"""Scores with named parts, and the weighted sum of several rewards: ``reward=[number,format]``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from cookbook.errors import ConfigError, RolloutError
from cookbook.protocols import Backend, ModelReward, Preflight, Reward
from cookbook.utils.suggest import did_you_mean

if TYPE_CHECKING:
    from cookbook.engine.model import ModelConfig

NAME = re.compile(r"[\w.-]+")


Parts = Mapping[str, float | None]
"""Named parts of a reward; None: the part does not apply to the completion."""


@dataclass(frozen=True)
class Score:
    """Reward of one completion, and the named parts that it consists of, if it has any. A higher ``value`` is better."""

    value: float
    parts: Parts = field(default_factory=dict)
    # Rewards of single turns or tokens, whose sum is the value; empty: one reward for the whole completion.
    steps: tuple[float, ...] = ()


@dataclass(frozen=True)
class Weighted:
    """Weighted sum of rewards. The value of each, before its weight, is a part of the sum.

    ``parts`` has the rewards by name; each runs in its own workers, if it has any. ``weights`` are by name or in the order of
    the parts; a part without a weight has weight 1. Weight 0 only logs a part. With ``normalize=each`` the advantages in
    training are of rewards that are normalized within their group one by one
    (:func:`cookbook.sampling.credit.normalized_each`); the value, and so evaluations, are still the sum.

    Raises:
        ConfigError: no parts, an invalid name, or weights that do not fit the parts.
    """

    parts: Mapping[str, Reward]
    weights: list[float] | dict[str, float] | None = None
    normalize: Literal["each"] | None = None

    def __post_init__(self) -> None:
        if not self.parts:
            raise ConfigError("reward.parts: no reward given; write 'reward=[number,format]'")
        for name in self.parts:
            if not NAME.fullmatch(name):
                raise ConfigError(f"reward.parts: invalid name {name!r}; use letters, digits, '_', '-' and '.'")
        if isinstance(self.weights, list) and len(self.weights) != len(self.parts):
            names = ", ".join(self.parts)
            raise ConfigError(f"reward.weights: expected one weight for each of {names}, got {self.weights}")
        for name, weight in self.by_name().items():
            if name not in self.parts:
                raise ConfigError(f"reward.weights: no reward is named {name!r}.{did_you_mean(name, self.parts)}")
            if not math.isfinite(weight):
                raise ConfigError(f"reward.weights: the weight of {name} must be finite, got {weight}")

    def preflight(self, model: ModelConfig, backend: Backend) -> None:
        """Let each reward refuse the run before anything loads."""
        part: object
        for part in self.parts.values():
            if isinstance(part, Preflight):
                part.preflight(model, backend)

    def by_name(self) -> dict[str, float]:
        """Return the weight of every part."""
        if isinstance(self.weights, list):
            return dict(zip(self.parts, self.weights, strict=True))
        return dict.fromkeys(self.parts, 1.0) | (self.weights or {})

    def combine(self, scores: Mapping[str, Sequence[Score | None]], where: str = "") -> list[Score]:
        """Return the sum for every completion. Parts of a part are named ``name/part``.

        A reward that has no score for a completion does not apply to it: it is not part of the sum.

        Raises:
            RolloutError: no reward applies to a completion of the row at ``where``.
        """
        weights = self.by_name()
        sums = []
        for of_one in zip(*scores.values(), strict=True):
            named = dict(zip(scores, of_one, strict=True))
            applied = {name: score for name, score in named.items() if score is not None}
            if not applied:
                raise RolloutError(
                    f"{where}: none of the rewards {', '.join(named)} applies, all returned None; one has to return a number"
                )
            value = sum(weights[name] * score.value for name, score in applied.items())
            steps = _steps({name: score for name, score in applied.items() if weights[name]}, weights, where)
            parts: dict[str, float | None] = {}
            for name, score in named.items():
                parts[name] = None if score is None else score.value
                parts |= {} if score is None else {f"{name}/{part}": number for part, number in score.parts.items()}
            sums.append(Score(value, parts, steps))
        return sums


def model_rewards(reward: Reward | Weighted | None, key: str = "reward") -> dict[str, ModelReward]:
    """Return the rewards that a second model computes, by the key of the reward: ``reward``, ``reward.parts.NAME``."""
    if isinstance(reward, Weighted):
        parts = [model_rewards(part, f"{key}.parts.{name}") for name, part in reward.parts.items()]
        return {name: judge for part in parts for name, judge in part.items()}
    return {key: reward} if isinstance(reward, ModelReward) else {}


def _steps(scores: Mapping[str, Score], weights: Mapping[str, float], where: str) -> tuple[float, ...]:
    """Return the weighted sum of the rewards of turns or tokens; a reward without them counts at the last.

    Raises:
        RolloutError: one reward has rewards of turns, and another of tokens.
    """
    counts = {len(score.steps) for score in scores.values()} - {0}
    if not counts:
        return ()
    if len(counts) > 1:
        raise RolloutError(
            f"{where}: the rewards {', '.join(scores)} have lists of {' and '.join(map(str, sorted(counts)))} numbers; let all "
            "of them reward turns, or all tokens"
        )
    total = [0.0] * counts.pop()
    for name, score in scores.items():
        own = score.steps or [*[0.0] * (len(total) - 1), score.value]
        total = [sum_ + weights[name] * number for sum_, number in zip(total, own, strict=True)]
    return tuple(total)
