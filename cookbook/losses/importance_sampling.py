"""Policy gradient with importance sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cookbook.losses.base import Batch, Metrics, weighted_mean
from cookbook.losses.policy import PolicyLoss, Rollouts, bounded_exp
from cookbook.normalization import Normalization


@dataclass(frozen=True)
class ImportanceSampling(PolicyLoss):
    """``-sum w * r * A`` with ``r = exp(p - q)``: the policy gradient, from tokens drawn with other weights.

    Unbiased and unclipped: at ``r = 1`` it is REINFORCE, far from it the variance is unbounded. Tinker's loss of that
    name.

    Metrics: ``loss/ratio_mean``, ``kl/sampler_trainer_k1``, ``kl/sampler_trainer_k3``.

    Source: Williams 1992 (REINFORCE); Thinking Machines, Tinker's built-in losses.
    """

    name: ClassVar[str] = "importance_sampling"

    normalization: Normalization | None = Normalization.num_loss_tokens

    def terms(self, batch: Batch, tokens: Rollouts) -> tuple[Tensor, Metrics]:
        ratio = bounded_exp(tokens.logprobs - tokens.sampling_logprobs)
        return -ratio * tokens.advantages, {"loss/ratio_mean": weighted_mean(ratio, tokens.weights)}
