"""Checks of what a loss reads, and of what it does with batches that are not in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from cookbook.check import measure
from cookbook.check.bench import Bench
from cookbook.check.draws import USUAL, Draw, random_draw, unchecked, without
from cookbook.check.measure import Outcome
from cookbook.check.recorded import RecordedDatum
from cookbook.check.verdict import REFUSALS, Verdict, failed, noted, passed
from cookbook.types import Array, Datum

JUNK = (-3.0, 40.0, -1e30)
"""What may stand at tokens of weight 0. The last makes ``0 * exp(...)`` not a number, where a loss multiplies too late."""


def masked_tokens_are_inert(bench: Bench) -> Verdict:
    """Other logprobs and inputs at tokens of weight 0 change no bit, and these tokens have no gradient."""
    harm = "prompts are trained, or what stands at them by chance is part of the update"
    for draw in bench.draws:
        before = bench.outcome(draw)
        for row, mask in zip(before.gradients, draw.masked, strict=True):
            if np.asarray(row)[mask].any():
                return failed("tokens of weight 0 have a gradient", harm, "multiply every token's term by its weight")
        keys = ["", *_per_token(draw)]
        for junk in JUNK:
            if _same(bench, before, _with_junk(draw, keys, junk)):
                continue
            guilty = [key or "logprobs" for key in keys if not _same(bench, before, _with_junk(draw, [key], junk))]
            return failed(
                f"{', '.join(guilty) or 'all inputs together'} of {junk:g} at tokens of weight 0 change the result",
                harm,
                "take them out before any exp or mean: torch.where(weights != 0, x, 0.0); 0 * inf is not a number",
            )
    return passed("no bit changes, whatever stands there")


def _per_token(draw: Draw) -> list[str]:
    """The keys of the draw's datums with a value per token, but for targets and weights."""
    inputs = draw.data[0].loss_fn_inputs
    return sorted(key for key, value in inputs.items() if value.shape and key not in ("target_tokens", "weights"))


def _with_junk(draw: Draw, keys: Sequence[str], junk: float) -> Draw:
    for key in keys:
        draw = draw.mapped(key, lambda values, mask: np.where(mask, junk, values))
    return draw


def _same(bench: Bench, before: Outcome, draw: Draw) -> bool:
    after = _tried(lambda: bench.outcome(draw))
    return after is not None and (after.value, after.gradients) == (before.value, before.gradients)


def _tried(attempt: Callable[[], Outcome]) -> Outcome | None:
    """What comes of it; None when the loss refuses."""
    try:
        return attempt()
    except REFUSALS:
        return None


def keys_read(bench: Bench) -> set[str]:
    """The keys whose values the loss takes, of all that its batches and the recipes' have."""
    read: set[str] = set()
    for keys in (*bench.kits, *(kit | USUAL for kit in bench.kits)):
        draw = random_draw(bench.rng(len(keys)), keys)
        bench.outcome(Draw([RecordedDatum(one, read) for one in draw.data], draw.logprobs))
    return read


def reads_what_it_declares(bench: Bench) -> Verdict:
    """No other key, and all that it needs."""
    known, read = bench.passport, keys_read(bench)
    listed = ", ".join(sorted(read)) or "no key"
    if "weights" not in read:
        return failed(
            f"reads {listed}, and never weights",
            "prompts are trained like answers, and no token can count for less",
            "multiply every token's term by datum.loss_fn_inputs['weights']",
        )
    if known.reduction is None:
        return noted(f"reads {listed}")
    if undeclared := sorted(read - known.knows):
        return failed(
            f"reads {', '.join(undeclared)}, which it does not declare",
            "a recipe that does not provide it is accepted, and fails or goes another way at the first step",
            "add it to `needs`, or to `reads` when the loss can do without (a reference: needs_reference)",
        )
    if unread := sorted(known.needs - read - {"target_tokens"}):
        return noted(f"reads {listed}; never {', '.join(unread)}, which it declares to need")
    return passed(f"reads {listed}")


