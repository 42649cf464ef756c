"""Dynamic fine-tuning: cross-entropy that down-weights tokens the model finds unlikely."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cookbook.losses.cross_entropy import SupervisedLoss
from cookbook.losses.normalization import Normalization


@dataclass(frozen=True)
class DFT(SupervisedLoss):
    """``-sum w * stop_gradient(exp(logp)) * logp``: each token's NLL times the probability the model gives it now.

    The gradient of plain cross-entropy is that of a policy gradient whose reward is ``1 / p``, which explodes on
    unlikely tokens; the factor ``p`` cancels it.

    Source: Wu et al. 2025, "On the Generalization of SFT: A Reinforcement Learning Perspective with Reward
    Rectification", arXiv:2508.05629.
    """

    name: ClassVar[str] = "dft"
    stop_gradient = "the factor exp(logp)"

    normalization: Normalization | None = None

    def terms(self, logprobs: Tensor) -> Tensor:
        return -logprobs * logprobs.detach().exp()
