"""Dynamic fine-tuning: cross-entropy that lets go of the tokens the model finds unlikely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cookbook.losses.base import Batch, Loss, Metrics, Scope, kept, weights_to_mean
from cookbook.losses.cross_entropy import per_weight
from cookbook.normalization import Normalization, Reduction
from cookbook.types import Datum


@dataclass(frozen=True)
class DFT(Loss):
    """``-sum w * stop_gradient(exp(logp)) * logp``: each token's NLL times the probability the model gives it now.

    The gradient of plain cross-entropy is that of a policy gradient whose reward is ``1 / p``, which explodes on
    unlikely tokens; the factor ``p`` cancels it. Reads and prepares as
    :class:`~cookbook.losses.cross_entropy.CrossEntropy`.

    Metrics: ``loss/nll``, the weighted mean of ``-logp`` in nats per token, comparable with cross-entropy's.

    Source: Wu et al. 2025, "On the Generalization of SFT: A Reinforcement Learning Perspective with Reward
    Rectification", arXiv:2508.05629.
    """

    name: ClassVar[str] = "dft"
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
        nll = -kept(batch.logprobs, weights) * weights
        loss = (nll * kept(batch.logprobs, weights).detach().exp()).sum()
        return loss, {"loss/nll": per_weight(nll.sum(), weights)}
