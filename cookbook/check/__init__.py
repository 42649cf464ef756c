"""Measurements of a loss against its declarations. ``check_loss(my_loss)`` works in a notebook too."""

from cookbook.check.bench import CheckResult, State
from cookbook.check.loss import check_loss

__all__ = ["State", "CheckResult", "check_loss"]
