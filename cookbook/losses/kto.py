"""Kahneman-Tversky optimization: answers that are labelled one by one as desirable or undesirable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cookbook.errors import DataError
from cookbook.losses.base import Loss, LossBatch, Metrics, masked, non_negative, positive
from cookbook.losses.normalization import Normalization, Reduction
from cookbook.types import Datum


@dataclass(frozen=True)
class KTO(Loss):
    """The mean over answers of ``u (1 - S(beta (s - z)))`` for desirable and ``v (1 - S(beta (z - s)))`` for other answers.

    ``s = sum w (p - f)`` over an answer; p are current, f reference logprobs, w the weights, S is the logistic function, and
    u and v are ``desirable_weight`` and ``undesirable_weight``. z is an estimate of the divergence of the model from the
    reference: the mean of s over answers that belong to another prompt, or 0 if that is larger. It is a constant of the
    gradient.

    Reads ``weights`` (default ones; 0 outside of the answer), ``reference_logprobs``, and ``labels``: one number for all
    tokens of a datum, 1 for a desirable answer, -1 for an undesirable one, and 0 for an answer to another prompt, which only
    counts in z. Without such datums z is 0. The sum is divided by the number of labelled answers, whatever their weights.

    Options:
        beta: > 0; how strongly a label is believed, in inverse nats.
        desirable_weight, undesirable_weight: >= 0. If one kind of answers is rarer, give it more weight: the paper keeps
            the ratio of (weight times number), desirable to undesirable, between 1 and 4/3.

    Metrics: ``rewards/chosen`` and ``rewards/rejected``, the means of beta s over desirable and undesirable answers, and
    ``rewards/margin``, their difference, each if the batch has such answers; ``logprobs/chosen`` and ``logprobs/rejected``,
    the means of sum w p; ``kl/mismatched``, z in nats.

    Source: Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization", arXiv:2402.01306, eq. 7 and 8.
    """

    name: ClassVar[str] = "kto"
    reduction: ClassVar[Reduction] = Reduction.mean
    needs: ClassVar[frozenset[str]] = frozenset({"target_tokens", "labels"})
    needs_reference = True
    ignores_masked: ClassVar[bool] = True
    stop_gradient = "the divergence from the reference"

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    normalization: Normalization | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("loss", beta=self.beta)
        non_negative("loss", desirable_weight=self.desirable_weight, undesirable_weight=self.undesirable_weight)

    def __call__(self, data: Sequence[Datum], logprobs: list[Tensor]) -> tuple[Tensor, Metrics]:
        batch = LossBatch(data, logprobs)
        weights = batch.read("weights", default=1.0)
        labels = _labels(batch, weights)
        has_tokens = batch.sum_by_sequence((weights != 0).to(weights)) > 0
        gain = batch.sum_by_sequence(masked(batch.logprobs - batch.read("reference_logprobs"), weights))
        sums = batch.sum_by_sequence(masked(batch.logprobs.detach(), weights))
        others = gain.detach()[(labels == 0) & has_tokens]
        divergence = others.mean().clamp(min=0.0) if len(others) else gain.new_zeros(())
        # 1 - S(x) = S(-x), without cancellation.
        scaled = self.beta * (gain - divergence)
        losses = torch.where(
            labels > 0, self.desirable_weight * torch.sigmoid(-scaled), self.undesirable_weight * torch.sigmoid(scaled)
        )
        value = torch.where(labels != 0, losses, 0.0).sum() / max(int((labels != 0).sum()), 1)
        metrics = {"kl/mismatched": float(divergence)}
        for side, chosen in (("chosen", labels > 0), ("rejected", labels < 0)):
            if chosen.any():
                metrics[f"rewards/{side}"] = float(self.beta * gain.detach()[chosen].mean())
                metrics[f"logprobs/{side}"] = float(sums[chosen].mean())
        if {"rewards/chosen", "rewards/rejected"} <= metrics.keys():
            metrics["rewards/margin"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        return value, metrics


def _labels(batch: LossBatch, weights: Tensor) -> Tensor:
    """Return the label of every sequence, ``(B,)``: that of its tokens of weight != 0, and 0 without such tokens.

    Raises:
        DataError: a label is not 1, -1 or 0, or the tokens of a datum have several.
    """
    of_tokens = batch.read("labels")
    # The mean of equal labels may be off by a rounding error.
    labels = batch.mean_by_sequence(of_tokens, (weights != 0).to(weights)).round()
    wrong = ((of_tokens != batch.spread(labels)) | ((of_tokens != 0) & (of_tokens.abs() != 1))) & (weights != 0)
    if wrong.any():
        place = int(torch.nonzero(wrong)[0])
        raise DataError(
            f"datum {int(batch.row[place])}: labels holds {float(of_tokens[place]):g}; give all tokens of a datum the same "
            "label: 1 (desirable), -1 (undesirable) or 0 (an answer to another prompt)"
        )
    return labels
