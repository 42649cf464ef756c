"""Direct reward optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cookbook.losses.base import LossBatch, Metrics, non_negative, weighted_mean
from cookbook.losses.normalization import Normalization
from cookbook.losses.policy import PolicyLoss, RolloutArrays, bounded_exp


@dataclass(frozen=True)
class DRO(PolicyLoss):
    """``-sum w * (p A - beta / 2 (p - q)^2)``: policy gradient, held near the sampler by a quadratic penalty.

    Per token: p is the current logprob, q the logprob that the token was sampled with, A the advantage, w the weight.

    The penalty applies to every token of weight != 0, also to tokens of advantage 0, which have no other term. If a datum
    has no ``weights``, tokens with neither a sampling logprob nor an advantage count as the prompt and are left out;
    otherwise ``q = 0`` would pull the prompt's probability to 1.

    Options:
        beta: strength of the penalty, >= 0.

    Metrics: ``loss/ratio_mean``, ``loss/penalty`` (``beta / 2 (p - q)^2``, token mean), ``kl/sampler_trainer_k1``,
    ``_k3``.

    Source: Richemond et al. 2024, "Offline Regularised Reinforcement Learning for Large Language Models Alignment",
    arXiv:2405.19107.
    """

    name: ClassVar[str] = "dro"

    beta: float = 0.05
    normalization: Normalization | None = Normalization.num_loss_tokens

    def __post_init__(self) -> None:
        super().__post_init__()
        non_negative("loss", beta=self.beta)

    def terms(self, batch: LossBatch, tokens: RolloutArrays) -> tuple[Tensor, Metrics]:
        log_ratio = tokens.logprobs - tokens.sampling_logprobs
        penalty = 0.5 * self.beta * log_ratio.square()
        return penalty - tokens.logprobs * tokens.advantages, {
            "loss/ratio_mean": weighted_mean(bounded_exp(log_ratio), tokens.weights),
            "loss/penalty": weighted_mean(penalty, tokens.weights),
        }
