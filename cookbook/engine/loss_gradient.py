"""The loss half of the chain rule: dL/dlogprob of any loss, with checks that name the offending datums.

The backward pass through the model is the other half; :class:`SavedBytes` measures the tensors that autograd saves for it.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cookbook.errors import BackendError, DataError, NonFiniteError
from cookbook.losses.base import Loss, named
from cookbook.types import Datum

LossFunction = Callable[..., tuple[Tensor, Mapping[str, float]]]
"""``loss(data, logprobs) -> (scalar, metrics)``. If the loss ``needs_entropy``, it gets the entropies as a third argument."""

# Metrics with the value of the loss, which the engine reports.
LOSS_METRICS = ("loss", "loss:sum")

ParameterGradient = tuple[Callable[[Tensor], object], Tensor]
"""The AccumulateGrad node of a leaf tensor, which adds its argument to ``grad``, and the gradient to add."""


@dataclass(frozen=True)
class LossGradient:
    """Value and metrics of a loss, and its gradients by datum.

    ``logprobs``: dL/dlogprob, ``(T,)`` or ``(T, K)``. ``entropy``: dL/dentropy, ``(T,)``, if the loss needs the entropy.
    ``parameter_gradients``: gradients of the loss's own parameters, such as a learned temperature.
    """

    value: Tensor
    metrics: Mapping[str, float]
    logprobs: dict[int, Tensor]
    entropy: dict[int, Tensor] | None
    parameter_gradients: list[ParameterGradient]

    @classmethod
    def zero(cls, logprobs: Mapping[int, Tensor], entropy: Mapping[int, Tensor] | None) -> LossGradient:
        """Return zero gradients: for a micro-batch without datums, or one whose loss failed."""
        zeros = [
            None if rows is None else {i: torch.zeros_like(row) for i, row in rows.items()} for rows in (logprobs, entropy)
        ]
        return cls(torch.zeros(()), {}, zeros[0] or {}, zeros[1], [])

    def __getstate__(self) -> dict[str, object]:
        """Return the state to send to other ranks, with arrays: a tensor would be pickled with all of its storage."""
        rows = [
            None if table is None else {i: row.numpy() for i, row in table.items()} for table in (self.logprobs, self.entropy)
        ]
        return {
            "value": self.value,
            "metrics": dict(self.metrics),
            "logprobs": rows[0],
            "entropy": rows[1],
            "parameter_gradients": [],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        for key in ("logprobs", "entropy"):
            if state[key] is not None:
                state[key] = {index: torch.from_numpy(row) for index, row in state[key].items()}
        self.__dict__.update(state)

    def num_active(self) -> tuple[int, int]:
        """Return the number of tokens with a nonzero gradient, and the number of datums that have such tokens."""
        counts = self.num_active_by_datum().values()
        return sum(counts), sum(count > 0 for count in counts)

    def num_active_by_datum(self) -> dict[int, int]:
        """Return the number of tokens with a nonzero gradient, by datum."""
        counts = {}
        for index, row in self.logprobs.items():
            is_active = row.reshape(len(row), -1).ne(0).any(-1)
            if self.entropy is not None:
                is_active = is_active | self.entropy[index].ne(0)
            counts[index] = int(is_active.sum())
        return counts


class CallGradients:
    """Gradients of one call's loss. Collects the gradients of the loss's own parameters until the call has succeeded.

    ``keeps_error``: if the loss of a micro-batch fails, store the error for :meth:`raise_error` and return zero gradients. Used
    with sharded ranks, which wait in collectives for the remaining passes of this rank.
    """

    def __init__(self, *, keeps_error: bool) -> None:
        self.parameter_gradients: list[ParameterGradient] = []
        self._keeps_error = keeps_error
        self._error: Exception | None = None

    def of_batch(
        self, loss: LossFunction, data: Sequence[Datum], logprobs: Mapping[int, Tensor], entropy: Mapping[int, Tensor] | None
    ) -> LossGradient:
        """Return the gradient of the loss of all datums of the call."""
        grads = loss_gradient(loss, data, logprobs, entropy)
        self.parameter_gradients += grads.parameter_gradients
        return grads

    def of_micro_batch(
        self,
        loss: LossFunction,
        data: Sequence[Datum],
        logprobs: Mapping[int, Tensor],
        entropy: Mapping[int, Tensor] | None = None,
    ) -> LossGradient:
        """Return the gradient of the loss of some datums, for a loss with independent terms; empty without datums."""
        if not logprobs:
            return LossGradient.zero(logprobs, entropy)
        try:
            grads = loss_gradient(loss, data, logprobs, entropy, whole_batch=False)
        except Exception as error:
            if not self._keeps_error:
                raise
            self._error = self._error or error
            return LossGradient.zero(logprobs, entropy)
        self.parameter_gradients += grads.parameter_gradients
        return grads

    def raise_error(self) -> None:
        """Raise the first stored error, if any."""
        if self._error is not None:
            raise self._error


def loss_gradient(
    loss: LossFunction,
    data: Sequence[Datum],
    logprobs: Mapping[int, Tensor],
    entropy: Mapping[int, Tensor] | None = None,
    *,
    whole_batch: bool = True,
) -> LossGradient:
    """Evaluate ``loss`` and differentiate with respect to the logprobs (and entropies).

    The keys of ``logprobs`` and ``entropy`` are the datums' indices in the call. ``whole_batch``: these are all datums of the
    call, so a gradient that is zero everywhere is an error.

    Raises:
        NonFiniteError: the value or a gradient is not finite.
        BackendError: the value is not a scalar; the gradient is missing, or is zero everywhere although the loss does not
            declare that it may be.
    """
    # One leaf tensor for all datums, so that the graph has one leaf instead of one per datum.
    leaves = [_FlatLeaf(rows) for rows in (logprobs, entropy) if rows is not None]
    name, indices = loss_name(loss), list(logprobs)
    value, metrics = _evaluate(loss, data, [list(leaf.rows(leaf.flat).values()) for leaf in leaves], indices)
    flats = [leaf.flat for leaf in leaves]
    nodes = _parameter_nodes(value, flats)
    inputs = [*flats, *(node.variable for node in nodes)]
    gradients = torch.autograd.grad(value, inputs, allow_unused=True) if value.requires_grad else [None for _ in inputs]
    flat_grads = gradients[: len(flats)]
    parameter_gradients = [(node, grad) for node, grad in zip(nodes, gradients[len(flats) :], strict=True) if grad is not None]
    grads = [
        leaf.rows(torch.zeros_like(leaf.flat) if grad is None else grad) for leaf, grad in zip(leaves, flat_grads, strict=True)
    ]
    if not torch.isfinite(value):
        bad = _non_finite_datums(logprobs, *grads)
        message = f"returned {value.item()} for {named(bad)}; check the logprobs and loss inputs of these datums"
        raise NonFiniteError(f"loss {name}: {message}", bad)
    if not value.requires_grad:
        raise BackendError(
            f"loss {name}: does not depend on the logprobs of {named(indices)}, so nothing would be trained; compute it from "
            "`logprobs` without .item(), .detach() or numpy"
        )
    may_be_flat = not whole_batch or (isinstance(loss, Loss) and loss.may_be_flat)
    if flat_grads[0] is None or not (may_be_flat or flat_grads[0].any()):
        raise no_gradient(loss, indices, "no" if flat_grads[0] is None else "a zero")
    if not all(torch.isfinite(grad).all() for grad in flat_grads if grad is not None):
        bad = _non_finite_datums(*grads)
        message = f"its gradient is not finite for {named(bad)}; check for log(0), 0/0 or overflow in the loss"
        raise NonFiniteError(f"loss {name}: {message}", bad)
    return LossGradient(value.detach(), metrics, grads[0], grads[1] if entropy is not None else None, parameter_gradients)


@torch.no_grad()
def accumulate(gradients: Sequence[ParameterGradient]) -> None:
    """Add to the ``grad`` of the loss's own parameters, in place and with their hooks, like ``backward()``."""
    for add, grad in gradients:
        add(grad)


