"""A loss from outside as data: a traced graph, checked when it arrives, and walked node by node. Nothing of it is code."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cookbook.errors import ConfigError, DataError
from cookbook.losses.base import Loss, Scope
from cookbook.normalization import Reduction
from cookbook.server.messages import CustomLoss, LossNode
from cookbook.server.operations import DTYPES, FUNCTIONS, METHODS, method
from cookbook.types import Datum

MAX_NODES = 2000
MAX_NUMBERS = 1 << 27  # that all nodes together make of one datum: half a gigabyte in single precision
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_TORCH = {"dtype": DTYPES, "device": {"cpu"}, "layout": {"strided"}, "memory_format": {"contiguous_format", "preserve_format"}}
_CALLS = {"call_function": FUNCTIONS, "call_method": METHODS}


@dataclass(frozen=True, eq=False)
class GraphLoss(Loss):
    """The sum over datums of what the graph makes of each; metrics called ``:mean`` are divided by their number."""

    name: ClassVar[str] = "custom"
    reduction: ClassVar[Reduction] = Reduction.sequence_sum
    several_targets: ClassVar[bool] = True
    wire: CustomLoss | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError: naming the node that is not allowed, or not where it should be."""
        super().__post_init__()
        _check(self._given)

    @property
    def scope(self) -> Scope:
        return Scope.sequence

    @property
    def stop_gradient(self) -> str | None:
        return "whatever its author detached"

    @property
    def _given(self) -> CustomLoss:
        assert self.wire is not None
        return self.wire

    def check_data(self, data: Sequence[Datum]) -> None:
        """Every datum has what the loss takes, of the rank it declared. Raises DataError."""
        for index, datum in enumerate(data):
            for taken in self._given.inputs:
                key = "target_tokens" if taken.name == "logprobs" else taken.name
                if key not in datum.loss_fn_inputs:
                    raise DataError(f"datum {index}: missing {key!r}, which the custom loss {self._given.name!r} takes")
                if (rank := len(datum.loss_fn_inputs[key].shape)) != taken.rank:
                    raise DataError(f"datum {index}: {key} has {rank} dimensions, the custom loss declared {taken.rank}")

    def __call__(self, data: Sequence[Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        total, metrics = torch.zeros(()), dict[str, float]()
        for index, (datum, own) in enumerate(zip(data, logprobs, strict=True)):
            try:
                value, found = self._of_one(datum, own)
            except DataError as error:
                raise DataError(f"datum {index}: {error}") from None
            total = total + value
            for key, one in found.items():
                metrics[key] = metrics.get(key, 0.0) + float(one.detach())
        return total, {key: one / len(data) if key.endswith(":mean") else one for key, one in metrics.items()}

    def _of_one(self, datum: Datum, logprobs: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        inputs = [datum.loss_fn_inputs[taken.name].to_torch() for taken in self._given.inputs[1:]]
        value, metrics = _Walk(self._given.name, [logprobs, *inputs]).through(self._given.graph.nodes)
        if any(not isinstance(one, Tensor) or one.ndim for one in (value, *metrics.values())):
            raise DataError(f"custom loss {self._given.name!r}: must return a scalar tensor, and scalar tensors as metrics")
        return value, metrics


class _Walk:
    """One evaluation."""

    def __init__(self, name: str, inputs: list[Tensor]) -> None:
        self._name = name
        self._inputs = iter(inputs)
        self._values: dict[str, Any] = {}
        self._left = MAX_NUMBERS

    def through(self, nodes: Sequence[LossNode]) -> Any:
        """What the last node returns. Raises DataError: a node failed on this datum."""
        for node in nodes:
            try:
                self._values[node.name] = self._value(node)
            except (RuntimeError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
                reason = str(error).partition("\n")[0]
                raise DataError(f"custom loss {self._name!r}: {node.target} ({node.name}): {reason}") from None
        return self._values[nodes[-1].name]

    def _value(self, node: LossNode) -> Any:
        if node.op == "placeholder":
            return next(self._inputs)
        args = [_decoded(one, self._values.__getitem__) for one in node.args]
        if node.op == "output":
            return args[0]
        kwargs = {key: _decoded(one, self._values.__getitem__) for key, one in node.kwargs.items()}
        self._spend(list(_tensors([args, kwargs])))
        operation = FUNCTIONS[node.target] if node.op == "call_function" else method(node.target)
        result = operation(*args, **kwargs)
        if type(result) is int and abs(result) >> 63:
            raise ValueError("the number is larger than 64 bits hold")
        return result

    def _spend(self, tensors: list[Tensor]) -> None:
        """Before memory is taken: a result is no larger than its arguments side by side, or spread over each other."""
        side_by_side = sum(one.numel() for one in tensors)
        try:
            spread = math.prod(torch.broadcast_shapes(*(one.shape for one in tensors)))  # type: ignore[no-untyped-call]
        except RuntimeError:  # they do not go together; so they are joined, or the operation will say so
            spread = 0
        self._left -= max(side_by_side, spread)
        if self._left < 0:
            raise ValueError(f"makes more than {MAX_NUMBERS:,} numbers of one datum")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _decoded(value: Any, of: Callable[[str], Any]) -> Any:
    """An argument as the wire has it -> as the operation takes it; ``of`` gives the value of another node."""
    if isinstance(value, list):
        return [_decoded(one, of) for one in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ConfigError(f"create_custom_loss: an argument is one of ref, tuple, dict, ..., got {sorted(value)}")
    ((kind, inner),) = value.items()
    if kind == "ref":
        return of(inner)
    if kind in ("tuple", "slice"):
        parts = [_decoded(one, of) for one in inner]
        return tuple(parts) if kind == "tuple" else slice(*parts)
    if kind == "dict":
        return {key: _decoded(one, of) for key, one in inner.items()}
    if kind == "ellipsis":
        return ...
    if kind == "float" and inner in ("inf", "-inf", "nan"):
        return float(inner)
    if inner in _TORCH.get(kind, ()):
        return torch.device("cpu") if kind == "device" else getattr(torch, inner)
    raise ConfigError(f"create_custom_loss: the argument {{{kind!r}: {inner!r}}} is not allowed here")


def _check(loss: CustomLoss) -> None:
    """Every node is of an allowed kind, calls an allowed operation, and refers to nodes before it."""
    nodes = loss.graph.nodes
    if not 1 < len(nodes) <= MAX_NODES or nodes[-1].op != "output" or len(nodes[-1].args) != 1:
        raise ConfigError(f"create_custom_loss: a graph has 2 to {MAX_NODES} nodes, the last of which returns")
    known: dict[str, Any] = {}
    for node in nodes:
        if node.op in _CALLS and node.target not in _CALLS[node.op]:
            raise ConfigError(
                f"create_custom_loss: {loss.name} calls {node.target}, which is not allowed on this server; give the function "
                "itself to forward_backward_custom, it then runs on your side"
            )
        if node.op not in (*_CALLS, "placeholder", "output") or (node.op == "output") != (node is nodes[-1]):
            raise ConfigError(f"create_custom_loss: the node {node.name!r} is a {node.op}, which is not allowed there")
        if "out" in node.kwargs or node.name in known:
            raise ConfigError(f"create_custom_loss: the node {node.name!r} writes to another one")
        try:
            returned = [_decoded(one, known.__getitem__) for one in [*node.args, *node.kwargs.values()]]
        except (LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"create_custom_loss: the arguments of {node.name!r} are not in order: {error}") from None
        known[node.name] = node
    _check_ends(loss, returned[0])


def _check_ends(loss: CustomLoss, returned: Any) -> None:
    taken = [node.target for node in loss.graph.nodes if node.op == "placeholder"]
    if taken != [one.name for one in loss.inputs] or taken[:1] != ["logprobs"]:
        raise ConfigError(f"create_custom_loss: {loss.name} takes {taken}, declared are {[one.name for one in loss.inputs]}")
    if not (isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[1], dict)):
        raise ConfigError(f"create_custom_loss: {loss.name} must return (loss, metrics)")
    if wrong := [key for key in returned[1] if not _METRIC.fullmatch(key)]:
        raise ConfigError(f"create_custom_loss: the metric {wrong[0]!r} must be called custom/<name>:sum or custom/<name>:mean")
