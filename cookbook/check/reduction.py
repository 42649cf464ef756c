"""Checks of a loss's sum: over a batch that is repeated, divided, padded, or reordered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cookbook.check.batches import RandomBatch, datum, padded, repeated, stretched
from cookbook.check.bench import Bench, CheckResult, Outcome, failed, flat, noted, passed
from cookbook.errors import ConfigError
from cookbook.losses.base import Scope
from cookbook.losses.normalization import Reduction
from cookbook.losses.normalization import check as check_normalization
from cookbook.types import Array

DIVISORS = {Reduction.mean: None, Reduction.sequence_sum: "num_sequences", Reduction.token_sum: "num_loss_tokens"}
"""Normalization that fits a reduction."""


def reduction(bench: Bench) -> CheckResult:
    """Measured by repeating the batch, and against its declaration."""
    declared = bench.reduction
    times = _factor(bench, repeated)
    kind = measured_reduction(bench)
    if times is None or kind is None:
        effect = "another gradient" if times is None else f"{times:.3g} times the loss and its gradient"
        return failed("no reduction", f"neither a mean nor a sum: the batch twice gives {effect}")
    words = f"a {kind.replace('_', ' ')}: the batch twice gives {times:.6g} times the loss and its gradient"
    if declared is None:
        return noted(words)
    if declared is kind:
        return passed(words)
    fault = "sum declared a mean" if declared is Reduction.mean else f"{kind} declared otherwise"
    return failed(fault, f"{words}; declared a {declared.replace('_', ' ')}")


def normalization(bench: Bench) -> CheckResult:
    """The divisor of optim_step fits the measured reduction of the loss."""
    kind, divides = measured_reduction(bench), bench.loss.normalization
    if bench.reduction is None:
        return noted(_advice(kind))
    if kind is None:
        return failed("no normalization", "no normalization fits a loss that is neither a mean nor a sum")
    try:
        check_normalization("the loss", kind, divides)
    except ConfigError as error:
        return failed(f"{kind} divided", str(error).partition(". ")[0])
    if divides is None and kind is not Reduction.mean:
        return noted("a raw sum, divided by nothing: the update grows with the batch; choose the learning rate accordingly")
    return passed(f"a {kind.replace('_', ' ')}, divided by {divides or 'nothing'}")


def _advice(kind: Reduction | None) -> str:
    if kind is None:
        return "call optim_step(grad_accumulation_normalization=None), once the loss is a mean or a sum"
    return f"as a {kind.replace('_', ' ')}, call optim_step(grad_accumulation_normalization={DIVISORS[kind]!r})"


def measured_reduction(bench: Bench) -> Reduction | None:
    """The measured reduction: mean, token sum or sequence sum; None if no reduction fits."""
    times = _factor(bench, repeated)
    if times is None or min(abs(times - 1), abs(times - 2)) > bench.tolerance:
        return None
    if round(times) == 1:
        return Reduction.mean
    longer = _factor(bench, stretched)
    return Reduction.sequence_sum if longer is not None and abs(longer - 1) <= bench.tolerance else Reduction.token_sum


def _factor(bench: Bench, change: Callable[[RandomBatch], RandomBatch]) -> float | None:
    """The factor by which values and gradients grow; None if they also change direction.

    Fitted over all batches together, so that a value near 0 in one batch does no harm. Gradients of a token's copies add.
    """
    once, changed = [], []
    for batch in bench.batches:
        before, after = bench.outcome(batch), bench.outcome(change(batch))
        once.append(_joined(before, flat(before.gradients)))
        changed.append(_joined(after, _folded(before, after)))
    x, y = np.concatenate(once), np.concatenate(changed)
    if not (size := float(x @ x)):
        return None
    times = float(x @ y) / size
    return times if np.linalg.norm(y - times * x) <= bench.tolerance * np.linalg.norm(y) else None


def _joined(outcome: Outcome, gradient: Array) -> Array:
    return np.concatenate([[outcome.value], gradient])


def _folded(before: Outcome, after: Outcome) -> Array:
    """The gradients after every token was doubled, either as a copy of the datum or in its own sequence, summed by token."""
    rows, doubled = ([np.asarray(row) for row in outcome.gradients] for outcome in (before, after))
    if len(doubled) == len(rows):
        return np.concatenate([row[: len(row) // 2] + row[len(row) // 2 :] for row in doubled])
    return flat(doubled[: len(rows)]) + flat(doubled[len(rows) :])


def order(bench: Bench) -> CheckResult:
    """Datums in another order, pairs kept whole where they may be pairs."""
    whole = 1 if bench.loss.scope in (Scope.token, Scope.sequence) else 2
    worst = 0.0
    for index, batch in enumerate(bench.batches):
        units = bench.rng(index, 3).permutation(len(batch.data) // whole)
        places = [whole * int(unit) + part for unit in units for part in range(whole)]
        before, after = bench.outcome(batch), bench.outcome(batch.part(places))
        back = [after.gradients[places.index(place)] for place in range(len(places))]
        worst = max(worst, bench.difference(before, after._replace(gradients=back)))
    if worst > bench.tolerance:
        words = "datums" if whole == 1 else "pairs"
        return failed("order", f"another order of the {words} changes it by {worst:.2g} of its size")
    return passed(f"relative difference {worst:.0e}" + (", pairs kept whole" if whole == 2 else ""))


def padding(bench: Bench) -> CheckResult:
    """Further tokens of weight 0 before and after every sequence."""
    worst = 0.0
    for index, batch in enumerate(bench.batches):
        before, wide = bench.outcome(batch), bench.outcome(padded(batch, bench.rng(index, 4)))
        inner = [row[1:-2] for row in wide.gradients]
        worst = max(worst, bench.difference(before, wide._replace(gradients=inner)))
    if worst > bench.tolerance:
        return failed("padding", f"three more tokens of weight 0 in a sequence change it by {worst:.2g} of its size")
    return passed(f"relative difference {worst:.0e} with three more tokens of weight 0")


def micro_batches(bench: Bench) -> CheckResult:
    """Parts as small as the declared scope allows add up to the whole."""
    scope = bench.loss.scope
    if scope is Scope.batch:
        return noted("declares that it couples the whole batch, so the engine passes all logprobs in one call")
    worst = 0.0
    for batch in bench.batches:
        ready = bench.prepared(batch)
        whole = bench.raw(ready)
        size = 2 if scope is Scope.pair else 1
        parts = [ready.part(range(at, at + size)) for at in range(0, len(ready.data), size)]
        # A mean over pairs or sequences is the mean of its parts; what `prepare` scaled, and single tokens, are added.
        is_mean = bench.reduction is Reduction.mean and not bench.loss.prepares and scope is not Scope.token
        worst = max(worst, bench.difference(whole, _together(bench, parts, len(parts) if is_mean else 1)))
        if scope is Scope.token:
            worst = max(worst, bench.difference(whole, _by_token(bench, ready)))
    if worst > bench.tolerance:
        return failed("micro-batches", f"parts of one {scope} each differ from the whole by {worst:.2g} of its size")
    return passed(f"parts of one {scope} each add up, relative difference {worst:.0e}")


def _together(bench: Bench, parts: Sequence[RandomBatch], divisor: int) -> Outcome:
    outcomes = [bench.raw(part) for part in parts]
    gradients = [[value / divisor for value in row] for outcome in outcomes for row in outcome.gradients]
    return Outcome(sum(outcome.value for outcome in outcomes) / divisor, gradients, {})


def _by_token(bench: Bench, ready: RandomBatch) -> Outcome:
    """Every token alone, in a datum of its own; the gradients in the order of the whole."""
    single = _together(bench, [_tokens(ready)], 1)
    values = iter(flat(single.gradients))
    return single._replace(gradients=[[next(values) for _ in row] for row in ready.logprobs])


def _tokens(ready: RandomBatch) -> RandomBatch:
    data = [
        datum(1, **{key: value.array[[place]] for key, value in row.loss_fn_inputs.items() if key != "target_tokens"})
        for row in ready.data
        for place in range(row.model_input.length)
    ]
    return RandomBatch(data, [row[[place]] for row in ready.logprobs for place in range(len(row))])
