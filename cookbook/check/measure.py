"""What a loss makes of a batch: its value, its gradient, and the slope of the value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cookbook.types import Array, Datum

LossFunction = Callable[[Sequence[Datum], list[Tensor]], tuple[Tensor, Mapping[str, Any]]]


class Outcome(NamedTuple):
    """``gradients`` has a row per datum, ``(T,)`` or ``(T, K)``; zeros where the value does not depend on it."""

    value: float
    gradients: list[Any]
    metrics: Mapping[str, Any]


def evaluate(loss: LossFunction, data: Sequence[Datum], logprobs: Sequence[Any], dtype: torch.dtype = torch.float64) -> Outcome:
    """The loss's value, its gradient, and its metrics, computed from logprobs of ``dtype``."""
    leaves = [torch.as_tensor(row, dtype=dtype).clone().requires_grad_() for row in logprobs]
    value, metrics = loss(data, leaves)
    found = torch.autograd.grad(value, leaves, allow_unused=True) if value.requires_grad else [None] * len(leaves)
    gradients = [torch.zeros_like(leaf) if row is None else row for leaf, row in zip(leaves, found, strict=True)]
    return Outcome(float(value.detach()), [row.tolist() for row in gradients], dict(metrics))


def value_at(loss: LossFunction, data: Sequence[Datum], logprobs: Sequence[Any]) -> float:
    """The value alone."""
    with torch.no_grad():
        return float(loss(data, [torch.as_tensor(row, dtype=torch.float64).clone() for row in logprobs])[0])


def slope(
    loss: LossFunction, data: Sequence[Datum], logprobs: Sequence[Array], direction: Sequence[Array], step: float = 1e-6
) -> float:
    """How fast the value changes along ``direction``, by a central difference."""
    above, below = (
        value_at(loss, data, [row + sign * step * way for row, way in zip(logprobs, direction, strict=True)])
        for sign in (1, -1)
    )
    return (above - below) / (2 * step)


def along(gradients: Sequence[Any], direction: Sequence[Array]) -> float:
    """The slope that the gradient promises along ``direction``."""
    return sum(float(np.dot(row, way)) for row, way in zip(gradients, direction, strict=True))


def flat(gradients: Sequence[Any]) -> Array:
    """All gradients in one array, ``(N,)``."""
    return np.concatenate([np.asarray(row, dtype=np.float64).reshape(-1) for row in gradients])
