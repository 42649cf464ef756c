"""Checks of how a loss adds up: over a batch that is repeated, divided, padded, or put in another order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cookbook.check import measure
from cookbook.check.bench import Bench
from cookbook.check.draws import Draw, datum, padded, repeated, stretched
from cookbook.check.measure import Outcome
from cookbook.check.verdict import Verdict, failed, noted, passed
from cookbook.errors import ConfigError
from cookbook.losses.base import Scope
from cookbook.normalization import Normalization, Reduction
from cookbook.normalization import check as check_normalization
from cookbook.types import Array

# What a sum does that nothing divides, a mean that is divided again, and so on.
TWICE = "optim_step divides again what is a mean already: the update shrinks as if the learning rate were divided by the count"


def reduction(bench: Bench) -> Verdict:
    """Measured by repeating the batch, and against its declaration."""
    declared = bench.passport.reduction
    times = _factor(bench, repeated)
    kind = measured_reduction(bench)
    if times is None or kind is None:
        seen = "another gradient" if times is None else f"{times:.3g} times the loss and its gradient"
        return failed(
            f"neither a mean nor a sum: the batch twice gives {seen}",
            "the size of an update depends on the batch in a way that no normalization undoes",
            "divide by one count only, in `prepare` (weights_to_mean) or not at all, and couple no datums beyond their scope",
        )
    words = f"a {kind.replace('_', ' ')}: the batch twice gives {times:.6g} times the loss and its gradient"
    if declared is None:
        return noted(words)
    if declared is kind:
        return passed(words)
    told = f"{words}; declared a {declared.replace('_', ' ')}"
    if declared is Reduction.mean:
        return failed(
            told,
            "nothing divides it: the update grows with the batch, and so does the learning rate in effect",
            "declare reduction = Reduction.token_sum with normalization num_loss_tokens, or make weights_to_mean its `prepare`",
        )
    if kind is Reduction.token_sum:
        return failed(
            told,
            "a sequence counts by its length, and num_sequences does not divide that away",
            "declare reduction = Reduction.token_sum with normalization num_loss_tokens, or take means over sequences",
        )
    if kind is Reduction.sequence_sum:
        return failed(
            told,
            "it is divided by the length already; num_loss_tokens divides by it again",
            "declare reduction = Reduction.sequence_sum with normalization num_sequences, or sum over the tokens",
        )
    return failed(told, TWICE, "take the division out, or declare reduction = Reduction.mean with normalization None")


def normalization(bench: Bench) -> Verdict:
    """What optim_step would divide by goes with what the loss returns, as measured."""
    kind, divides = measured_reduction(bench), bench.passport.normalization
    if bench.passport.reduction is None:
        return noted(_advice(kind))
    if kind is None:
        return failed("nothing goes with what is neither mean nor sum", "see reduction", "see reduction")
    try:
        check_normalization("the loss", kind, divides)
    except ConfigError as error:
        harm = TWICE if kind is Reduction.mean else "it is divided by the length already; num_loss_tokens divides by it again"
        return failed(str(error).partition(". ")[0], harm, f"set normalization to {_divisor(kind)}")
    if divides is None and kind is not Reduction.mean:
        return noted("a raw sum, divided by nothing: the update grows with the batch; the learning rate has to know")
    return passed(f"a {kind.replace('_', ' ')}, divided by {divides or 'nothing'}")


def _divisor(kind: Reduction) -> str:
    return {Reduction.mean: "None", Reduction.sequence_sum: str(Normalization.num_sequences)}.get(
        kind, str(Normalization.num_loss_tokens)
    )


def _advice(kind: Reduction | None) -> str:
    if kind is None:
        return "call optim_step(grad_accumulation_normalization=None), once the loss is a mean or a sum"
    name = _divisor(kind)
    value = name if name == "None" else f"'{name}'"
    return f"as a {kind.replace('_', ' ')}, call optim_step(grad_accumulation_normalization={value})"


def measured_reduction(bench: Bench) -> Reduction | None:
    """Mean, token sum or sequence sum; None when it is none of them."""
    times = _factor(bench, repeated)
    if times is None or min(abs(times - 1), abs(times - 2)) > bench.tolerance:
        return None
    if round(times) == 1:
        return Reduction.mean
    longer = _factor(bench, stretched)
    return Reduction.sequence_sum if longer is not None and abs(longer - 1) <= bench.tolerance else Reduction.token_sum


def _factor(bench: Bench, change: Callable[[Draw], Draw]) -> float | None:
    """How many times as large values and gradients become; None when they change direction as well.

    Fitted over all batches at once, so a value near 0 in one of them does no harm. Gradients of a token's copies add.
    """
    once, changed = [], []
    for draw in bench.draws:
        before, after = bench.outcome(draw), bench.outcome(change(draw))
        once.append(_joined(before, measure.flat(before.gradients)))
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
    return measure.flat(doubled[: len(rows)]) + measure.flat(doubled[len(rows) :])


def order(bench: Bench) -> Verdict:
    """Datums in another order, pairs kept whole where they may be pairs."""
    whole = 1 if bench.passport.scope in (Scope.token, Scope.sequence) else 2
    worst = 0.0
    for index, draw in enumerate(bench.draws):
        units = bench.rng(index, 3).permutation(len(draw.data) // whole)
        places = [whole * int(unit) + part for unit in units for part in range(whole)]
        before, after = bench.outcome(draw), bench.outcome(draw.part(places))
        back = [after.gradients[places.index(place)] for place in range(len(places))]
        worst = max(worst, bench.difference(before, after._replace(gradients=back)))
    if worst > bench.tolerance:
        return failed(
            f"another order of the {'datums' if whole == 1 else 'pairs'} changes it by {worst:.2g} of its size",
            "the same rows teach something else whenever they are shuffled",
            "use what stands in the datum, not its place in the batch; what belongs together are pairs (Scope.pair)",
        )
    return passed(f"relative difference {worst:.0e}" + (", pairs kept whole" if whole == 2 else ""))


def padding(bench: Bench) -> Verdict:
    """Further tokens of weight 0 before and behind every sequence."""
    worst = 0.0
    for index, draw in enumerate(bench.draws):
        before, wide = bench.outcome(draw), bench.outcome(padded(draw, bench.rng(index, 4)))
        inner = [row[1:-2] for row in wide.gradients]
        worst = max(worst, bench.difference(before, wide._replace(gradients=inner)))
    if worst > bench.tolerance:
        return failed(
            f"three more tokens of weight 0 in a sequence change it by {worst:.2g} of its size",
            "a longer prompt, or padding, makes every update of the same answer smaller or larger",
            "divide by the sum of the weights, not by the number of tokens; and read nothing at weight 0",
        )
    return passed(f"relative difference {worst:.0e} with three more tokens of weight 0")


def micro_batches(bench: Bench) -> Verdict:
    """Parts as small as the declared scope allows add up to the whole."""
    scope = bench.passport.scope
    if scope is Scope.batch:
        return noted("couples the whole batch, as far as it says: the engine hands it all logprobs at once")
    worst = 0.0
    for draw in bench.draws:
        ready = bench.prepared(draw)
        whole = bench.raw(ready)
        size = 2 if scope is Scope.pair else 1
        parts = [ready.part(range(at, at + size)) for at in range(0, len(ready.data), size)]
        # A mean over pairs or sequences is the mean of its parts; what `prepare` scaled, and single tokens, are added.
        is_mean = bench.passport.reduction is Reduction.mean and not bench.passport.prepares and scope is not Scope.token
        worst = max(worst, bench.difference(whole, _together(bench, parts, len(parts) if is_mean else 1)))
        if scope is Scope.token:
            worst = max(worst, bench.difference(whole, _by_token(bench, ready)))
    if worst > bench.tolerance:
        return failed(
            f"parts of one {scope} each differ from the whole by {worst:.2g} of its size",
            "the update depends on backend.micro_batch_tokens, that is, on memory",
            "declare the scope it has (sequence, pair or batch); or scale the weights of the whole step in `prepare`",
        )
    return passed(f"parts of one {scope} each add up, relative difference {worst:.0e}")


def _together(bench: Bench, parts: Sequence[Draw], divisor: int) -> Outcome:
    found = [bench.raw(part) for part in parts]
    gradients = [[value / divisor for value in row] for one in found for row in one.gradients]
    return Outcome(sum(one.value for one in found) / divisor, gradients, {})


def _by_token(bench: Bench, ready: Draw) -> Outcome:
    """Every token alone, in a datum of its own; the gradients in the order of the whole."""
    single = _together(bench, [_tokens(ready)], 1)
    values = iter(measure.flat(single.gradients))
    return single._replace(gradients=[[next(values) for _ in row] for row in ready.logprobs])


def _tokens(ready: Draw) -> Draw:
    data = [
        datum(1, **{key: value.array[[place]] for key, value in one.loss_fn_inputs.items() if key != "target_tokens"})
        for one in ready.data
        for place in range(one.model_input.length)
    ]
    return Draw(data, [row[[place]] for row in ready.logprobs for place in range(len(row))])
