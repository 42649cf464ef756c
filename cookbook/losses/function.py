"""Plain functions as losses with a declared reduction."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from cookbook.errors import ConfigError
from cookbook.losses.base import Loss, Metrics, Scope
from cookbook.losses.normalization import Normalization, Reduction
from cookbook.types import Datum

Function = Callable[[Sequence[Datum], list[Tensor]], tuple[Tensor, Mapping[str, float]]]


# The division of the gradient by what a function returns, in a run.
DIVIDED = {
    Reduction.mean: None,
    Reduction.token_sum: Normalization.num_loss_tokens,
    Reduction.sequence_sum: Normalization.num_sequences,
}


class FunctionLoss(Loss):
    """A function with declarations, made by :func:`returns`; calling it calls the function."""

    reads: ClassVar[frozenset[str]] = frozenset()
    several_targets: ClassVar[bool] = True
    may_be_flat: ClassVar[bool] = False

    def __init__(self, function: Function, scope: Scope) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._scope = scope
        self.__post_init__()

    def constructor(self) -> type[FunctionLoss]:
        """Return a class whose objects are this loss, for ``loss=file.py:function``; the gradient of a sum is divided."""
        loss, usual = self, DIVIDED[self.reduction]

        class Declared(type(self)):  # type: ignore[misc]
            def __init__(self, normalization: Normalization | None = usual) -> None:
                object.__setattr__(self, "normalization", normalization)
                super().__init__(loss._function, loss._scope)

        return Declared

    @property
    def scope(self) -> Scope:
        return self._scope

    @property
    def stop_gradient(self) -> str | None:
        key: str | None = getattr(self._function, "stop_gradient", None)
        return key

    def call_options(self) -> dict[str, object]:
        """Return no options, because a function has none."""
        return {}

    def __call__(
        self, data: Sequence[Datum], logprobs: list[Tensor], entropies: list[Tensor] | None = None
    ) -> tuple[Tensor, Metrics]:
        value, metrics = self._function(data, logprobs)
        return value, dict(metrics)


def returns(reduction: str, *, scope: str = "batch") -> Callable[[Function], FunctionLoss]:
    """Declare what a custom loss returns, so that a division that contradicts it is refused::

        @cookbook.losses.returns("mean")
        def my_loss(data, logprobs): ...

    Args:
        reduction: ``mean``, ``token_sum`` or ``sequence_sum`` of what the function returns for a batch.
        scope: ``token``, ``sequence``, ``pair`` or ``batch``: how far one term reaches. The engine calls a function of
            scope ``token`` or ``sequence`` for a part of the batch at a time, which saves memory.

    Raises:
        ConfigError: the reduction or scope is unknown, or a mean has the scope token or sequence.
    """
    try:
        declared, reach = Reduction(reduction), Scope(scope)
    except ValueError:
        raise ConfigError(
            f"returns: expected a reduction of {', '.join(Reduction)} and a scope of {', '.join(Scope)}, got {reduction!r} "
            f"and {scope!r}"
        ) from None
    if declared is Reduction.mean and reach in (Scope.token, Scope.sequence):
        raise ConfigError(f"returns: a mean needs the whole batch, got scope={scope!r}; set it to batch, or return a sum")

    def declare(function: Function) -> FunctionLoss:
        name = getattr(function, "__name__", "loss")
        facts = {"name": name, "reduction": declared, "needs": Loss.needs | set(getattr(function, "needs", ()))}
        made: FunctionLoss = type(name, (FunctionLoss,), facts)(function, reach)
        return made

    return declare
