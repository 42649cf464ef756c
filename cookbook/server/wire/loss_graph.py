"""Custom losses of clients: traced graphs that are validated on arrival and interpreted node by node.

No code of a client runs. A graph may call only the operations listed in ``loss_operations.yaml``, pure functions of tensors.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import yaml  # type: ignore[import-untyped]
from torch import Tensor

from cookbook.errors import ConfigError, DataError
from cookbook.losses.base import Loss, Scope
from cookbook.losses.normalization import Reduction
from cookbook.server.wire.bodies import CustomLoss, LossNode
from cookbook.types import Datum

Operation = Callable[..., object]

# Names that a graph may use, by kind.
_ALLOWED: dict[str, list[str]] = {
    kind: names.split()
    for kind, names in yaml.safe_load(Path(__file__).with_name("loss_operations.yaml").read_text(encoding="utf-8")).items()
}
_TENSOR_NAMES = [*_ALLOWED["elementwise"], *_ALLOWED["reductions"], *_ALLOWED["shapes"]]
MAX_NODES = 2000
# Limit on the tensor elements that all nodes together compute from one datum: 512 MiB in single precision.
MAX_ELEMENTS = 1 << 27
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")


def _number(value: object) -> Tensor | float:
    """Return ``value``. Raises TypeError: it is text or a list, which Python's operators can grow to any size."""
    if isinstance(value, Tensor | bool | int | float):
        return value
    raise TypeError(f"expected a tensor or a number, got {type(value).__name__}")


def _operator(name: str) -> Operation:
    function = getattr(operator, name)
    return lambda *values: function(*map(_number, values))


def _power(base: Tensor | float, exponent: Tensor | float) -> object:
    """Compute ``base ** exponent``. Python integers are converted to floats, because an integer power can grow to any size."""
    if not isinstance(base, Tensor) and not isinstance(exponent, Tensor):
        base, exponent = float(base), float(exponent)
    return operator.pow(_number(base), _number(exponent))


def _item(whole: object, index: Any) -> object:
    if not isinstance(whole, Tensor | tuple | list):
        raise TypeError(f"expected a tensor or a tuple to index, got {type(whole).__name__}")
    return whole[index]


def _attribute(whole: object, name: str) -> object:
    if not isinstance(whole, Tensor) or name not in _ALLOWED["attributes"]:
        raise TypeError(f"expected an attribute of a tensor among {', '.join(_ALLOWED['attributes'])}, got {name!r}")
    return getattr(whole, name)


def _method(name: str) -> Operation:
    def call(whole: object, *args: object, **kwargs: object) -> object:
        if not isinstance(whole, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(whole).__name__}")
        return getattr(whole, name)(*args, **kwargs)

    return call


def _functions() -> dict[str, Operation]:
    """Return the allowed functions, by their name in a traced graph."""
    functions: dict[str, Operation] = {f"torch.{name}": getattr(torch, name) for name in _TENSOR_NAMES if hasattr(torch, name)}
    for place, module in (("torch.nn.functional", torch.nn.functional), ("torch._C._nn", torch._C._nn)):
        functions |= {f"{place}.{name}": getattr(module, name) for name in _ALLOWED["functional"] if hasattr(module, name)}
    functions |= {f"operator.{name}": _operator(name) for name in _ALLOWED["operator"]}
    functions |= {f"math.{name}": getattr(math, name) for name in _ALLOWED["math"]}
    functions |= {"operator.pow": _power, "operator.getitem": _item, "getattr": _attribute, "builtins.getattr": _attribute}
    return functions


_METHODS = {name: _method(name) for name in [*_TENSOR_NAMES, *_ALLOWED["methods"]] if hasattr(Tensor, name)}
# Operations that a node may call, by kind of node.
_CALLS: dict[str, dict[str, Operation]] = {"call_function": _functions(), "call_method": _METHODS}


