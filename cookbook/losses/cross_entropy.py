"""Token cross-entropy: supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cookbook.losses.supervised import SupervisedLoss
from cookbook.normalization import Normalization


@dataclass(frozen=True)
class CrossEntropy(SupervisedLoss):
    """``-sum w * logp`` over every token of every datum; see :class:`~cookbook.losses.supervised.SupervisedLoss`."""

    name: ClassVar[str] = "cross_entropy"

    normalization: Normalization | None = None

    def terms(self, logprobs: Tensor) -> Tensor:
        return -logprobs
