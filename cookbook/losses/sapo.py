"""Soft adaptive policy optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cookbook.losses.base import LossBatch, Metrics, positive, weighted_mean
from cookbook.losses.normalization import Normalization
from cookbook.losses.policy import PolicyLoss, RolloutArrays, bounded_exp


@dataclass(frozen=True)
class SAPO(PolicyLoss):
    """``-sum w * f(r) A`` with ``r = exp(p - q)`` and ``f(r) = S(tau (r - 1)) * 4 / tau``, S being the logistic function.

    Per token: p is the current logprob, q the logprob that the token was sampled with, A the advantage, w the weight. ``tau``
    is ``tau_positive`` if A > 0, else ``tau_negative``.

    f is a soft clip. Its slope is ``4 S (1 - S)``: 1 at r = 1, and falling towards 0 on both sides, the faster the larger tau.
    So the first update after sampling has the gradient of importance sampling. The value at r = 1 is ``2 A / tau``, not A:
    only differences of this loss have a meaning.

    Options:
        tau_positive: temperature of the tokens with A > 0, > 0.
        tau_negative: temperature of the others, > 0. The paper makes it larger: pushing a token down raises many others.

    The paper takes the mean over the tokens of each answer, and then over the answers. Here the token sum is divided by the
    tokens of the step, as in the other losses; ``normalization=num_sequences`` divides by the answers.

    Metrics: ``loss/ratio_mean``, ``loss/gate_mean`` (the slope of f, 1 without drift), ``kl/sampler_trainer_k1``, ``_k3``.

    Source: Gao et al. 2025, "Soft Adaptive Policy Optimization", arXiv:2511.20347, eq. 5 and 6.
    """

    name: ClassVar[str] = "sapo"

    tau_positive: float = 1.0
    tau_negative: float = 1.05
    normalization: Normalization | None = Normalization.num_loss_tokens

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("loss", tau_positive=self.tau_positive, tau_negative=self.tau_negative)

    def terms(self, batch: LossBatch, tokens: RolloutArrays) -> tuple[Tensor, Metrics]:
        ratio = bounded_exp(tokens.logprobs - tokens.sampling_logprobs)
        tau = torch.where(tokens.advantages > 0, ratio.new_tensor(self.tau_positive), ratio.new_tensor(self.tau_negative))
        gate = torch.sigmoid(tau * (ratio - 1))
        return -4 / tau * gate * tokens.advantages, {
            "loss/ratio_mean": weighted_mean(ratio, tokens.weights),
            "loss/gate_mean": weighted_mean(4 * gate * (1 - gate), tokens.weights),
        }
