"""The output head: log-probabilities of given targets from hidden states, forward and backward, without ``[N, V]`` logits."""

from cookbook.engine.linear_logprobs.api import LinearLogprobs, LowRank, linear_logprobs
from cookbook.engine.linear_logprobs.implementations import HeadImpl
from cookbook.engine.linear_logprobs.layers import low_rank_of
from cookbook.engine.linear_logprobs.tokenwise import FoldedLogprobs, linear_logprobs_with_gradient

__all__ = [
    "FoldedLogprobs",
    "HeadImpl",
    "LinearLogprobs",
    "LowRank",
    "linear_logprobs",
    "linear_logprobs_with_gradient",
    "low_rank_of",
]
