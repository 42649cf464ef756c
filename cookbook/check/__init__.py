"""A bench for objectives: what a loss declares, measured. ``check_loss(my_loss)`` works in a notebook too."""

from cookbook.check.loss import check_loss
from cookbook.check.verdict import State, Verdict

__all__ = ["State", "Verdict", "check_loss"]
