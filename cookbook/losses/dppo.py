"""Divergence proximal policy optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from cookbook.losses.base import LossBatch, Metrics, choice, positive, weighted_mean
from cookbook.losses.normalization import Normalization
from cookbook.losses.policy import PolicyLoss, RolloutArrays, bounded_exp

Divergence = Literal["tv", "kl"]


@dataclass(frozen=True)
class DPPO(PolicyLoss):
    """``-sum w * m r A`` with ``r = exp(p - q)``; m is 0 for tokens that have left the trust region, and 1 for the others.

    Per token: p is the current logprob, q the logprob that the token was sampled with, A the advantage, w the weight. With the
    probabilities a = exp(q) and b = exp(p), the divergence D compares "this token" with "any other token":

    ==========  ==========================================================
    divergence  D
    ==========  ==========================================================
    tv          ``|a - b|``, the total variation
    kl          ``a log(a / b) + (1 - a) log((1 - a) / (1 - b))``
    ==========  ==========================================================

    m is 0 if A > 0, b > a and D > ``threshold_high``, or if A <= 0, b < a and D > ``threshold_low``. PPO bounds the ratio
    instead, which stops unlikely tokens after tiny changes of probability, and lets likely tokens change a lot. Tokens that
    move back towards the sampler are always trained.

    Options:
        divergence: see above; of the sampled token alone, as the paper's binary approximation.
        threshold_low: largest divergence of tokens with A <= 0, > 0.
        threshold_high: largest divergence of tokens with A > 0, > 0. 0.2 suits ``tv``, 0.05 ``kl``.

    Metrics: ``loss/ratio_mean``, ``loss/clip_frac`` (tokens with m = 0), ``loss/divergence_mean`` (D),
    ``kl/sampler_trainer_k1``, ``_k3``.

    Source: Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement Learning", arXiv:2602.04879, the mask of DPPO
    and its binary approximation.
    """

    name: ClassVar[str] = "dppo"

    divergence: Divergence = "tv"
    threshold_low: float = 0.2
    threshold_high: float = 0.2
    normalization: Normalization | None = Normalization.num_loss_tokens

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("loss", "divergence", self.divergence, get_args(Divergence))
        positive("loss", threshold_low=self.threshold_low, threshold_high=self.threshold_high)

    def terms(self, batch: LossBatch, tokens: RolloutArrays) -> tuple[Tensor, Metrics]:
        log_ratio = tokens.logprobs - tokens.sampling_logprobs
        ratio = bounded_exp(log_ratio)
        divergence = self.divergences(tokens.logprobs.detach(), tokens.sampling_logprobs)
        drift = log_ratio.detach()
        above = (tokens.advantages > 0) & (drift > 0) & (divergence > self.threshold_high)
        below = (tokens.advantages <= 0) & (drift < 0) & (divergence > self.threshold_low)
        outside = above | below
        return -torch.where(outside, 0.0, ratio) * tokens.advantages, {
            "loss/ratio_mean": weighted_mean(ratio, tokens.weights),
            "loss/clip_frac": weighted_mean(outside, tokens.weights),
            "loss/divergence_mean": weighted_mean(divergence, tokens.weights),
        }

    def divergences(self, logprobs: Tensor, sampling_logprobs: Tensor) -> Tensor:
        """The divergence of each token, ``(N,)``."""
        now, before = logprobs.exp(), sampling_logprobs.exp()
        if self.divergence == "tv":
            return (now - before).abs()
        # 1 - exp(x) without cancellation. A probability of 1 leaves nothing for the other tokens: at least one rounding error.
        least = torch.finfo(logprobs.dtype).tiny
        rest_now, rest_before = ((-row.expm1()).clamp(min=least) for row in (logprobs, sampling_logprobs))
        return before * (sampling_logprobs - logprobs) + rest_before * (rest_before.log() - rest_now.log())
