"""Checks of a loss's gradient with respect to the logprobs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from cookbook.check import measure
from cookbook.check.bench import FINE, Bench
from cookbook.check.draws import Draw
from cookbook.check.verdict import Verdict, failed, noted, passed

DIRECTIONS = 3  # per batch
OFTEN = 8  # a place in the response that was drawn so often has had its chance of a gradient


def differentiable(bench: Bench) -> Verdict:
    """The value depends on the logprobs, through torch."""
    trained = False
    for draw in bench.draws:
        ready = bench.prepared(draw)
        leaves = [torch.tensor(row, requires_grad=True) for row in ready.logprobs]
        value, _ = bench.call(ready.data, leaves)
        found = torch.autograd.grad(value, leaves, allow_unused=True) if value.requires_grad else [None]
        if all(row is None for row in found):
            return failed(
                "the value does not depend on the logprobs",
                "nothing would be trained; the trainer refuses it",
                "compute it from `logprobs` by torch alone: no .item(), .detach(), .tolist(), numpy or new torch.tensor",
            )
        gradient = torch.cat([row.reshape(-1) for row in found if row is not None])
        if not torch.isfinite(gradient).all():
            return failed(
                "the gradient is not finite for an ordinary batch",
                "the trainer stops at that step",
                "look for sqrt, log or a division at 0: torch.where on the result does not help, only on what goes in",
            )
        trained = trained or bool(gradient.any())
    if not trained:
        return failed("the gradient is zero everywhere", "nothing would be trained", "look for a .detach() around everything")
    return passed("through torch, and finite")


@dataclass(frozen=True)
class _Differences:
    """How finite differences are compared with a gradient."""

    step: float  # nats
    tolerance: float  # relative
    floor: float  # slopes below it are compared as if they were it
    excused: float  # share of directions that may be off: a kink may lie within a step
    words: str


FINELY = _Differences(FINE, 1e-5, 1e-3, 0.0, "")
COARSELY = _Differences(2e-3, 2e-2, 0.1, 0.25, ", coarsely: the loss computes in float32")


@dataclass(frozen=True)
class _Gap:
    """The slope of the value along a direction, and what the gradient promised."""

    slope: float
    promised: float

    def relative(self, how: _Differences) -> float:
        return abs(self.slope - self.promised) / max(how.floor, abs(self.slope), abs(self.promised))


def equals_slope(bench: Bench) -> Verdict:
    """The gradient is the slope of the value, except where the loss says that it stops it."""
    how = FINELY if bench.exact else COARSELY
    gaps = [_gap(bench, draw, index, how) for index, draw in _pairs(bench)]
    off = [gap for gap in gaps if gap.relative(how) > how.tolerance]
    if len(off) <= how.excused * len(gaps):
        worst = max(gap.relative(how) for gap in gaps if gap not in off)
        return passed(f"along {len(gaps)} directions, largest relative gap {worst:.0e}{how.words}")
    if bench.passport.stop_gradient is None:
        widest = max(off, key=lambda gap: gap.relative(how))
        return failed(
            f"detached term: {widest.slope:.4g} by differences, {widest.promised:.4g} by autograd; "
            f"apart in {len(off)} of {len(gaps)} directions{how.words}",
            "a part of the loss falls in the logs and trains nothing, such as a KL without gradient",
            "take the .detach(), no_grad or .item() away, or declare it: stop_gradient = 'what is held constant'",
        )
    if _gap_moves_with_reference(bench, how):
        return failed(
            "the term that reads reference_logprobs has no gradient: the gap to the slope moves with the reference",
            "the KL is logged and does not hold the policy near the reference",
            "compute it from the logprobs with their gradient",
        )
    return noted(f"detached term, as declared: {bench.passport.stop_gradient}")


def _pairs(bench: Bench) -> list[tuple[int, Draw]]:
    draws = [draw for draw in bench.draws for _ in range(DIRECTIONS)]
    return list(enumerate(draws))


def _gap(bench: Bench, draw: Draw, index: int, how: _Differences) -> _Gap:
    way = bench.direction(draw, index)
    return _Gap(bench.slope(draw, way, how.step), measure.along(bench.outcome(draw).gradients, way))


def _gap_moves_with_reference(bench: Bench, how: _Differences) -> bool:
    """Whether what is held constant reads the reference: then slope minus gradient changes when the reference does."""
    key = "reference_logprobs"
    moved = 0
    draws = [(index, draw) for index, draw in _pairs(bench) if key in draw.data[0].loss_fn_inputs]
    for index, draw in draws:
        rng = bench.rng(index, 2)
        other = draw.mapped(key, lambda values, _, rng=rng: np.minimum(values + rng.normal(0, 0.5, values.shape), 0.0))  # type: ignore[misc]
        here, there = _gap(bench, draw, index, how), _gap(bench, other, index, how)
        change = (here.slope - here.promised) - (there.slope - there.promised)
        moved += abs(change) > how.tolerance * max(how.floor, abs(here.slope), abs(there.slope))
    return moved > len(draws) / 2


def every_token_trained(bench: Bench) -> Verdict:
    """No place in a response goes without a gradient in all batches, the first least of all."""
    drawn: Counter[int] = Counter()
    trained: Counter[int] = Counter()
    last = 0, 0
    for draw in bench.draws:
        gradients = bench.outcome(draw).gradients
        for mask, row in zip(draw.masked, gradients, strict=True):
            places = np.flatnonzero(np.asarray(row, dtype=np.float64)[~mask])
            drawn.update(range(int((~mask).sum())))
            trained.update(places.tolist())
            last = last[0] + int((~mask).sum() - 1 in places), last[1] + 1
    silent = [place for place, count in sorted(drawn.items()) if count >= OFTEN and not trained[place]]
    names = [f"token {place + 1}" if place else "the first token" for place in silent]
    if not last[0] and not silent:
        names.append("the last token")
    if names:
        return failed(
            f"{', '.join(names)} of a response never gets a gradient",
            "the model never learns how an answer begins" if 0 in silent else "that part of every answer stays untrained",
            "weights[t] belongs to logprobs[t], both of target_tokens[t]: no [1:] or [:-1], the shift is made already",
        )
    return passed(f"all places of {last[1]} responses")
