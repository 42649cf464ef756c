"""Declarations of a loss, the batches of its checks, measurements of its value, gradient and slope, and results of checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import yaml  # type: ignore[import-untyped]
from torch import Tensor

from cookbook.check.batches import USUAL_KEYS, RandomBatch, random_batch
from cookbook.errors import CookbookError
from cookbook.losses.base import ALIASES, Loss, Scope
from cookbook.losses.function import FunctionLoss
from cookbook.losses.normalization import Reduction
from cookbook.types import Array, Datum

# Batches for each set of keys.
BATCHES = 8
# Relative tolerances: of a loss that computes in float64, and of one that does not.
EXACT, ROUGH = 1e-10, 1e-5
# Step of finite differences in nats, for a loss that computes in float64.
FINE_STEP = 1e-6

LossFunction = Callable[[Sequence[Datum], list[Tensor]], tuple[Tensor, Mapping[str, float]]]


class Outcome(NamedTuple):
    """``gradients`` has a row per datum, ``(T,)`` or ``(T, K)``; zeros where the value does not depend on it."""

    value: float
    gradients: list[list[float]]
    metrics: Mapping[str, float]

    def equals(self, other: Outcome) -> bool:
        """Whether value and gradients have the same bits."""
        return (self.value, self.gradients) == (other.value, other.gradients)

    @property
    def finite(self) -> bool:
        return math.isfinite(self.value) and bool(np.isfinite(flat(self.gradients)).all())


def evaluate(
    loss: LossFunction, data: Sequence[Datum], logprobs: Sequence[Array], dtype: torch.dtype = torch.float64
) -> Outcome:
    """The loss's value, its gradient, and its metrics, computed from logprobs of ``dtype``."""
    leaves = [torch.as_tensor(row, dtype=dtype).clone().requires_grad_() for row in logprobs]
    value, metrics = loss(data, leaves)
    slopes = torch.autograd.grad(value, leaves, allow_unused=True) if value.requires_grad else [None] * len(leaves)
    gradients = [torch.zeros_like(leaf) if row is None else row for leaf, row in zip(leaves, slopes, strict=True)]
    return Outcome(float(value.detach()), [row.tolist() for row in gradients], dict(metrics))


def slope_along(
    loss: LossFunction, data: Sequence[Datum], logprobs: Sequence[Array], direction: Sequence[Array], step: float = 1e-6
) -> float:
    """The slope of the value along ``direction``, by a central difference."""

    def value_at(distance: float) -> float:
        rows = [
            torch.as_tensor(row + distance * way, dtype=torch.float64) for row, way in zip(logprobs, direction, strict=True)
        ]
        return float(loss(data, rows)[0])

    with torch.no_grad():
        return (value_at(step) - value_at(-step)) / (2 * step)


def along(gradients: Sequence[Sequence[float]], direction: Sequence[Array]) -> float:
    """The slope along ``direction`` according to the gradient."""
    return sum(float(np.dot(row, way)) for row, way in zip(gradients, direction, strict=True))


def flat(gradients: Sequence[Sequence[float] | Array]) -> Array:
    """All gradients in one array, ``(N,)``."""
    return np.concatenate([np.asarray(row, dtype=np.float64).reshape(-1) for row in gradients])


class UndeclaredLoss(FunctionLoss):
    """Declarations of a plain function, whose reduction is unknown: it may have attributes ``needs`` and ``stop_gradient``."""

    def __init__(self, function: LossFunction) -> None:
        self._function, self._scope = function, Scope.batch

    @property
    def required(self) -> frozenset[str]:
        return frozenset(getattr(self._function, "needs", ()))


def optional_keys(loss: Loss) -> frozenset[str]:
    """The keys that the loss reads from datums with these keys. A function cannot declare its optional keys."""
    return USUAL_KEYS if isinstance(loss, FunctionLoss) else loss.reads


