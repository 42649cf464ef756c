"""A mean over each sequence's tokens, added over the sequences, and declared the sum that num_loss_tokens is to divide."""

from dataclasses import dataclass
from typing import ClassVar

from cookbook.losses.base import Loss, LossBatch, Scope
from cookbook.losses.normalization import Normalization, Reduction


@dataclass(frozen=True)
class ByLength(Loss):
    name: ClassVar[str] = "by_length"
    reduction: ClassVar[Reduction] = Reduction.token_sum
    scope = Scope.sequence
    normalization: Normalization | None = Normalization.num_loss_tokens

    def __call__(self, data, logprobs):
        batch = LossBatch(data, logprobs)
        return -batch.mean_by_sequence(batch.logprobs, batch.read("weights")).sum(), {}