def _parameter_nodes(value: Tensor, flats: Sequence[Tensor]) -> list[Any]:
    """Return the AccumulateGrad nodes of the loss's own parameters: leaf tensors other than ``flats``, in a fixed order."""
    nodes, seen, waiting = [], set(), [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and not any(leaf is flat for flat in flats):
            nodes.append(node)
        waiting += [following for following, _ in node.next_functions]
    return nodes


class _FlatLeaf:
    """The values of all datums, concatenated to one flat tensor that requires a gradient."""

    def __init__(self, rows: Mapping[int, Tensor]) -> None:
        self._shapes = {index: row.shape for index, row in rows.items()}
        self.flat = torch.cat([row.reshape(-1) for row in rows.values()]).requires_grad_()

    def rows(self, values: Tensor) -> dict[int, Tensor]:
        """Split a flat tensor into one tensor per datum, in the datum's shape."""
        parts = torch.split(values, [shape.numel() for shape in self._shapes.values()])
        return {index: part.view(shape) for part, (index, shape) in zip(parts, self._shapes.items(), strict=True)}


def _evaluate(
    loss: LossFunction, data: Sequence[Datum], columns: list[list[Tensor]], indices: Sequence[int]
) -> tuple[Tensor, Mapping[str, float]]:
    where = f"loss {loss_name(loss)}: must return"
    try:
        result = loss(data, *columns)
    except DataError as error:
        raise _with_call_indices(error, indices) from None
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        raise BackendError(f"{where} (scalar tensor, dict of metrics), got {_type_or_shape(result)} for {named(indices)}")
    value, metrics = result
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise BackendError(f"{where} a scalar tensor, got {_type_or_shape(value)} for {named(indices)}")
    try:
        return value.reshape(()), {key: number(key, metric) for key, metric in metrics.items()}
    except BackendError as error:
        raise BackendError(f"{error} for {named(indices)}") from None


def _with_call_indices(error: DataError, indices: Sequence[int]) -> DataError:
    """Return ``error`` with each "datum N" renumbered: N counts the datums that the loss got, not those of the call."""

    def renumber(match: re.Match[str]) -> str:
        return f"datum {indices[int(match[1])]}" if int(match[1]) < len(indices) else match[0]

    return type(error)(re.sub(r"\bdatum (\d+)\b", renumber, str(error)))


def loss_name(loss: LossFunction) -> str:
    """Return the name of the loss, for messages."""
    return str(getattr(loss, "name", None) or getattr(loss, "__name__", type(loss).__name__))


def no_gradient(loss: LossFunction, indices: Sequence[int], kind: str = "a zero") -> BackendError:
    """Return the error for a loss without a gradient."""
    return BackendError(
        f"loss {loss_name(loss)}: has {kind} gradient with respect to the logprobs of {named(indices)}, "
        "so nothing would be trained; check the weights and the masks of these datums"
    )


def number(key: str, value: float | Tensor) -> float:
    """Return a metric as a float.

    Raises:
        BackendError: the metric is not a single number, or has the name of the loss itself.
    """
    if key in LOSS_METRICS:
        raise BackendError(
            f"loss: metric {key!r} is the value of the loss itself, which is always reported; choose another name"
        )
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise BackendError(f"loss: metric {key!r} must be a single number, got {_type_or_shape(value)}") from None


def _type_or_shape(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _non_finite_datums(*columns: Mapping[int, Tensor]) -> list[int]:
    """Return the datums with a non-finite number in one of the columns; all datums if every column is finite."""
    indices = list(columns[0])
    return [index for index in indices if not all(torch.isfinite(column[index]).all() for column in columns)] or indices


class SavedBytes:
    """Bytes of the activations that autograd saves for the backward pass. Each storage counts once; weights do not count.

    ``total``: the bytes at the end of :meth:`counted`, without those of graphs that are freed before. Layer inputs that
    activation checkpointing keeps are not counted: they do not pass the saved-tensor hooks.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._weights = {parameter.untyped_storage()._cdata for parameter in parameters}
        self.total = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Context in which saved tensors are counted."""
        # Address and bytes of each storage. A graph that is freed meanwhile loses its tensor, and the address may be reused.
        tensors: list[tuple[int, int, weakref.ref[Tensor]]] = []

        def pack(saved: Tensor) -> Tensor:
            storage = saved.untyped_storage()
            # Returning the tensor itself would create a reference cycle between the tensor and its graph node.
            tensor = saved.detach()
            if storage._cdata not in self._weights:
                tensors.append((storage._cdata, storage.nbytes(), weakref.ref(tensor)))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            yield
            self.total = sum({address: size for address, size, reference in tensors if reference() is not None}.values())
