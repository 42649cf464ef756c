"""Shared parts of the policy-gradient losses: reading of rollouts, and ratios of probabilities that stay finite.

Notation throughout: ``p`` current logprob, ``q`` logprob the token was sampled with, ``o`` logprob under the policy the
update is measured from, ``f`` reference logprob, ``A`` advantage, ``w`` weight. All natural logarithms, all per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from cookbook.losses.base import Loss, LossBatch, Metrics, Scope, kept, masked, weighted_mean
from cookbook.losses.normalization import Reduction
from cookbook.types import Datum

LOG_RATIO_LIMIT = 20.0
"""Above this log-ratio the exponential continues as its tangent."""

_SLOPE = math.exp(LOG_RATIO_LIMIT)
_EDGE_ULPS = 8
"""Number of rounding errors by which a ratio may exceed a clip bound and still count as inside."""


@dataclass(frozen=True)
class RolloutArrays:
    """Sampled tokens laid flat, ``(N,)`` each; all but the weights are an exact 0 where the weight is 0.

    Masked before use, so that the values at masked tokens, infinities included, influence neither value nor slope.
    """

    # With its graph.
    logprobs: Tensor
    sampling_logprobs: Tensor
    advantages: Tensor
    weights: Tensor


SHARED_RATIO = "how a sequence's ratio is shared among its tokens (GSPO-token)"
"""Term that :func:`sequence_log_ratio` holds constant: exact for one advantage per sequence and weights of 0 and 1."""


@dataclass(frozen=True)
class PolicyLoss(Loss):
    """Base of the losses that are a sum of token terms over sampled tokens. Children give the :meth:`terms`.

    Reads ``sampling_logprobs`` (or ``logprobs``, Tinker's name), ``advantages`` and ``weights`` (default ones).
    ``sampled_only`` decides what ones means: True leaves out tokens with neither a sampling logprob nor an advantage,
    which is how Tinker's callers mark the prompt; False takes every token.

    ``mask_truncated``: completions that were cut off are not trained, as a run leaves their datums out. Their rewards still
    count in the mean and deviation of their group.
    """

    reduction: ClassVar[Reduction] = Reduction.token_sum
    needs: ClassVar[frozenset[str]] = frozenset({"target_tokens", "sampling_logprobs", "advantages"})
    sampled_only: ClassVar[bool] = True
    ignores_masked: ClassVar[bool] = True
    mask_truncated: bool = field(default=False, kw_only=True)

    @property
    def scope(self) -> Scope:
        return Scope.token

    def terms(self, batch: LossBatch, tokens: RolloutArrays) -> tuple[Tensor, Metrics]:
        """Return the term of each token before its weight, ``(N,)``, and metrics over the tokens of weight != 0."""
        raise NotImplementedError

    def __call__(
        self, data: Sequence[Datum], logprobs: list[Tensor], entropies: list[Tensor] | None = None
    ) -> tuple[Tensor, Metrics]:
        batch = LossBatch(data, logprobs, entropies)
        tokens = read_rollouts(batch, sampled_only=self.sampled_only)
        terms, metrics = self.terms(batch, tokens)
        drift = (tokens.logprobs - tokens.sampling_logprobs).detach()
        metrics |= {
            "kl/sampler_trainer_k1": -weighted_mean(drift, tokens.weights),
            "kl/sampler_trainer_k3": weighted_mean(k3(drift), tokens.weights),
        }
        return masked(terms, tokens.weights).sum(), metrics


def read_rollouts(batch: LossBatch, *, sampled_only: bool) -> RolloutArrays:
    """The fields of :class:`PolicyLoss` from a batch."""
    sampling, advantages = batch.read("sampling_logprobs"), batch.read("advantages")
    weights = batch.read("weights", default=1.0)
    if sampled_only and not batch.has("weights"):
        weights = ((sampling != 0) | (advantages != 0)).to(weights)
    return RolloutArrays(kept(batch.logprobs, weights), kept(sampling, weights), kept(advantages, weights), weights)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """``exp(x)`` up to x = 20, its tangent above: finite in float32, and the slope never vanishes.

    A plain clamp would remove the gradient of the tokens that need it most: those that wrongly became e^20 times
    more likely.
    """
    return log_ratio.clamp(max=LOG_RATIO_LIMIT).exp() + torch.relu(log_ratio - LOG_RATIO_LIMIT) * _SLOPE


def k3(log_ratio: Tensor) -> Tensor:
    """``exp(x) - x - 1`` >= 0: with ``x = log b - log a`` and tokens drawn from ``a``, unbiased for KL(a || b).

    Through ``expm1``: near 0 the terms cancel and float32 would return noise, negative at times. Tangent above x = 20,
    as :func:`bounded_exp`.

    Source: Schulman 2020, "Approximating KL Divergence"; Shao et al. 2024, arXiv:2402.03300, eq. 4.
    """
    tangent = torch.relu(log_ratio - LOG_RATIO_LIMIT) * _SLOPE
    return log_ratio.clamp(max=LOG_RATIO_LIMIT).expm1() + tangent - log_ratio


def sequence_log_ratio(batch: LossBatch, log_ratio: Tensor, weights: Tensor) -> Tensor:
    """Every token gets its sequence's mean log-ratio over the tokens of weight != 0, and its own slope, ``(N,)``.

    The value is the sequence's, the slope with respect to each token's own logprob is 1 (straight-through). Summed over
    a sequence of one advantage this is the exact gradient of the sequence objective; with per-token advantages it is
    GSPO-token.

    Source: Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv:2507.18071 (sequence ratio; GSPO-token).
    """
    mean = batch.mean_by_sequence(log_ratio.detach(), (weights != 0).to(log_ratio))
    return batch.spread(mean) + (log_ratio - log_ratio.detach())


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float | Tensor, high: float | Tensor, ceiling: float | None = None
) -> tuple[Tensor, Tensor]:
    """``max(-r A, -clip(r, low, high) A)``; with a ``ceiling`` c, at most ``c |A|`` where A < 0 (dual clip).

    A ratio on a bound, to within rounding, is inside and keeps its gradient: otherwise the last bit of a logprob would
    decide whether a token is trained.

    Returns:
        The terms ``(N,)``, and which ratios lie outside [low, high], for either sign of A.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; dual clip: Ye et al. 2020, arXiv:1912.09729.
    """
    low, high = (torch.as_tensor(bound, dtype=ratio.dtype, device=ratio.device) for bound in (low, high))
    slack = _EDGE_ULPS * torch.finfo(ratio.dtype).eps
    above, below = ratio > high * (1 + slack), ratio < low * (1 - slack)
    bound = torch.where(above, high, low)
    clipped = (above & (advantages > 0)) | (below & (advantages < 0))
    terms = -torch.where(clipped, bound, ratio) * advantages
    if ceiling is not None:
        capped = (ratio > ceiling * (1 + slack)) & (advantages < 0)
        terms = torch.where(capped, -ceiling * advantages, terms)
    return terms, above | below


def importance_weights(log_ratio: Tensor, cap: float | None, threshold: float | None) -> Tensor:
    """``min(exp(x), cap)``, constants to the gradient; 0 where ``exp(x)`` leaves [1 / threshold, threshold]. None: off.

    Source: truncated importance sampling: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy
    RL Training"; the threshold: IcePop, Ling Team 2025, arXiv:2510.18855.
    """
    log_ratio = log_ratio.detach()
    weights = bounded_exp(log_ratio)
    if cap is not None:
        weights = weights.clamp(max=cap)
    if threshold is not None:
        weights = torch.where(log_ratio.abs() <= math.log(threshold), weights, 0.0)
    return weights
