"""Token cross-entropy, and the base of all losses on given answers: a mean over the step's tokens, and text metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from cookbook.losses.base import Loss, LossBatch, Metrics, Scope, kept, weights_to_mean
from cookbook.losses.normalization import Normalization, Reduction
from cookbook.types import Datum

NUM_BYTES = "num_bytes"
"""A scalar of a datum: UTF-8 bytes of the text its trained tokens spell, special tokens left out."""


class SupervisedLoss(Loss):
    """Base of the losses that are a weighted sum of token terms over given targets. Children give the :meth:`terms`.

    Reads ``target_tokens`` and ``weights`` (default ones; any sign), both ``(T,)`` or, with K alternatives per position,
    ``(T, K)``: soft targets, as in top-K distillation.

    A sum alone is what Tinker's ``cross_entropy`` returns. :meth:`prepare` scales the weights of a whole optimizer step
    to a sum of 1, which makes it the weighted mean over the step's tokens. The division happens in the data, before the
    batch is split, so it cannot depend on the split.

    Metrics: ``loss/nll``, the weighted mean of ``-logp`` in nats per token; ``loss/perplexity``, its exponential;
    ``loss/bits_per_byte``, where every datum has ``num_bytes``: the information in the trained tokens, each counted once
    regardless of its weight, over the bytes of their text. It compares models of different tokenizers.
    """

    reduction: ClassVar[Reduction] = Reduction.mean
    several_targets: ClassVar[bool] = True
    prepares: ClassVar[bool] = True
    ignores_masked: ClassVar[bool] = True
    normalization: Normalization | None = None

    @property
    def scope(self) -> Scope:
        return Scope.token

    def terms(self, logprobs: Tensor) -> Tensor:
        """Return the term of each token before its weight, ``(N,)``; ``logprobs`` are 0 where the weight is 0."""
        raise NotImplementedError

    def prepare(self, data: Sequence[Datum]) -> Sequence[Datum]:
        return weights_to_mean(data)

    def __call__(self, data: Sequence[Datum], logprobs: list[Tensor]) -> tuple[Tensor, Metrics]:
        batch = LossBatch(data, logprobs, several_targets=True)
        weights = batch.read("weights", default=1.0)
        trained = kept(batch.logprobs, weights)
        nll = _per_weight(-(trained * weights).sum(), weights)
        metrics = {"loss/nll": nll, "loss/perplexity": math.exp(min(nll, 700.0))} | _bits_per_byte(data, trained)
        return (self.terms(trained) * weights).sum(), metrics


@dataclass(frozen=True)
class CrossEntropy(SupervisedLoss):
    """``-sum w * logp`` over every token of every datum; ``w`` sums to 1 over a step, which makes the loss a mean.

    See :class:`SupervisedLoss` for the weights and the metrics.
    """

    name: ClassVar[str] = "cross_entropy"

    normalization: Normalization | None = None

    def terms(self, logprobs: Tensor) -> Tensor:
        return -logprobs


def _per_weight(total: Tensor, weights: Tensor) -> float:
    """A weighted sum as a weighted mean; 0.0 when the weights sum to 0."""
    weight = float(weights.sum())
    return float(total.detach()) / weight if weight else 0.0


def _bits_per_byte(data: Sequence[Datum], trained: Tensor) -> Metrics:
    if not all(NUM_BYTES in datum.loss_fn_inputs for datum in data):
        return {}
    num_bytes = float(np.sum([datum.loss_fn_inputs[NUM_BYTES].array for datum in data]))
    nats = -float(trained.detach().double().sum())
    return {"loss/bits_per_byte": nats / math.log(2) / num_bytes} if num_bytes else {}
