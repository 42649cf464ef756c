"""Batches of the preference losses: datums in pairs, chosen before rejected."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cookbook.errors import DataError
from cookbook.losses.base import LossBatch, Metrics, masked
from cookbook.types import Datum

RESOLUTION = 16 * torch.finfo(torch.float32).eps
"""Rounding noise of a logprob x, relative to 1 + |x|: 16 units of single precision, about 2e-6.

Reference logprobs are stored in single precision even if the model computes in float64, and a forward pass rounds differently
with other datums in its batch. At the start of DPO the policy is the reference, and its margins are noise of either sign.
"""


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

    def resolution(self, reduce: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        """The largest difference between chosen and rejected that may be rounding noise, ``(P,)``.

        Args:
            reduce: :meth:`sums` or :meth:`means`, whichever the two responses are compared by.
        """
        chosen, rejected = reduce(1 + self.logprobs.detach().abs())
        return RESOLUTION * (chosen + rejected)


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """``(2 P,)`` -> chosen ``(P,)``, rejected ``(P,)``."""
    return values[0::2], values[1::2]


def reward_metrics(chosen: Tensor, rejected: Tensor, resolution: Tensor) -> Metrics:
    """Means over pairs of ``rewards/chosen``, ``rewards/rejected``, their difference ``rewards/margin``, and
    ``rewards/accuracy``, the share of pairs in the right order.

    Rewards and ``resolution`` (:meth:`PairBatch.resolution`) have the shape ``(P,)`` and the same unit.
    """
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "rewards/chosen": float(chosen.mean()),
        "rewards/rejected": float(rejected.mean()),
        "rewards/margin": float((chosen - rejected).mean()),
        "rewards/accuracy": preference_accuracy(chosen - rejected, resolution),
    }


def preference_accuracy(margin: Tensor, resolution: Tensor) -> float:
    """Return the share of pairs with a positive margin. A pair whose margin is at most its resolution counts as half."""
    # heaviside is 0 for a negative margin, 1 for a positive margin, and 0.5 for a tie.
    margin = torch.where(margin.detach().abs() <= resolution, 0.0, margin.detach())
    return float(torch.heaviside(margin, margin.new_tensor(0.5)).mean())


def logprob_metrics(chosen: Tensor, rejected: Tensor) -> Metrics:
    """Means over pairs of ``logprobs/chosen`` and ``logprobs/rejected``."""
    return {"logprobs/chosen": float(chosen.detach().mean()), "logprobs/rejected": float(rejected.detach().mean())}
