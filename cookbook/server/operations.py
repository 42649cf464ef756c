"""The operations a loss from outside may be made of: everything else is refused.

Pure functions of tensors only. What is missing is missing on purpose: what writes in place, draws at random, reads or imports
anything, leaves torch, or makes a tensor of any size it is told to.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Operation = Callable[..., Any]

ELEMENTWISE = (
    "abs acos acosh add asin asinh atan atan2 atanh ceil clamp clamp_max clamp_min clip cos cosh deg2rad div divide eq erf "
    "erfc exp exp2 expm1 floor fmax fmin fmod frac ge greater greater_equal gt hypot isfinite isinf isnan le lerp less "
    "less_equal lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt "
    "maximum minimum mul multiply nan_to_num ne neg negative pow reciprocal relu remainder round rsqrt "
    "sigmoid sign sin sinc sinh sqrt "
    "square sub subtract tan tanh true_divide trunc where xlogy"
)
REDUCTIONS = (
    "all amax amin any argmax argmin count_nonzero cummax cummin cumprod cumsum diff dot logcumsumexp logsumexp max mean "
    "median min nanmean nansum norm numel prod quantile softmax log_softmax std sum var"
)
SHAPES = (
    "argsort cat chunk clone concat detach expand_as flatten flip gather index_select masked_fill masked_select "
    "movedim narrow ones_like permute reshape roll select sort split squeeze stack t take_along_dim topk transpose tril triu "
    "unbind unsqueeze zeros_like"
)
METHODS_ONLY = "bool contiguous dim double float int long ndimension reshape_as size to type_as view view_as"
FUNCTIONAL = (
    "elu gelu hardtanh huber_loss l1_loss leaky_relu log_softmax logsigmoid log_sigmoid mse_loss relu relu6 sigmoid silu "
    "smooth_l1_loss softmax softplus softsign tanh"
)
OPERATORS = "abs add eq floordiv ge gt le lt mod mul ne neg pos sub truediv"
MATH = "ceil cos exp expm1 fabs floor log log10 log1p log2 sin sqrt tan tanh"
ATTRIBUTES = frozenset({"T", "device", "dtype", "mT", "ndim", "shape"})
DTYPES = frozenset({"bool", "float16", "bfloat16", "float32", "float64", "int32", "int64"})


def _number(value: Any) -> Any:
    """A number, or an element of a tensor's shape; never text or a list, which Python would repeat or join without end."""
    if isinstance(value, Tensor | bool | int | float):
        return value
    raise TypeError(f"expected a tensor or a number, got {type(value).__name__}")


def _operator(name: str) -> Operation:
    function = getattr(operator, name)
    return lambda *values: function(*map(_number, values))


def _power(base: Any, exponent: Any) -> Any:
    """Whole numbers have no bound in Python: those that are not tensors are taken as floats, which have one."""
    if not isinstance(base, Tensor) and not isinstance(exponent, Tensor):
        base, exponent = float(base), float(exponent)
    return operator.pow(_number(base), _number(exponent))


def _item(whole: Any, index: Any) -> Any:
    if not isinstance(whole, Tensor | tuple | list):
        raise TypeError(f"expected a tensor to take a part of, got {type(whole).__name__}")
    return whole[index]


def _attribute(whole: Any, name: Any) -> Any:
    if not isinstance(whole, Tensor) or name not in ATTRIBUTES:
        raise TypeError(f"a tensor's {', '.join(sorted(ATTRIBUTES))} may be read, got {name!r}")
    return getattr(whole, name)


def _functions() -> dict[str, Operation]:
    """By the name a traced graph calls them."""
    names = f"{ELEMENTWISE} {REDUCTIONS} {SHAPES}".split()
    found: dict[str, Operation] = {f"torch.{name}": getattr(torch, name) for name in names if hasattr(torch, name)}
    for place, module in (("torch.nn.functional", torch.nn.functional), ("torch._C._nn", torch._C._nn)):
        found |= {f"{place}.{name}": getattr(module, name) for name in FUNCTIONAL.split() if hasattr(module, name)}
    found |= {f"operator.{name}": _operator(name) for name in OPERATORS.split()}
    found |= {f"math.{name}": getattr(math, name) for name in MATH.split()}
    return found | {"operator.pow": _power, "operator.getitem": _item, "getattr": _attribute, "builtins.getattr": _attribute}


FUNCTIONS = _functions()
METHODS = frozenset(name for name in f"{ELEMENTWISE} {REDUCTIONS} {SHAPES} {METHODS_ONLY}".split() if hasattr(Tensor, name))


def method(name: str) -> Operation:
    """The tensor method ``name`` of :data:`METHODS`."""

    def call(whole: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(whole, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(whole).__name__}")
        return getattr(whole, name)(*args, **kwargs)

    return call
