"""The number that an optimizing sweeper gets from a run: ``eval.objective``."""

from __future__ import annotations

import math

from omegaconf import DictConfig, OmegaConf

from cookbook.errors import ConfigError


def refuse_wrong_direction(cfg: DictConfig) -> None:
    """Raise ConfigError if the sweeper would look for the worst run: Optuna minimizes by default, most metrics should grow."""
    direction = OmegaConf.select(cfg, "hydra.sweeper.direction")
    if direction is None:
        return
    from cookbook.evaluation import is_better_higher  # with numpy, which only a sweep may load

    direction = getattr(direction, "name", direction)
    metric = OmegaConf.select(cfg, "eval.objective")
    higher = metric is None or is_better_higher(metric)
    if higher and direction == "minimize":
        raise ConfigError(
            f"hydra.sweeper.direction: minimize would look for the lowest {metric or 'accuracy'}; "
            "set hydra.sweeper.direction=maximize, or eval.objective=eval/loss"
        )
    if metric == "eval/loss" and direction == "maximize":
        raise ConfigError("hydra.sweeper.direction: maximize would look for the highest eval/loss; set it to minimize")


def check(cfg: DictConfig, value: float | None) -> None:
    """Raise ConfigError for a job without a finite number: Optuna's sweeper breaks at NaN, and no sweeper can use None."""
    name = OmegaConf.select(cfg, "eval.objective") or "an accuracy, a reward or a margin of held-out rows"
    if value is None:
        raise ConfigError(f"eval.objective: the run has not reported {name}; choose another metric")
    if not math.isfinite(value):
        raise ConfigError(f"eval.objective: the last value of {name} is {value}, so the sweeper cannot use the run")
