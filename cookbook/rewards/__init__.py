"""Judging completions: shipped rewards, the user's own, and the one place that calls them."""

from cookbook.rewards.limits import Limits
from cookbook.rewards.python import Python
from cookbook.rewards.score import Judge, Pending, score
from cookbook.rewards.shipped import Exact, Format, Number

__all__ = ["Exact", "Format", "Judge", "Limits", "Number", "Pending", "Python", "score"]
