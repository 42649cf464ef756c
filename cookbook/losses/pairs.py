"""Batches of the preference losses: datums in pairs, chosen before rejected."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cookbook.errors import DataError
from cookbook.losses.base import LossBatch, Metrics, masked
from cookbook.types import Datum


class PairBatch(LossBatch):
    """A batch of ``P`` pairs: datums chosen, rejected, chosen, rejected, ... Responses are the tokens of ``weights``.

    Only ``weights`` mark a response; answers with equal first tokens are trained from their first token on.

    Raises:
        DataError: an odd number of datums, or a response none of whose tokens has a weight.
    """

    def __init__(self, data: Sequence[Datum], logprobs: Sequence[Tensor]) -> None:
        super().__init__(data, logprobs)
        if len(data) % 2:
            raise DataError(
                f"datum {len(data) - 1}: has no partner, a preference loss got {len(data)} datums; pass whole pairs: chosen, "
                "rejected, chosen, rejected, ..."
            )
        self.weights = self.read("weights", default=1.0)
        totals = self.sum_by_sequence(self.weights)
        if not (totals > 0).all():
            index = int(torch.nonzero(totals <= 0)[0])
            side = "rejected" if index % 2 else "chosen"
            raise DataError(
                f"datum {index}: the weights of the {side} response sum to {float(totals[index]):g}, "
                "so it cannot be compared; drop the pair or allow longer sequences"
            )

    def sums(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted sum over each response's tokens: chosen ``(P,)``, rejected ``(P,)``."""
        return split(self.sum_by_sequence(masked(values, self.weights)))

    def means(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted mean over each response's tokens: chosen ``(P,)``, rejected ``(P,)``."""
        return split(self.mean_by_sequence(values, self.weights))


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """``(2 P,)`` -> chosen ``(P,)``, rejected ``(P,)``."""
    return values[0::2], values[1::2]


def reward_metrics(chosen: Tensor, rejected: Tensor) -> Metrics:
    """Means over pairs of ``rewards/chosen``, ``rewards/rejected``, their difference ``rewards/margin``, and how often
    it is above 0, ``rewards/accuracy``."""
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "rewards/chosen": float(chosen.mean()),
        "rewards/rejected": float(rejected.mean()),
        "rewards/margin": float((chosen - rejected).mean()),
        "rewards/accuracy": float((chosen > rejected).to(chosen.dtype).mean()),
    }


def logprob_metrics(chosen: Tensor, rejected: Tensor) -> Metrics:
    """Means over pairs of ``logprobs/chosen`` and ``logprobs/rejected``."""
    return {"logprobs/chosen": float(chosen.detach().mean()), "logprobs/rejected": float(rejected.detach().mean())}
