"""A loss on the bench: what it declares, and the batches it is examined on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cookbook.check import measure
from cookbook.check.draws import USUAL, Draw, random_draw
from cookbook.check.measure import LossFunction, Outcome
from cookbook.losses.base import ALIASES, Loss, Scope
from cookbook.losses.function import FunctionLoss
from cookbook.normalization import Normalization, Reduction
from cookbook.types import Array, Datum

DRAWS = 8  # batches per kit of keys
EXACT, ROUGH = 1e-10, 1e-5  # relative tolerance of a loss that computes in float64, and of one that does not
FINE = 1e-6  # step of finite differences, nats, where float64 is computed in


@dataclass(frozen=True)
class Passport:
    """What a loss declares. A plain function has no ``reduction``, and may declare ``needs`` and ``stop_gradient``."""

    reduction: Reduction | None
    normalization: Normalization | None
    scope: Scope
    prepares: bool
    needs: frozenset[str]
    reads: frozenset[str]
    stop_gradient: str | None

    @property
    def knows(self) -> frozenset[str]:
        """Every key it may read, aliases included."""
        keys = self.needs | self.reads | {"target_tokens"}
        return keys | {ALIASES[key] for key in keys if key in ALIASES}


def passport(loss: LossFunction) -> Passport:
    """The declarations of a :class:`Loss`, or of a plain function."""
    if not isinstance(loss, Loss):
        needs = frozenset(getattr(loss, "needs", ()))
        held = getattr(loss, "stop_gradient", None)
        return Passport(None, None, Scope.batch, False, needs, USUAL, held)
    reference = {"reference_logprobs"} if loss.needs_reference else set()
    return Passport(
        loss.reduction,
        loss.normalization,
        loss.scope,
        loss.prepares,
        loss.needs | reference,
        USUAL if isinstance(loss, FunctionLoss) else loss.reads,
        loss.stop_gradient,
    )


class Bench:
    """Everything the checks share. ``draws`` are float64 batches with the keys the loss declares: all, and only the needed."""

    def __init__(self, loss: LossFunction, seed: int) -> None:
        self.loss = loss
        self.passport = passport(loss)
        self.seed = seed
        self.draws = [random_draw(self.rng(index), keys) for keys in self.kits for index in range(DRAWS)]

    @cached_property
    def kits(self) -> list[frozenset[str]]:
        """The sets of keys the datums carry."""
        needed, all_known = self.passport.needs, self.passport.needs | self.passport.reads
        if (
            not isinstance(self.loss, Loss)
            or isinstance(self.loss, FunctionLoss)
            or needed | {"weights"} == all_known | {"weights"}
        ):
            return [all_known]
        return [all_known, needed]

    def rng(self, *key: int) -> np.random.Generator:
        """Random numbers that depend on the seed and ``key`` alone."""
        return np.random.default_rng([self.seed, *key])

    def prepared(self, draw: Draw) -> Draw:
        """The draw as one whole optimizer step, ready for the loss."""
        return Draw(self.prepare(draw.data), draw.logprobs)

    def prepare(self, data: Sequence[Datum]) -> Sequence[Datum]:
        return self.loss.prepare(data) if isinstance(self.loss, Loss) else data

    def call(self, data: Sequence[Datum], logprobs: list[Tensor]) -> tuple[Tensor, Mapping[str, Any]]:
        """The loss of a batch. Entropies, where it needs them, are ``-logprob``: they then have a slope to be checked, too."""
        if isinstance(self.loss, Loss) and self.loss.needs_entropy:
            return self.loss(data, logprobs, [-row for row in logprobs])  # type: ignore[call-arg]
        return self.loss(data, logprobs)

    def outcome(self, draw: Draw, dtype: torch.dtype = torch.float64) -> Outcome:
        """What the loss makes of the draw as one whole optimizer step."""
        return self.raw(self.prepared(draw), dtype)

    def raw(self, draw: Draw, dtype: torch.dtype = torch.float64) -> Outcome:
        """The same of datums that are prepared already."""
        return measure.evaluate(self.call, draw.data, draw.logprobs, dtype)

    def direction(self, draw: Draw, index: int) -> list[Array]:
        """A random direction in the space of the draw's logprobs."""
        rng = self.rng(index, 1)
        return [rng.normal(size=row.shape) for row in draw.logprobs]

    def slope(self, draw: Draw, direction: Sequence[Array], step: float) -> float:
        """The slope of the value along ``direction``."""
        ready = self.prepared(draw)
        return measure.slope(self.call, ready.data, ready.logprobs, direction, step)

    @cached_property
    def exact(self) -> bool:
        """Whether the loss computes in float64 when the logprobs are: only then do tiny steps move its value smoothly."""
        votes = []
        for index, draw in enumerate(self.draws):
            way = self.direction(draw, index)
            small, larger = (self.slope(draw, way, step) for step in (FINE, 10 * FINE))
            votes.append(abs(small - larger) <= 1e-5 * max(1.0, abs(small), abs(larger)))
        return sum(votes) > len(votes) / 2

    @property
    def tolerance(self) -> float:
        """Relative; what rounding may explain."""
        return EXACT if self.exact else ROUGH

    def difference(self, one: Outcome, other: Outcome) -> float:
        """The largest difference of value or gradient, relative to their size."""
        a, b = measure.flat(one.gradients), measure.flat(other.gradients)
        largest = max(float(np.abs(a).max()), float(np.abs(b).max()), 1e-300)
        # The value may nearly cancel; the terms it is a sum of are about as large as gradient times logprob.
        terms = max(abs(one.value), abs(other.value), float(np.abs(a).sum()))
        return max(float(np.abs(a - b).max()) / largest, abs(one.value - other.value) / max(terms, 1e-300))


_COUPLES = {
    Scope.token: "terms of one token each",
    Scope.sequence: "terms of one sequence each",
    Scope.pair: "terms of one pair each",
    Scope.batch: "couples the whole batch",
}


def described(loss: LossFunction) -> str:
    """What a loss declares, in a few words."""
    known = passport(loss)
    if known.reduction is None:
        return "a plain function: declares nothing, so its normalization is the caller's business"
    returns = f"returns a {known.reduction.replace('_', ' ')}, divided by {known.normalization or 'nothing'}"
    optional = f", and {', '.join(sorted(known.reads))} when there" if known.reads else ""
    return f"{returns}; {_COUPLES[known.scope]}; reads {', '.join(sorted(known.needs))}{optional}"