@dataclass(frozen=True, eq=False)
class GraphLoss(Loss):
    """Sum over datums of the value of a graph. Metrics named ``:mean`` are divided by the number of datums."""

    name: ClassVar[str] = "custom"
    reduction: ClassVar[Reduction] = Reduction.sequence_sum
    several_targets: ClassVar[bool] = True
    wire: CustomLoss = field(kw_only=True)

    def __post_init__(self) -> None:
        """Validate the graph. Raises ConfigError: a node is not allowed, or not at its position; the error names the node."""
        super().__post_init__()
        _check(self.wire)

    @property
    def scope(self) -> Scope:
        return Scope.sequence

    @property
    def stop_gradient(self) -> str | None:
        return "tensors that the author of the loss detached"

    def check_data(self, data: Sequence[Datum]) -> None:
        """Validate the inputs of the loss. Raises DataError: a datum lacks an input, or an input has the wrong rank."""
        for index, datum in enumerate(data):
            for declared in self.wire.inputs:
                key = "target_tokens" if declared.name == "logprobs" else declared.name
                if key not in datum.loss_fn_inputs:
                    raise DataError(f"datum {index}: missing {key!r}, which the custom loss {self.wire.name!r} needs")
                if (rank := len(datum.loss_fn_inputs[key].shape)) != declared.rank:
                    raise DataError(f"datum {index}: {key} has {rank} dimensions, but the custom loss declares {declared.rank}")

    def __call__(self, data: Sequence[Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        total, metrics = torch.zeros(()), dict[str, float]()
        for index, (datum, datum_logprobs) in enumerate(zip(data, logprobs, strict=True)):
            try:
                value, datum_metrics = self._evaluate(datum, datum_logprobs)
            except DataError as error:
                raise DataError(f"datum {index}: {error}") from None
            total = total + value
            for key, metric in datum_metrics.items():
                metrics[key] = metrics.get(key, 0.0) + float(metric.detach())
        return total, {key: metric / len(data) if key.endswith(":mean") else metric for key, metric in metrics.items()}

    def _evaluate(self, datum: Datum, logprobs: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        inputs = [datum.loss_fn_inputs[declared.name].to_torch() for declared in self.wire.inputs[1:]]
        value, metrics = _Interpreter(self.wire.name, [logprobs, *inputs]).run(self.wire.graph.nodes)
        if any(not isinstance(output, Tensor) or output.ndim for output in (value, *metrics.values())):
            raise DataError(f"custom loss {self.wire.name!r}: the loss and every metric must be scalar tensors; reduce them")
        return value, metrics


class _Interpreter:
    """One evaluation of a graph on one datum."""

    def __init__(self, name: str, inputs: list[Tensor]) -> None:
        self._name = name
        self._inputs = iter(inputs)
        self._values: dict[str, object] = {}
        self._elements_left = MAX_ELEMENTS

    def run(self, nodes: Sequence[LossNode]) -> Any:
        """Return the value of the last node. Raises DataError: a node failed on this datum."""
        for node in nodes:
            try:
                self._values[node.name] = self._value(node)
            except (RuntimeError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
                reason = str(error).partition("\n")[0]
                raise DataError(f"custom loss {self._name!r}: {node.target} ({node.name}): {reason}") from None
        return self._values[nodes[-1].name]

    def _value(self, node: LossNode) -> object:
        if node.op == "placeholder":
            return next(self._inputs)
        args = [_decode(arg, self._values.__getitem__) for arg in node.args]
        if node.op == "output":
            return args[0]
        kwargs = {key: _decode(arg, self._values.__getitem__) for key, arg in node.kwargs.items()}
        self._charge(node.target.rpartition(".")[2], args, kwargs)
        result = _CALLS[node.op][node.target](*args, **kwargs)
        if type(result) is int and abs(result) >> 63:
            raise ValueError("the integer does not fit into 64 bits")
        return result

    def _charge(self, operation: str, args: list[object], kwargs: dict[str, object]) -> None:
        """Subtract the size of an operation's result from the budget, before the operation allocates memory.

        The result is at most as large as the concatenation of the arguments, or as their broadcast shape, unless the operation
        repeats parts of a tensor.
        """
        tensors = list(_tensors([args, kwargs]))
        concatenated = sum(tensor.numel() for tensor in tensors)
        try:
            shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))  # type: ignore[no-untyped-call]
            broadcast = math.prod(shape)
        except RuntimeError:
            # The shapes do not broadcast: the operation concatenates, or raises.
            broadcast = 0
        repeated = _repeated_elements(operation, args, kwargs) if operation in _REPEATING else 0
        self._elements_left -= max(concatenated, broadcast, repeated)
        if self._elements_left < 0:
            raise ValueError(f"computes more than {MAX_ELEMENTS:,} numbers from one datum")


# Operations that repeat parts of a tensor as often as an index or a list of quantiles is long.
_REPEATING = ("getitem", "index_select", "quantile", "take_along_dim", "gather")


def _repeated_elements(operation: str, args: list[object], kwargs: dict[str, object]) -> int:
    """Return a bound on the elements of the result of an operation that repeats parts of its first argument.

    A run on meta tensors computes the shape. It cannot count the elements that a mask selects: each index and each mask then
    counts as if it were combined with every element.
    """
    if operation == "getitem" and not _has_index_list(args[1:]):
        # Numbers and slices select a part.
        return 0
    try:
        whole, *others = [_on_meta(value) for value in args]
        named = {key: _on_meta(value) for key, value in kwargs.items()}
        function = _item if operation == "getitem" else getattr(torch, operation)
        return sum(tensor.numel() for tensor in _tensors(function(whole, *others, **named)))
    except (RuntimeError, NotImplementedError):
        first, *indices = list(_tensors([args, kwargs]))
        return first.numel() * math.prod(max(index.numel(), 1) for index in indices if index.dtype != torch.bool)


def _has_index_list(index: object) -> bool:
    """Whether an index contains a tensor or a list of indices."""
    if isinstance(index, tuple | list):
        return any(isinstance(part, Tensor | list) or _has_index_list(part) for part in index)
    return False


def _on_meta(value: object) -> object:
    """Return ``value`` with tensors that have a shape and no data."""
    if isinstance(value, Tensor):
        return value.detach().to("meta")
    if isinstance(value, tuple | list):
        return type(value)(_on_meta(item) for item in value)
    return value


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def _decode(value: object, value_of: Callable[[str], object]) -> object:
    """Convert an argument from its JSON form. ``value_of`` returns the value of the node that an argument refers to."""
    if isinstance(value, list):
        return [_decode(item, value_of) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ConfigError(f"create_custom_loss: an argument must have one key (ref, tuple, dict, ...), got {sorted(value)}")
    ((kind, inner),) = value.items()
    if kind == "ref":
        return value_of(inner)
    if kind in ("tuple", "slice"):
        parts = [_decode(item, value_of) for item in inner]
        return tuple(parts) if kind == "tuple" else slice(*parts)
    if kind == "dict":
        return {key: _decode(item, value_of) for key, item in inner.items()}
    if kind == "ellipsis":
        return ...
    if kind == "float" and inner in ("inf", "-inf", "nan"):
        return float(inner)
    if kind in ("dtype", "device", "layout", "memory_format") and inner in _ALLOWED[kind]:
        return torch.device("cpu") if kind == "device" else getattr(torch, inner)
    raise ConfigError(f"create_custom_loss: the argument {{{kind!r}: {inner!r}}} is not allowed here")


def _check(loss: CustomLoss) -> None:
    """Validate every node. Raises ConfigError: a node has an unknown kind, calls an unknown operation or uses a later node."""
    nodes = loss.graph.nodes
    if not 1 < len(nodes) <= MAX_NODES or nodes[-1].op != "output" or len(nodes[-1].args) != 1:
        raise ConfigError(f"create_custom_loss: a graph has 2 to {MAX_NODES} nodes, of which the last is the output")
    known: dict[str, object] = {}
    for node in nodes:
        if node.op in _CALLS and node.target not in _CALLS[node.op]:
            raise ConfigError(
                f"create_custom_loss: {loss.name} calls {node.target}, which is not allowed on this server; pass the function "
                "itself to forward_backward_custom, which runs it in the client"
            )
        if node.op not in (*_CALLS, "placeholder", "output") or (node.op == "output") != (node is nodes[-1]):
            raise ConfigError(f"create_custom_loss: the node {node.name!r} is a {node.op}, which is not allowed in this place")
        if "out" in node.kwargs or node.name in known:
            raise ConfigError(f"create_custom_loss: the node {node.name!r} overwrites another node")
        try:
            returned = [_decode(arg, known.__getitem__) for arg in [*node.args, *node.kwargs.values()]]
        except (LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"create_custom_loss: the arguments of {node.name!r} are invalid: {error}") from None
        known[node.name] = node
    _check_signature(loss, returned[0])


def _check_signature(loss: CustomLoss, returned: object) -> None:
    inputs = [node.target for node in loss.graph.nodes if node.op == "placeholder"]
    declared = [entry.name for entry in loss.inputs]
    if inputs != declared or inputs[:1] != ["logprobs"]:
        raise ConfigError(
            f"create_custom_loss: the graph of {loss.name} has inputs {inputs}, declared as {declared}; both must be equal and "
            "start with logprobs"
        )
    if not (isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[1], dict)):
        raise ConfigError(f"create_custom_loss: {loss.name} must return (loss, metrics)")
    if wrong := [key for key in returned[1] if not _METRIC.fullmatch(key)]:
        raise ConfigError(f"create_custom_loss: the metric {wrong[0]!r} must be named custom/<name>:sum or custom/<name>:mean")
