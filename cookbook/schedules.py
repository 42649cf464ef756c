"""Learning rate schedules: the factor on ``optim.lr`` at each step.

Steps count from 1 to ``total_steps``. All schedules rise linearly over the warm-up, reaching 1 at its last step, and
those that decay go from there down to ``min_lr_ratio`` at the last step of all. Without a warm-up the first step has
the full rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from cookbook.errors import ConfigError

Decay = Literal["linear", "cosine", "sqrt"]


@dataclass(frozen=True)
class Schedule:
    """Base: the warm-up, and what every schedule is asked.

    Options:
        warmup_steps: steps of linear rise from 0, >= 0. Above 0 they win over ``warmup_ratio``, as in transformers.
        warmup_ratio: the same as a share of all steps, 0 <= ratio <= 1, rounded; null: none.
    """

    warmup_steps: int = 0
    warmup_ratio: float | None = None

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ConfigError(f"schedule.warmup_steps must be >= 0, got {self.warmup_steps}")
        if self.warmup_ratio is not None:
            _share("warmup_ratio", self.warmup_ratio)

    def factor(self, step: int, total_steps: int) -> float:
        """What the learning rate is multiplied by at ``step``, 1 <= step <= total_steps; between 0 and 1.

        Raises:
            ConfigError: a step outside the run.
        """
        if not 1 <= step <= total_steps:
            raise ConfigError(f"schedule: step must be between 1 and {total_steps}, got {step}; raise recipe.steps")
        warmup = self.warmup(total_steps)
        return step / warmup if step < warmup else self.after_warmup(step, max(warmup, 1), total_steps)

    def warmup(self, total_steps: int) -> int:
        """Length of the warm-up in steps."""
        return self.warmup_steps or round((self.warmup_ratio or 0.0) * total_steps)

    def after_warmup(self, step: int, start: int, total_steps: int) -> float:
        """The factor from ``start`` on, the first step of the full rate, >= 1."""
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(Schedule):
    """The full rate throughout. Options: the warm-up's."""

    def after_warmup(self, step: int, start: int, total_steps: int) -> float:
        return 1.0


@dataclass(frozen=True)
class _Decaying(Schedule):
    """Base of the schedules that end at ``min_lr_ratio``, 0 to 1.

    The default is above 0: a last step of rate 0 is a step that is paid for and does nothing.
    """

    min_lr_ratio: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        _share("min_lr_ratio", self.min_lr_ratio)

    def _fall(self, shape: Decay, step: int, start: int, end: int) -> float:
        """From 1 at ``start`` to ``min_lr_ratio`` at ``end``."""
        progress = (step - start) / (end - start) if end > start else 0.0
        fallen = {
            "linear": progress,
            "cosine": 0.5 * (1.0 - math.cos(math.pi * progress)),
            "sqrt": math.sqrt(progress),
        }[shape]
        return 1.0 - (1.0 - self.min_lr_ratio) * fallen


@dataclass(frozen=True)
class Linear(_Decaying):
    """Down in a straight line. Options: the warm-up's; ``min_lr_ratio``, the factor of the last step."""

    def after_warmup(self, step: int, start: int, total_steps: int) -> float:
        return self._fall("linear", step, start, total_steps)


@dataclass(frozen=True)
class Cosine(_Decaying):
    """Down along half a cosine. Options: the warm-up's; ``min_lr_ratio``, the factor of the last step.

    Source: Loshchilov and Hutter 2017, "SGDR", arXiv:1608.03983, eq. 5, without restarts.
    """

    def after_warmup(self, step: int, start: int, total_steps: int) -> float:
        return self._fall("cosine", step, start, total_steps)


@dataclass(frozen=True)
class WSD(_Decaying):
    """Warm-up, stable, decay: the full rate until the last ``decay_ratio`` of all steps, then down.

    Options: the warm-up's; ``min_lr_ratio``, the factor of the last step; and
        decay_ratio: share of all steps spent going down, 0 to 1, rounded; at least one step.
        decay_type: ``linear``, ``cosine`` or ``sqrt`` (1 - sqrt: steep first).

    Source: Hu et al. 2024, "MiniCPM", arXiv:2404.06395; 1 - sqrt: Haegele et al. 2024, arXiv:2405.18392.
    """

    decay_ratio: float = 0.1
    decay_type: Decay = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        _share("decay_ratio", self.decay_ratio)
        if self.decay_type not in get_args(Decay):
            choices = ", ".join(get_args(Decay))
            raise ConfigError(f"schedule.decay_type must be one of {choices}, got {self.decay_type!r}")

    def after_warmup(self, step: int, start: int, total_steps: int) -> float:
        length = max(1, round(self.decay_ratio * total_steps))
        start = max(start, total_steps - length)
        return 1.0 if step <= start else self._fall(self.decay_type, step, start, total_steps)


def _share(key: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"schedule.{key} must be between 0 and 1, got {value}")
