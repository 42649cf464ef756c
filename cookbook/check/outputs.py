"""Checks of the results of a loss: value, metrics, and the gradient with respect to the logprobs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cookbook.check.batches import RandomBatch
from cookbook.check.bench import FINE_STEP, Bench, CheckResult, along, failed, noted, passed

# Relative difference: a few hundred rounding errors of float32.
SINGLE = 1e-4


def scalar_and_finite(bench: Bench) -> CheckResult:
    """``(scalar tensor, metrics)``, and a finite number."""
    values = []
    for batch in bench.batches:
        ready = bench.prepared(batch)
        leaves = [torch.tensor(row, requires_grad=True) for row in ready.logprobs]
        result = bench.call(ready.data, leaves)
        if problem := _not_a_result(result):
            return failed("not a result", problem)
        values.append(float(result[0].detach()))
    if not np.isfinite(values).all():
        bad = next(value for value in values if not math.isfinite(value))
        return failed("value not finite", f"{bad} for an ordinary batch")
    return passed(f"{len(values)} batches, values from {min(values):.3g} to {max(values):.3g}")


def _not_a_result(result: object) -> str:
    """Return the problem with the value that a loss returned; empty if it is valid."""
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        return f"returned a {type(result).__name__} that is not (scalar, metrics)"
    value = result[0]
    if not isinstance(value, Tensor):
        return f"the value is a {type(value).__name__}, not a tensor"
    return "" if value.numel() == 1 else f"the value has shape {tuple(value.shape)}"


def repeatable(bench: Bench) -> CheckResult:
    """The same batch gives the same bits, and the loss does not change it."""
    for batch in bench.batches:
        ready = bench.prepared(batch)
        before = [{key: value.array.copy() for key, value in datum.loss_fn_inputs.items()} for datum in ready.data]
        first, second = bench.raw(ready), bench.raw(ready)
        for datum, arrays in zip(ready.data, before, strict=True):
            for key, array in arrays.items():
                if not np.array_equal(array, datum.loss_fn_inputs[key].array, equal_nan=True):
                    return failed("datum written", f"it writes into the datum's {key}")
        if not first.equals(second):
            return failed("not repeatable", f"{first.value:.12g}, then {second.value:.12g} for the same batch")
    return passed("the same bits, and an unchanged batch")


def single_precision(bench: Bench) -> CheckResult:
    """Runs compute in float32."""
    worst = 0.0
    for batch in bench.batches:
        double, single = bench.outcome(batch), bench.outcome(batch, torch.float32)
        worst = max(worst, bench.difference(double, single) if single.finite else math.inf)
    if worst > SINGLE:
        return failed("single precision", f"relative difference {worst:.1e}")
    return passed(f"relative difference at most {worst:.1e}")


def metrics(bench: Bench) -> CheckResult:
    """Metrics have names, and values that are finite numbers."""
    names: dict[str, None] = {}
    for batch in bench.batches:
        for name, value in bench.outcome(batch).metrics.items():
            if problem := _not_a_metric(value):
                return failed("metric", f"{name!r} {problem}")
            names[name] = None
    return passed(", ".join(names) or "none")


def _not_a_metric(value: object) -> str:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            return f"is a tensor of shape {tuple(value.shape)}"
        value = value.detach().item()
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return f"is a {type(value).__name__}"
    return "" if math.isfinite(value) else f"is {value}"


# Random directions for each batch.
DIRECTIONS = 3
# A position of the response that occurs this often must have a gradient at least once.
MANY_DRAWS = 8


def differentiable(bench: Bench) -> CheckResult:
    """The value depends on the logprobs, through torch."""
    trained = False
    for batch in bench.batches:
        ready = bench.prepared(batch)
        leaves = [torch.tensor(row, requires_grad=True) for row in ready.logprobs]
        value, _ = bench.call(ready.data, leaves)
        gradients = torch.autograd.grad(value, leaves, allow_unused=True) if value.requires_grad else [None]
        if all(row is None for row in gradients):
            return failed("no graph", "the value does not depend on the logprobs")
        gradient = torch.cat([row.reshape(-1) for row in gradients if row is not None])
        if not torch.isfinite(gradient).all():
            return failed("gradient not finite", "the gradient is not finite for an ordinary batch")
        trained = trained or bool(gradient.any())
    if not trained:
        return failed("zero gradient", "the gradient is zero everywhere")
    return passed("through torch, and finite")


@dataclass(frozen=True)
class _Differences:
    """How finite differences are compared with a gradient."""

    # Nats.
    step: float
    # Relative.
    tolerance: float
    # Smaller slopes count as this slope.
    floor: float
    # Share of directions that may differ: a step may cross a kink of the loss.
    excused: float
    words: str


FINELY = _Differences(FINE_STEP, 1e-5, 1e-3, 0.0, "")
COARSELY = _Differences(2e-3, 2e-2, 0.1, 0.25, ", coarsely: the loss computes in float32")


@dataclass(frozen=True)
class _Gap:
    """The slope of the value along a direction, and the slope that the gradient promises."""

    slope: float
    promised: float

    def relative(self, how: _Differences) -> float:
        return abs(self.slope - self.promised) / max(how.floor, abs(self.slope), abs(self.promised))


def equals_slope(bench: Bench) -> CheckResult:
    """The gradient is the slope of the value, except for a term that the loss declares as constant."""
    how = FINELY if bench.exact else COARSELY
    gaps = [_gap(bench, batch, index, how) for index, batch in _pairs(bench)]
    off = [gap for gap in gaps if gap.relative(how) > how.tolerance]
    if len(off) <= how.excused * len(gaps):
        worst = max(gap.relative(how) for gap in gaps if gap not in off)
        return passed(f"along {len(gaps)} directions, largest relative gap {worst:.0e}{how.words}")
    if bench.loss.stop_gradient is None:
        widest = max(off, key=lambda gap: gap.relative(how))
        return failed(
            "detached term",
            f"detached term: {widest.slope:.4g} by differences, {widest.promised:.4g} by autograd; "
            f"apart in {len(off)} of {len(gaps)} directions{how.words}",
        )
    if _gap_moves_with_reference(bench, how):
        return failed(
            "detached reference",
            "the term that reads reference_logprobs has no gradient: the gap to the slope moves with the reference",
        )
    return noted(f"detached term, as declared: {bench.loss.stop_gradient}")


def _pairs(bench: Bench) -> list[tuple[int, RandomBatch]]:
    batches = [batch for batch in bench.batches for _ in range(DIRECTIONS)]
    return list(enumerate(batches))


def _gap(bench: Bench, batch: RandomBatch, index: int, how: _Differences) -> _Gap:
    way = bench.direction(batch, index)
    return _Gap(bench.slope(batch, way, how.step), along(bench.outcome(batch).gradients, way))


def _gap_moves_with_reference(bench: Bench, how: _Differences) -> bool:
    """Whether the constant term reads the reference: then slope minus gradient changes with the reference."""
    key = "reference_logprobs"
    moved = 0
    batches = [(index, batch) for index, batch in _pairs(bench) if key in batch.data[0].loss_fn_inputs]
    for index, batch in batches:
        rng = bench.rng(index, 2)
        changed = batch.mapped(key, lambda values, _, rng=rng: np.minimum(values + rng.normal(0, 0.5, values.shape), 0.0))  # type: ignore[misc]
        here, there = _gap(bench, batch, index, how), _gap(bench, changed, index, how)
        change = (here.slope - here.promised) - (there.slope - there.promised)
        moved += abs(change) > how.tolerance * max(how.floor, abs(here.slope), abs(there.slope))
    return moved > len(batches) / 2


def every_token_trained(bench: Bench) -> CheckResult:
    """Every position in a response, above all the first, has a gradient in at least one batch."""
    counts: Counter[int] = Counter()
    trained: Counter[int] = Counter()
    last = 0, 0
    for batch in bench.batches:
        gradients = bench.outcome(batch).gradients
        for mask, row in zip(batch.masked, gradients, strict=True):
            places = np.flatnonzero(np.asarray(row, dtype=np.float64)[~mask])
            counts.update(range(int((~mask).sum())))
            trained.update(places.tolist())
            last = last[0] + int((~mask).sum() - 1 in places), last[1] + 1
    silent = [place for place, count in sorted(counts.items()) if count >= MANY_DRAWS and not trained[place]]
    names = [f"token {place + 1}" if place else "the first token" for place in silent]
    if not last[0] and not silent:
        names.append("the last token")
    if names:
        fault = "first token untrained" if 0 in silent else "later token untrained"
        return failed(fault, f"{', '.join(names)} of a response never gets a gradient")
    return passed(f"all places of {last[1]} responses")
