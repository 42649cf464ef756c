"""The first half of the gradient path: from log-probabilities to dL/dlogprob, for any loss, with every fault named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cookbook.errors import BackendError
from cookbook.losses.base import Loss
from cookbook.types import Datum

LossFunction = Callable[[Sequence[Datum], list[Tensor]], tuple[Tensor, Mapping[str, float]]]


def loss_gradient(
    loss: LossFunction, data: Sequence[Datum], logprobs: Mapping[int, Tensor]
) -> tuple[Tensor, Mapping[str, float], dict[int, Tensor]]:
    """The loss's value, its metrics, and dL/dlogprob per datum. The keys of ``logprobs`` are the datums' places in the call.

    Raises:
        BackendError: the value is not a finite scalar; a gradient is missing, not finite, or (for a function without a
            declared reduction) zero everywhere.
    """
    flat = torch.cat([row.reshape(-1) for row in logprobs.values()]).requires_grad_()

    def rows(values: Tensor) -> dict[int, Tensor]:
        parts = torch.split(values, [row.numel() for row in logprobs.values()])
        return {index: part.view(row.shape) for part, (index, row) in zip(parts, logprobs.items(), strict=True)}

    value, metrics = _call(loss, data, list(rows(flat).values()))
    name = getattr(loss, "name", None) or getattr(loss, "__name__", type(loss).__name__)
    gradient = torch.autograd.grad(value, flat, allow_unused=True)[0] if value.requires_grad else None
    if not torch.isfinite(value):
        where = _blame(logprobs, logprobs if gradient is None else rows(gradient))
        raise BackendError(f"loss {name}: returned {value.item()} for {where}; look at what the loss reads there")
    if not value.requires_grad:
        raise BackendError(
            f"loss {name}: does not depend on the logprobs, so nothing would be trained; compute it from `logprobs` without "
            ".item(), .detach() or numpy"
        )
    if gradient is None or not (isinstance(loss, Loss) or gradient.any()):
        kind = "no" if gradient is None else "a zero"
        raise BackendError(f"loss {name}: has {kind} gradient with respect to the logprobs, so nothing would be trained")
    if not torch.isfinite(gradient).all():
        raise BackendError(f"loss {name}: its gradient is not finite for {_blame(rows(gradient))}")
    return value.detach(), metrics, rows(gradient)


def _call(loss: LossFunction, data: Sequence[Datum], logprobs: list[Tensor]) -> tuple[Tensor, Mapping[str, float]]:
    result = loss(data, logprobs)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        raise BackendError("loss: must return (scalar tensor, dict of metrics)")
    value, metrics = result
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise BackendError(f"loss: must return a scalar tensor, got {_described(value)}")
    return value.reshape(()), {key: _number(key, number) for key, number in metrics.items()}


def _number(key: str, value: Any) -> float:
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise BackendError(f"loss: metric {key!r} must be one number, got {_described(value)}") from None


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _blame(*columns: Mapping[int, Tensor]) -> str:
    """The datums with a number that is not finite in one of the columns; all of them when the fault is elsewhere."""
    everyone = list(columns[0])
    bad = [index for index in everyone if not all(torch.isfinite(column[index]).all() for column in columns)] or everyone
    shown = ", ".join(map(str, bad[:8])) + (", ..." if len(bad) > 8 else "")
    return f"datums {shown}" if len(bad) > 1 else f"datum {shown}"
