"""Log-probabilities of target tokens under a linear output layer, forward and backward, without ``[N, V]`` logits."""

from cookbook.engine.head.linear_logprobs.api import LinearLogprobs, LowRank, linear_logits, linear_logprobs, low_rank_of
from cookbook.engine.head.linear_logprobs.implementations import HeadImpl
from cookbook.engine.head.linear_logprobs.tokenwise import LogprobsWithGradient, linear_logprobs_with_gradient

__all__ = [
    "LogprobsWithGradient",
    "HeadImpl",
    "LinearLogprobs",
    "LowRank",
    "linear_logits",
    "linear_logprobs",
    "linear_logprobs_with_gradient",
    "low_rank_of",
]
