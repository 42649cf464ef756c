"""Policy gradient with importance sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cookbook.losses.base import LossBatch, Metrics, weighted_mean
from cookbook.losses.normalization import Normalization
from cookbook.losses.policy import PolicyLoss, RolloutArrays, bounded_exp


@dataclass(frozen=True)
class ImportanceSampling(PolicyLoss):
    """``-sum w * r * A`` with ``r = exp(p - q)``: the policy gradient, from tokens that other weights sampled.

    Per token: p is the current logprob, q the logprob that the token was sampled with, A the advantage, w the weight.

    Unbiased and unclipped: at ``r = 1`` it is REINFORCE, and far from 1 its variance is unbounded. Tinker has a loss of
    the same name and formula.

    Metrics: ``loss/ratio_mean``, ``kl/sampler_trainer_k1``, ``kl/sampler_trainer_k3``.

    Source: Williams 1992 (REINFORCE); Thinking Machines, Tinker's built-in losses.
    """

    name: ClassVar[str] = "importance_sampling"

    normalization: Normalization | None = Normalization.num_loss_tokens

    def terms(self, batch: LossBatch, tokens: RolloutArrays) -> tuple[Tensor, Metrics]:
        ratio = bounded_exp(tokens.logprobs - tokens.sampling_logprobs)
        return -ratio * tokens.advantages, {"loss/ratio_mean": weighted_mean(ratio, tokens.weights)}