class Bench:
    """Inputs and measurements that all checks share.

    ``batches`` are float64 batches, some with all keys that the loss declares, some with only the keys that it needs.
    """

    def __init__(self, function: LossFunction, seed: int) -> None:
        self.function = function
        self.loss = function if isinstance(function, Loss) else UndeclaredLoss(function)
        self.reduction: Reduction | None = getattr(self.loss, "reduction", None)
        self.seed = seed
        self.batches = [random_batch(self.rng(index), keys) for keys in self.kits for index in range(BATCHES)]

    @cached_property
    def kits(self) -> list[frozenset[str]]:
        """The sets of keys of the datums."""
        needed = self.loss.required
        every = needed | optional_keys(self.loss)
        # Every random datum has weights, so they do not make a second set.
        if isinstance(self.loss, FunctionLoss) or every <= needed | {"weights"}:
            return [every]
        return [every, needed]

    @property
    def declared_keys(self) -> frozenset[str]:
        """Every key that the loss may read, aliases included."""
        keys = self.loss.required | optional_keys(self.loss) | {"target_tokens"}
        return keys | {ALIASES[key] for key in keys if key in ALIASES}

    def rng(self, *key: int) -> np.random.Generator:
        """Random numbers that depend on the seed and ``key`` alone."""
        return np.random.default_rng([self.seed, *key])

    def prepared(self, batch: RandomBatch) -> RandomBatch:
        """The batch as one whole optimizer step, ready for the loss."""
        return RandomBatch(self.loss.prepare(batch.data), batch.logprobs)

    def call(self, data: Sequence[Datum], logprobs: list[Tensor]) -> tuple[Tensor, Mapping[str, float]]:
        """The loss of a batch. Entropies, where it needs them, are ``-logprob``: they then have a slope to be checked, too."""
        if self.loss.needs_entropy:
            return self.loss(data, logprobs, [-row for row in logprobs])  # type: ignore[call-arg]
        return self.function(data, logprobs)

    def outcome(self, batch: RandomBatch, dtype: torch.dtype = torch.float64) -> Outcome:
        """Value and gradients of the loss; the batch is one whole optimizer step."""
        return self.raw(self.prepared(batch), dtype)

    def raw(self, batch: RandomBatch, dtype: torch.dtype = torch.float64) -> Outcome:
        """Value and gradients of the loss on datums that :meth:`prepared` has already changed."""
        return evaluate(self.call, batch.data, batch.logprobs, dtype)

    def tried(self, batch: RandomBatch) -> Outcome | None:
        """:meth:`outcome`, or None if the loss raises an error."""
        try:
            return self.outcome(batch)
        except REFUSALS:
            return None

    def direction(self, batch: RandomBatch, index: int) -> list[Array]:
        """A random direction in the space of the batch's logprobs."""
        rng = self.rng(index, 1)
        return [rng.normal(size=row.shape) for row in batch.logprobs]

    def slope(self, batch: RandomBatch, direction: Sequence[Array], step: float) -> float:
        """The slope of the value along ``direction``."""
        ready = self.prepared(batch)
        return slope_along(self.call, ready.data, ready.logprobs, direction, step)

    @cached_property
    def exact(self) -> bool:
        """Whether the loss computes in float64 when the logprobs are: only then do tiny steps move its value smoothly."""
        votes = []
        for index, batch in enumerate(self.batches):
            way = self.direction(batch, index)
            small, larger = (self.slope(batch, way, step) for step in (FINE_STEP, 10 * FINE_STEP))
            votes.append(abs(small - larger) <= 1e-5 * max(1.0, abs(small), abs(larger)))
        return sum(votes) > len(votes) / 2

    @property
    def tolerance(self) -> float:
        """Largest relative difference that rounding explains."""
        return EXACT if self.exact else ROUGH

    def difference(self, first: Outcome, second: Outcome) -> float:
        """The largest difference of value or gradient, relative to their size."""
        a, b = flat(first.gradients), flat(second.gradients)
        largest = max(float(np.abs(a).max()), float(np.abs(b).max()), 1e-300)
        # The value may nearly cancel; the terms it is a sum of are about as large as gradient times logprob.
        terms = max(abs(first.value), abs(second.value), float(np.abs(a).sum()))
        return max(float(np.abs(a - b).max()) / largest, abs(first.value - second.value) / max(terms, 1e-300))


_COUPLES = {
    Scope.token: "terms of one token each",
    Scope.sequence: "terms of one sequence each",
    Scope.pair: "terms of one pair each",
    Scope.batch: "couples the whole batch",
}


def described(loss: LossFunction) -> str:
    """Return the declarations of a loss as one sentence."""
    if not isinstance(loss, Loss):
        return "a plain function: declares nothing, so the caller chooses its normalization"
    returns = f"returns a {loss.reduction.replace('_', ' ')}, divided by {loss.normalization or 'nothing'}"
    reads = optional_keys(loss)
    optional = f", and {', '.join(sorted(reads))} when there" if reads else ""
    return f"{returns}; {_COUPLES[loss.scope]}; reads {', '.join(sorted(loss.required))}{optional}"


# Errors that a user's loss may raise when it rejects a batch, or contains a mistake.
REFUSALS = (
    CookbookError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


class State(StrEnum):
    """Outcome of a check."""

    passed = "ok"
    failed = "FAILED"
    # Worth knowing, and as declared.
    noted = "note"
    # Not examined, because of an earlier failure.
    skipped = "-"


@dataclass(frozen=True)
class CheckResult:
    """Result of one check.

    ``found`` is the measurement; of a failure, ``harm`` is its effect on a run and ``remedy`` the change to make.
    """

    check: str
    state: State
    found: str
    harm: str = ""
    remedy: str = ""

    @property
    def failed(self) -> bool:
        return self.state is State.failed

    def __str__(self) -> str:
        consequence = f"; in training: {self.harm}; change: {self.remedy}" if self.failed else ""
        return f"{self.state:<6}  {self.check}: {self.found}{consequence}"


def passed(found: str) -> CheckResult:
    return CheckResult("", State.passed, found)


def noted(found: str) -> CheckResult:
    return CheckResult("", State.noted, found)


@cache
def _faults() -> dict[str, dict[str, str]]:
    """``faults.yaml``: the texts ``harm`` and ``remedy`` of every fault."""
    faults: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("faults.yaml").read_text(encoding="utf-8"))
    return faults


def failed(fault: str, found: str, **values: object) -> CheckResult:
    """The result of a check that measured ``found``; ``values`` are named in the texts of the fault."""
    texts = {name: text.format(**values) for name, text in _faults()[fault].items()}
    return CheckResult("", State.failed, found, **texts)
