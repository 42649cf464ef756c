"""Clipped importance-sampling policy optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cookbook.losses.base import LossBatch, Metrics, weighted_mean
from cookbook.losses.normalization import Normalization
from cookbook.losses.policy import RolloutArrays, bounded_exp
from cookbook.losses.ppo import ClippedLoss


@dataclass(frozen=True)
class CISPO(ClippedLoss):
    """``-sum w * stop_gradient(clip(r, low, high)) * p * A`` with ``r = exp(p - q)``.

    Per token: p is the current logprob, q the logprob that the token was sampled with, A the advantage, w the weight.

    The clip bounds the gradient of a token and never sets it to 0, unlike PPO's. Only the gradient of this loss has a
    meaning; its value does not estimate the return.

    Options:
        clip_low_threshold: lower bound of the ratio, 0 <= low <= high. 0: none.
        clip_high_threshold: upper bound of the ratio. 4 as in Tinker's tutorial; the paper only bounds from above, too.

    Metrics: ``loss/ratio_mean``, ``loss/clip_frac`` (ratios outside the bounds), ``kl/sampler_trainer_k1`` and ``_k3``.

    Source: MiniMax 2025, "MiniMax-M1", arXiv:2506.13585.
    """

    name: ClassVar[str] = "cispo"
    stop_gradient = "the clipped ratio"

    clip_low_threshold: float = 0.0
    clip_high_threshold: float = 4.0
    normalization: Normalization | None = Normalization.num_loss_tokens

    def terms(self, batch: LossBatch, tokens: RolloutArrays) -> tuple[Tensor, Metrics]:
        low, high = self.bounds(batch)
        ratio = bounded_exp(tokens.logprobs - tokens.sampling_logprobs).detach()
        return -torch.clamp(ratio, low, high) * tokens.logprobs * tokens.advantages, {
            "loss/ratio_mean": weighted_mean(ratio, tokens.weights),
            "loss/clip_frac": weighted_mean((ratio < low) | (ratio > high), tokens.weights),
        }
