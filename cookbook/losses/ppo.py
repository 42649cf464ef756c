"""Proximal policy optimization, as Tinker defines it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cookbook.errors import ConfigError, DataError
from cookbook.losses.base import LossBatch, Metrics, non_negative, weighted_mean
from cookbook.losses.normalization import Normalization
from cookbook.losses.policy import PolicyLoss, RolloutArrays, bounded_exp, clipped_surrogate


class ClippedLoss(PolicyLoss):
    """Base of the losses that clip the ratio between two absolute bounds.

    ``clip_low_threshold`` and ``clip_high_threshold`` bound the ratio itself, 0 <= low <= high: 0.8 and 1.2 are what
    other libraries call a clip of 0.2. A datum may carry either as a per-token array, which wins over the option.
    """

    reads: ClassVar[frozenset[str]] = frozenset({"weights", "clip_low_threshold", "clip_high_threshold"})
    clip_low_threshold: float
    clip_high_threshold: float

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.clip_low_threshold, self.clip_high_threshold
        non_negative("loss", clip_low_threshold=low, clip_high_threshold=high)
        if low > high:
            raise ConfigError(f"loss: clip_low_threshold={low} is above clip_high_threshold={high}; swap the two values")

    def bounds(self, batch: LossBatch) -> tuple[Tensor, Tensor]:
        """Lower and upper bound of each token's ratio, ``(N,)``.

        Raises:
            DataError: per-token bounds that cross.
        """
        low = batch.read("clip_low_threshold", default=self.clip_low_threshold)
        high = batch.read("clip_high_threshold", default=self.clip_high_threshold)
        if (crossed := low > high).any():
            index = int(batch.row[crossed][0])
            raise DataError(f"datum {index}: clip_low_threshold is above clip_high_threshold at some token; swap them")
        return low, high


@dataclass(frozen=True)
class PPO(ClippedLoss):
    """``-sum w * min(r A, clip(r, low, high) A)`` with ``r = exp(p - q)``.

    Per token: p is the current logprob, q the logprob that the token was sampled with, A the advantage, w the weight.

    Options:
        clip_low_threshold: lower bound of the ratio, 0 <= low <= high.
        clip_high_threshold: upper bound of the ratio.

    Metrics: ``loss/ratio_mean``, ``loss/clip_frac`` (ratios outside the bounds), ``kl/sampler_trainer_k1`` and ``_k3``.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7.
    """

    name: ClassVar[str] = "ppo"

    clip_low_threshold: float = 0.8
    clip_high_threshold: float = 1.2
    normalization: Normalization | None = Normalization.num_loss_tokens

    def terms(self, batch: LossBatch, tokens: RolloutArrays) -> tuple[Tensor, Metrics]:
        ratio = bounded_exp(self.log_ratio(batch, tokens))
        terms, outside = clipped_surrogate(ratio, tokens.advantages, *self.bounds(batch))
        return terms, {
            "loss/ratio_mean": weighted_mean(ratio, tokens.weights),
            "loss/clip_frac": weighted_mean(outside, tokens.weights),
        }

    def log_ratio(self, batch: LossBatch, tokens: RolloutArrays) -> Tensor:
        """The logarithm of the clipped ratio, ``(N,)``."""
        return tokens.logprobs - tokens.sampling_logprobs
