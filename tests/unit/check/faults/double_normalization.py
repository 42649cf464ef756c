"""Importance sampling as a mean over the tokens, declared the sum that num_loss_tokens is to divide."""

from dataclasses import dataclass
from typing import ClassVar

from cookbook.losses.importance_sampling import ImportanceSampling
from cookbook.losses.normalization import Normalization


@dataclass(frozen=True)
class Averaged(ImportanceSampling):
    name: ClassVar[str] = "averaged"
    normalization: Normalization | None = Normalization.num_loss_tokens

    def __call__(self, data, logprobs):
        loss, metrics = super().__call__(data, logprobs)
        return loss / sum(datum.loss_fn_inputs["weights"].array.sum() for datum in data), metrics
