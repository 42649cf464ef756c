"""Odds-ratio preference optimization."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from cookbook.losses.base import Loss, Metrics, Scope, non_negative
from cookbook.losses.normalization import Normalization, Reduction
from cookbook.losses.pairs import PairBatch, logprob_metrics, preference_accuracy, reward_metrics
from cookbook.types import Datum

LARGEST_LOGPROB = -1e-6
"""Above this mean logprob the log-odds, infinite at 0, continue as their tangent."""


@dataclass(frozen=True)
class ORPO(Loss):
    """The mean over pairs of ``-a_chosen - odds_weight * log S(log_odds(a_chosen) - log_odds(a_rejected))``.

    a is the weighted mean logprob over a response, ``log_odds(a) = a - log(1 - e^a)``, S the logistic function:
    fine-tuning on the chosen response and a push of its odds above the rejected one's, without a reference. Datums come
    in pairs, chosen before rejected. Reads ``weights`` (default ones; 0 outside the response).

    Options:
        odds_weight: weight of the odds ratio term, >= 0. The paper calls it lambda and uses 0.1 to 0.25, TRL calls it
            beta.

    Metrics, means over pairs: ``loss/nll``, -a_chosen; ``loss/odds_ratio``, the second term before its weight;
    ``loss/log_odds_ratio``; ``rewards/chosen`` and ``rewards/rejected``, odds_weight a; ``rewards/margin``, their
    difference; ``rewards/accuracy``, the share of pairs with a_chosen above a_rejected; ``logprobs/chosen`` and
    ``logprobs/rejected``, a. A pair is a tie, and counts as half, if ``|a_chosen - a_rejected|`` is at most 2e-6 times
    the sum of the mean ``1 + |p|`` of both responses: the rounding noise of single precision.

    Source: Hong et al. 2024, "ORPO: Monolithic Preference Optimization without Reference Model", arXiv:2403.07691, eq.
    6, 7.
    """

    name: ClassVar[str] = "orpo"
    reduction: ClassVar[Reduction] = Reduction.mean
    scope = Scope.pair
    ignores_masked: ClassVar[bool] = True

    odds_weight: float = 1.0
    normalization: Normalization | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        non_negative("loss", odds_weight=self.odds_weight)

    def __call__(self, data: Sequence[Datum], logprobs: list[Tensor]) -> tuple[Tensor, Metrics]:
        batch = PairBatch(data, logprobs)
        chosen, rejected = batch.means(batch.logprobs)
        log_odds_ratio = log_odds(chosen) - log_odds(rejected)
        odds_term = -logsigmoid(log_odds_ratio)
        resolution = batch.resolution(batch.means)
        metrics = {
            "loss/nll": -float(chosen.detach().mean()),
            "loss/odds_ratio": float(odds_term.detach().mean()),
            "loss/log_odds_ratio": float(log_odds_ratio.detach().mean()),
            **reward_metrics(self.odds_weight * chosen, self.odds_weight * rejected, self.odds_weight * resolution),
            **logprob_metrics(chosen, rejected),
            # By the logprobs: with odds_weight=0 all rewards are 0.
            "rewards/accuracy": preference_accuracy(chosen - rejected, resolution),
        }
        return (self.odds_weight * odds_term - chosen).mean(), metrics


def log_odds(logprob: Tensor) -> Tensor:
    """``log(p / (1 - p))`` from ``log p <= 0``; the tangent at :data:`LARGEST_LOGPROB` above it.

    A clamp would give a rejected answer of probability 1 no gradient, so its probability would not fall.
    """
    inside = logprob.clamp(max=LARGEST_LOGPROB)
    return inside - log1mexp(inside) + torch.relu(logprob - LARGEST_LOGPROB) / -math.expm1(LARGEST_LOGPROB)


def log1mexp(value: Tensor) -> Tensor:
    """``log(1 - e^x)`` for x < 0, accurate at both ends: near 0 through expm1, far from it through log1p.

    Each branch gets only inputs in its domain, because a gradient of 0 times infinity would be NaN.

    Source: Maechler 2012, "Accurately Computing log(1 - exp(-|a|))".
    """
    switch = -math.log(2)
    near = value > switch
    small = torch.log(-torch.expm1(torch.where(near, value, switch)))
    large = torch.log1p(-torch.exp(torch.where(near, switch, value)))
    return torch.where(near, small, large)
