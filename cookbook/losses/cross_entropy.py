"""Token cross-entropy: supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cookbook.losses.base import Batch, Loss, Metrics, Scope, masked, weights_to_mean
from cookbook.normalization import Normalization, Reduction
from cookbook.types import Datum


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """``-sum w * logp`` over every token of every datum.

    Reads ``target_tokens`` and ``weights`` (default ones; any sign), both ``(T,)`` or, with K alternatives per
    position, ``(T, K)``: soft targets, as in top-K distillation.

    A sum alone is what Tinker's ``cross_entropy`` returns. :meth:`prepare` scales the weights of a whole optimizer step
    to a sum of 1, which makes it the weighted mean over the step's tokens. The division happens in the data, before the
    batch is split, so it cannot depend on the split.

    Metrics: ``loss/nll``, the weighted mean of ``-logp`` in nats per token.
    """

    name: ClassVar[str] = "cross_entropy"
    reduction: ClassVar[Reduction] = Reduction.mean
    scope = Scope.token
    several_targets: ClassVar[bool] = True
    prepares: ClassVar[bool] = True

    normalization: Normalization | None = None

    def prepare(self, data: Sequence[Datum]) -> Sequence[Datum]:
        return weights_to_mean(data)

    def __call__(self, data: Sequence[Datum], logprobs: list[Tensor]) -> tuple[Tensor, Metrics]:
        batch = Batch(data, logprobs, several_targets=True)
        weights = batch.read("weights", default=1.0)
        loss = -masked(batch.logprobs, weights).sum()
        return loss, {"loss/nll": per_weight(loss, weights)}


def per_weight(total: Tensor, weights: Tensor) -> float:
    """A weighted sum as a weighted mean; 0.0 when the weights sum to 0."""
    weight = float(weights.sum())
    return float(total.detach()) / weight if weight else 0.0