def missing_inputs_raise(bench: Bench) -> Verdict:
    """A needed key that is missing, in one datum or in all, is an error; nothing is taken for a logprob of 0."""
    harm = "a batch without it trains on invented numbers: a logprob of 0.0 says the token was certain"
    draw = bench.draws[0]
    whole = bench.outcome(draw)
    for key in sorted((keys_read(bench) | bench.passport.needs) & set(_per_token(draw))):
        for places, which in ((range(len(draw.data)), "all datums"), ([1], "one datum")):
            lacking = Draw([without(one, key) if i in places else one for i, one in enumerate(draw.data)], draw.logprobs)
            result = _tried(lambda lacking=lacking: bench.outcome(lacking))  # type: ignore[misc]
            if result is None:
                continue
            if _is_no_zero(key) and not _equal(result, whole) and _same(bench, result, _zeroed(draw, key, places)):
                return failed(
                    f"{key} missing in {which} is taken for 0.0", harm, f"take loss_fn_inputs[{key!r}], with no default"
                )
            if key in bench.passport.needs:
                return failed(f"works without {key} in {which}, which it needs", harm, "raise DataError, or move it to `reads`")
    return passed("every needed key is asked for")


def _is_no_zero(key: str) -> bool:
    """Whether 0 is no sensible default of the key."""
    return key.endswith("logprobs") or key == "advantages"


def _zeroed(draw: Draw, key: str, places: Sequence[int]) -> Draw:
    data = [
        one.with_inputs(**{key: np.zeros_like(one.loss_fn_inputs[key].array)}) if index in places else one
        for index, one in enumerate(draw.data)
    ]
    return Draw(data, draw.logprobs)


def _equal(one: Outcome, other: Outcome) -> bool:
    return (one.value, one.gradients) == (other.value, other.gradients)


def misaligned_inputs_raise(bench: Bench) -> Verdict:
    """Arrays of another length than the logprobs are refused; nothing is cut or padded to fit."""
    harm = "a mistake in building the data is trained on in silence, one token off"
    remedy = "no min(len(a), len(b)), no [:n], no zip without strict=True, no pad; cookbook.losses.base.Batch checks lengths"
    draw = bench.draws[0]
    # A datum whose last token counts, so that cutting it shows.
    index = next((i for i, mask in enumerate(draw.masked) if not mask[-1]), 0)
    matters = []
    for key in ["weights", *_per_token(draw)]:
        values = draw.data[index].loss_fn_inputs[key].array
        shorter = _with_datum(draw, index, unchecked(draw.data[index], **{key: _tensor(draw, index, key, values[:-1])}))
        result = _tried(lambda shorter=shorter: bench.outcome(shorter))  # type: ignore[misc]
        if result is None:
            matters.append(key)
        elif not _equal(result, bench.outcome(draw)):
            return failed(f"{key} one value short is cut or padded to fit", harm, remedy)
    if not matters:
        return noted("reads no value per token")
    logprobs = [row[:-1] if i == index else row for i, row in enumerate(draw.logprobs)]
    if _tried(lambda: bench.outcome(Draw(draw.data, logprobs))) is not None:
        return failed("logprobs one value short are accepted beside longer inputs", harm, remedy)
    return passed("refused")


def _with_datum(draw: Draw, index: int, datum: Datum) -> Draw:
    return Draw([datum if i == index else one for i, one in enumerate(draw.data)], draw.logprobs)


def _tensor(draw: Draw, index: int, key: str, values: Array) -> object:
    return type(draw.data[index].loss_fn_inputs[key])(values)


def nan_is_noticed(bench: Bench) -> Verdict:
    """NaN at a trained token is refused, or reaches the value or the gradient, where the trainer refuses it."""
    draw = bench.draws[0]
    for key in ["weights", *_per_token(draw)]:
        holed, moved = (_changed_at_trained(draw, key, change) for change in (lambda x: math.nan, lambda x: x + 0.1))
        result = _tried(lambda holed=holed: bench.outcome(holed))  # type: ignore[misc]
        other = _tried(lambda moved=moved: bench.outcome(moved))  # type: ignore[misc]
        matters = other is not None and not _equal(other, bench.outcome(draw))
        if result is not None and matters and _finite(result):
            return failed(
                f"NaN in {key} gives a finite result",
                "broken data, or a sampler's fault, trains in silence",
                "take nan_to_num, and comparisons that swallow NaN, out; cookbook.losses.base.Batch refuses NaN",
            )
    return passed("refused, or seen in the result")


def _changed_at_trained(draw: Draw, key: str, change: Callable[[float], float]) -> Draw:
    """With another value at the first trained token of the first datum."""
    place = int(np.flatnonzero(~draw.masked[0])[0])
    values = draw.data[0].loss_fn_inputs[key].array.astype(np.float64)
    values[place] = change(values[place])
    return _with_datum(draw, 0, draw.data[0].with_inputs(**{key: values}))


def _finite(outcome: Outcome) -> bool:
    return math.isfinite(outcome.value) and bool(np.isfinite(measure.flat(outcome.gradients)).all())
