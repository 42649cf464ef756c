"""Batches for the loss tests, and what a loss makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cookbook.losses import Loss
from cookbook.types import Datum, ModelInput


def datum(length: int, **inputs: Any) -> Datum:
    """A datum of ``length`` tokens with targets and whatever else is given."""
    return Datum(ModelInput.from_ints(range(length)), {"target_tokens": np.arange(length), **inputs})


def evaluate(
    loss: Loss, data: Sequence[Datum], logprobs: Sequence[Any], dtype: torch.dtype = torch.float64
) -> tuple[float, list[list[float]], dict[str, float]]:
    """The loss's value, its gradient per datum, and its metrics."""
    leaves = [torch.as_tensor(row, dtype=dtype).clone().requires_grad_() for row in logprobs]
    value, metrics = loss(data, leaves)
    value.backward()
    return float(value.detach()), [leaf.grad.tolist() for leaf in leaves], dict(metrics)


def random_batch(
    rng: np.random.Generator, sequences: int = 4, binary_weights: bool = False
) -> tuple[list[Datum], list[Any]]:
    """Datums that carry what any built-in loss reads, and float64 logprobs for them.

    Advantages are one number per sequence; every sequence starts with a token of weight 0 and has one of weight > 0.
    """
    data, logprobs = [], []
    for _ in range(sequences):
        length = int(rng.integers(3, 7))
        weights = rng.integers(0, 2, length).astype(float) if binary_weights else rng.uniform(0.2, 1.5, length)
        weights[0], weights[1] = 0.0, 1.0
        now = -rng.exponential(1.0, length) - 0.01
        near = {f"{name}_logprobs": now + rng.normal(0, 0.3, length) for name in ("sampling", "old", "reference")}
        advantages = np.full(length, rng.normal())
        data.append(datum(length, weights=weights, advantages=advantages, **near))
        logprobs.append(now)
    return data, logprobs
