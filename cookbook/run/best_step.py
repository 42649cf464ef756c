"""The best evaluation of a run, ``checkpoint.best``, and the early stop of ``eval.patience``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cookbook.errors import ConfigError
from cookbook.sampling.evaluation import is_better_higher, is_better_lower
from cookbook.types import JsonObject
from cookbook.utils.words import counted


@dataclass
class BestStep:
    """The step with the best value of ``metric`` so far; with ``metric=None`` no step is the best.

    The weights before the first step have no checkpoint and are left out. ``stale`` counts the evaluations since the best one;
    after ``patience`` of them the run stops.
    """

    metric: str | None
    patience: int | None = None
    step: int | None = None
    value: float = math.nan
    stale: int = 0

    @classmethod
    def restored(cls, metric: str | None, patience: int | None, state: JsonObject | None) -> BestStep:
        """Continue with the state of a checkpoint, unless the run compares another metric now."""
        if state is None or state["metric"] != metric:
            return cls(metric, patience)
        return cls(metric, patience, state["step"], state["value"], state["stale"])

    def state(self) -> JsonObject:
        """The state for the manifest of a checkpoint."""
        return {"metric": self.metric, "step": self.step, "value": self.value, "stale": self.stale}

    @property
    def is_exhausted(self) -> bool:
        """Whether the run stops early."""
        return self.metric is not None and self.patience is not None and self.stale >= self.patience

    @property
    def text(self) -> str:
        """The value and the step, for people. There has to be a best step."""
        return f"{self.metric} {self.value:.6g} after step {self.step}"

    def early_stop(self, step: int) -> str:
        """Return why the run stops early after ``step``, for people."""
        best = f"{self.metric} was NaN in each of them" if self.step is None else f"the best is {self.text}"
        evaluations = counted(self.stale, "evaluation")
        return f"no better value in {evaluations} up to step {step} (eval.patience={self.patience}); {best}"

    def observe(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Take the metrics of an evaluation into account. Return whether they are the best so far.

        Raises:
            ConfigError: the evaluation has not measured the metric, or the better direction of the metric is unknown.
        """
        if self.metric is None:
            return False
        if self.metric not in metrics:
            measured = ", ".join(key for key in metrics if is_better_higher(key) or is_better_lower(key))
            choose = f"choose one of these: {measured}" if measured else "set data.eval_path or data.eval_fraction"
            raise ConfigError(f"checkpoint.best: the evaluation of held-out rows has no {self.metric}; {choose}")
        if not (is_better_higher(self.metric) or is_better_lower(self.metric)):
            raise ConfigError(
                f"checkpoint.best: no value of {self.metric} is known to be better than another; choose a loss, an accuracy, a "
                "reward or a margin, for example eval/loss"
            )
        if step == 0:
            return False
        value = float(metrics[self.metric])
        # NaN is never better, and any number is better than NaN.
        is_better = value > self.value if is_better_higher(self.metric) else value < self.value
        if is_better or (math.isnan(self.value) and not math.isnan(value)):
            self.step, self.value, self.stale = step, value, 0
            return True
        self.stale += 1
        return False
