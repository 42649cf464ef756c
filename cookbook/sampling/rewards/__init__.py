"""Rewards: the built-in ones, the user's own function, a weighted sum, a judge, and the runner that calls them."""

from cookbook.sampling.rewards.builtin import Exact, Format, Limits, Number, Python
from cookbook.sampling.rewards.runner import PendingReward, PendingScores, RewardRunner, part_means
from cookbook.sampling.rewards.weighted import Parts, Score, Weighted, model_rewards

__all__ = [
    "Exact",
    "Format",
    "Limits",
    "Number",
    "Parts",
    "PendingReward",
    "PendingScores",
    "Python",
    "RewardRunner",
    "Score",
    "Weighted",
    "model_rewards",
    "part_means",
]
