"""Direct reward optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cookbook.losses.base import Batch, Metrics, non_negative, weighted_mean
from cookbook.losses.policy import PolicyLoss, Rollouts, bounded_exp
from cookbook.normalization import Normalization


@dataclass(frozen=True)
class DRO(PolicyLoss):
    """``-sum w * (p A - beta / 2 (p - q)^2)``: policy gradient, held near the sampler by a quadratic penalty.

    The penalty holds every token of weight != 0, also those of advantage 0: they are the ones nothing else holds. Where
    a datum has no ``weights``, the tokens with neither a sampling logprob nor an advantage are taken for the prompt and
    left out; otherwise ``q = 0`` would pull the prompt's probability to 1.

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

    def terms(self, batch: Batch, tokens: Rollouts) -> tuple[Tensor, Metrics]:
        log_ratio = tokens.logprobs - tokens.sampling_logprobs
        penalty = 0.5 * self.beta * log_ratio.square()
        return penalty - tokens.logprobs * tokens.advantages, {
            "loss/ratio_mean": weighted_mean(bounded_exp(log_ratio), tokens.weights),
            "loss/penalty": weighted_mean(penalty, tokens.weights),
        }
