"""Scores with named parts, and the weighted sum of several rewards: ``reward=[number,format]``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cookbook.errors import ConfigError
from cookbook.protocols import Backend, Preflight, Reward
from cookbook.utils.suggest import did_you_mean

if TYPE_CHECKING:
    from cookbook.engine.model import ModelConfig

NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class Score:
    """Reward of one completion, and the named parts that it consists of, if it has any. A higher ``value`` is better."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Weighted:
    """Weighted sum of rewards. The value of each, before its weight, is a part of the sum.

    ``parts`` has the rewards by name; each runs in its own workers, if it has any. ``weights`` are by name or in the order of
    the parts; a part without a weight has weight 1. Weight 0 only logs a part.

    Raises:
        ConfigError: no parts, an invalid name, or weights that do not fit the parts.
    """

    parts: Mapping[str, Reward]
    weights: list[float] | dict[str, float] | None = None

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

    def combine(self, scores: Mapping[str, Sequence[Score]]) -> list[Score]:
        """Return the sum for every completion. Parts of a part are named ``name/part``."""
        weights = self.by_name()
        sums = []
        for of_one in zip(*scores.values(), strict=True):
            named = dict(zip(scores, of_one, strict=True))
            value = sum(weights[name] * score.value for name, score in named.items())
            parts: dict[str, float] = {}
            for name, score in named.items():
                parts |= {name: score.value} | {f"{name}/{part}": number for part, number in score.parts.items()}
            sums.append(Score(value, parts))
        return sums
