"""The first half of the gradient path: from log-probabilities to dL/dlogprob, for any loss, with every fault named."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cookbook.errors import BackendError, DataError, NonFiniteError
from cookbook.losses.base import Loss, named
from cookbook.types import Datum

LossFunction = Callable[..., tuple[Tensor, Mapping[str, float]]]
"""``loss(data, logprobs) -> (scalar, metrics)``; one that :attr:`~cookbook.losses.Loss.needs_entropy` gets a third argument."""


OwnGradient = tuple[Callable[[Tensor], object], Tensor]
"""What adds to the ``grad`` of a leaf tensor, as a backward pass does, and what is to be added."""


@dataclass(frozen=True)
class LossGradient:
    """A loss's value, its metrics, and its slopes: per datum dL/dlogprob ``(T,)`` or ``(T, K)``, and dL/dentropy ``(T,)``.

    ``own``: the slopes of the loss's own parameters, such as a learned temperature: the leaf tensors that it closes over.
    """

    value: Tensor
    metrics: Mapping[str, float]
    logprobs: dict[int, Tensor]
    entropy: dict[int, Tensor] | None
    own: list[OwnGradient]

    def active(self) -> tuple[int, int]:
        """How many tokens have a gradient, and how many datums hold such a token."""
        counts = self.active_by_datum().values()
        return sum(counts), sum(count > 0 for count in counts)

    def active_by_datum(self) -> dict[int, int]:
        """How many tokens of each datum have a gradient."""
        found = {}
        for index, row in self.logprobs.items():
            moves = row.reshape(len(row), -1).ne(0).any(-1)
            if self.entropy is not None:
                moves = moves | self.entropy[index].ne(0)
            found[index] = int(moves.sum())
        return found


def loss_gradient(
    loss: LossFunction,
    data: Sequence[Datum],
    logprobs: Mapping[int, Tensor],
    entropy: Mapping[int, Tensor] | None = None,
    *,
    whole: bool = True,
) -> LossGradient:
    """The first half of the chain rule. The keys of ``logprobs`` are the datums' places in the call.

    ``whole``: these are all datums of the call, so a gradient that is zero everywhere trains nothing.

    Raises:
        NonFiniteError: the value or a gradient is not finite.
        BackendError: the value is not a scalar; a gradient is missing, or (for a function without a declared reduction) zero
            everywhere.
    """
    leaves = [_Leaf(rows) for rows in (logprobs, entropy) if rows is not None]
    name, places = loss_name(loss), list(logprobs)
    value, metrics = _call(loss, data, [list(leaf.rows(leaf.flat).values()) for leaf in leaves], places)
    flats = [leaf.flat for leaf in leaves]
    nodes = _own_leaves(value, flats)
    inputs = [*flats, *(node.variable for node in nodes)]
    every = torch.autograd.grad(value, inputs, allow_unused=True) if value.requires_grad else [None for _ in inputs]
    found = every[: len(flats)]
    own = [(node, slope) for node, slope in zip(nodes, every[len(flats) :], strict=True) if slope is not None]
    slopes = [leaf.rows(torch.zeros_like(leaf.flat) if one is None else one) for leaf, one in zip(leaves, found, strict=True)]
    if not torch.isfinite(value):
        bad = _blamed(logprobs, *slopes)
        message = f"returned {value.item()} for {named(bad)}; look at what the loss reads there"
        raise NonFiniteError(f"loss {name}: {message}", bad)
    if not value.requires_grad:
        raise BackendError(
            f"loss {name}: does not depend on the logprobs of {named(places)}, so nothing would be trained; compute it from "
            "`logprobs` without .item(), .detach() or numpy"
        )
    may_be_flat = not whole or (isinstance(loss, Loss) and loss.may_be_flat)
    if found[0] is None or not (may_be_flat or found[0].any()):
        raise no_gradient(loss, places, "no" if found[0] is None else "a zero")
    if not all(torch.isfinite(one).all() for one in found if one is not None):
        bad = _blamed(*slopes)
        raise NonFiniteError(f"loss {name}: its gradient is not finite for {named(bad)}", bad)
    return LossGradient(value.detach(), metrics, slopes[0], slopes[1] if entropy is not None else None, own)


@torch.no_grad()
def accumulate(own: Sequence[OwnGradient]) -> None:
    """Adds to the ``grad`` of the loss's own parameters, in place and with their hooks, as ``backward()`` does."""
    for add, slope in own:
        add(slope)


def _own_leaves(value: Tensor, flats: Sequence[Tensor]) -> list[Any]:
    """The graph's nodes of the leaf tensors that the loss reads besides the logprobs, in a fixed order."""
    found, seen, waiting = [], set(), [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and not any(leaf is flat for flat in flats):
            found.append(node)
        waiting += [following for following, _ in node.next_functions]
    return found


class _Leaf:
    """The rows of all datums as one flat tensor that wants a gradient."""

    def __init__(self, rows: Mapping[int, Tensor]) -> None:
        self._shapes = {index: row.shape for index, row in rows.items()}
        self.flat = torch.cat([row.reshape(-1) for row in rows.values()]).requires_grad_()

    def rows(self, values: Tensor) -> dict[int, Tensor]:
        parts = torch.split(values, [shape.numel() for shape in self._shapes.values()])
        return {index: part.view(shape) for part, (index, shape) in zip(parts, self._shapes.items(), strict=True)}


def _call(
    loss: LossFunction, data: Sequence[Datum], columns: list[list[Tensor]], places: Sequence[int]
) -> tuple[Tensor, Mapping[str, float]]:
    where = f"loss {loss_name(loss)}: must return"
    try:
        result = loss(data, *columns)
    except DataError as error:
        raise _placed(error, places) from None
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        raise BackendError(f"{where} (scalar tensor, dict of metrics), got {_described(result)} for {named(places)}")
    value, metrics = result
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise BackendError(f"{where} a scalar tensor, got {_described(value)} for {named(places)}")
    try:
        return value.reshape(()), {key: number(key, metric) for key, metric in metrics.items()}
    except BackendError as error:
        raise BackendError(f"{error} for {named(places)}") from None


def _placed(error: DataError, places: Sequence[int]) -> DataError:
    """``error`` with the places in the call of the datums that it names by their places in ``data``."""

    def place(found: re.Match[str]) -> str:
        return f"datum {places[int(found[1])]}" if int(found[1]) < len(places) else found[0]

    return type(error)(re.sub(r"\bdatum (\d+)\b", place, str(error)))


def loss_name(loss: LossFunction) -> str:
    """The name that a message calls the loss by."""
    return str(getattr(loss, "name", None) or getattr(loss, "__name__", type(loss).__name__))


def no_gradient(loss: LossFunction, places: Sequence[int], kind: str = "a zero") -> BackendError:
    """The error for a loss that trains nothing."""
    return BackendError(
        f"loss {loss_name(loss)}: has {kind} gradient with respect to the logprobs of {named(places)}, "
        "so nothing would be trained"
    )


def number(key: str, value: Any) -> float:
    """A metric as a number.

    Raises:
        BackendError: it is none.
    """
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise BackendError(f"loss: metric {key!r} must be one number, got {_described(value)}") from None


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _blamed(*columns: Mapping[int, Tensor]) -> list[int]:
    """The datums with a number that is not finite in one of the columns; all of them when the fault is elsewhere."""
    everyone = list(columns[0])
    return [index for index in everyone if not all(torch.isfinite(column[index]).all() for column in columns)] or everyone
