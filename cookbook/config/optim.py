"""The group ``optim``, and the learning rate schedules of the group ``schedule``: the factor on ``optim.lr`` at each step.

Steps count from 1 to ``total_steps``. All schedules rise linearly over the warm-up and reach 1 at its last step. Those that
decay fall from 1 to ``min_lr_ratio`` at the last step of the run. Without a warm-up the first step has the full rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from cookbook.errors import ConfigError

if TYPE_CHECKING:
    from cookbook.types import AdamParams

Decay = Literal["linear", "cosine", "sqrt"]


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, as ``torch.optim.AdamW``. ``grad_clip_norm`` is a global L2 norm; 0 does not clip."""

    lr: float = 1e-5
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.lr < float("inf"):
            raise ConfigError(f"optim: lr must be >= 0 and finite, got {self.lr}")
        # AdamParams checks the other five keys, which have the same names there.
        self.adam()

    def adam(self, scale: float = 1.0) -> AdamParams:
        """Return the parameters of one step; ``scale`` is the schedule's factor on the learning rate."""
        # This module imports numpy, which printing a configuration does not need.
        from cookbook.types import AdamParams

        others = {name: value for name, value in vars(self).items() if name != "lr"}
        return AdamParams(learning_rate=self.lr * scale, **others)


@dataclass(frozen=True)
class Schedule:
    """Base of the schedules: the warm-up, and the methods that every schedule has.

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
        """Return the factor of the learning rate at ``step``, 1 <= step <= total_steps; between 0 and 1.

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
        """Return the factor at or after ``start``, the first step of the full rate, >= 1."""
        return 1.0


@dataclass(frozen=True)
class Constant(Schedule):
    """The full rate at every step. Options: those of the warm-up."""


@dataclass(frozen=True)
class _Decaying(Schedule):
    """Base of the schedules that end at ``min_lr_ratio``, 0 to 1.

    The default is above 0, because a last step of rate 0 would cost time and change nothing.
    """

    shape: ClassVar[Decay]
    min_lr_ratio: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        _share("min_lr_ratio", self.min_lr_ratio)

    def after_warmup(self, step: int, start: int, total_steps: int) -> float:
        return self._fall(self.shape, step, start, total_steps)

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
    """Linear decay. Options: the warm-up's; ``min_lr_ratio``, the factor of the last step."""

    shape: ClassVar[Decay] = "linear"


@dataclass(frozen=True)
class Cosine(_Decaying):
    """Decay along half a cosine. Options: the warm-up's; ``min_lr_ratio``, the factor of the last step.

    Source: Loshchilov and Hutter 2017, "SGDR", arXiv:1608.03983, eq. 5, without restarts.
    """

    shape: ClassVar[Decay] = "cosine"


@dataclass(frozen=True)
class WSD(_Decaying):
    """Warm-up, stable, decay: the full rate until the last ``decay_ratio`` of all steps, then decay.

    Options: the warm-up's; ``min_lr_ratio``, the factor of the last step; and
        decay_ratio: share of all steps that decay, 0 to 1, rounded; at least one step.
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
