"""Checks of the inputs that a loss reads, and of its answers to invalid batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from cookbook.check.batches import USUAL_KEYS, RandomBatch, RecordedDatum, random_batch, unchecked, without
from cookbook.check.bench import Bench, CheckResult, Outcome, failed, noted, passed

JUNK_VALUES = (-3.0, 40.0, -1e30)
"""Values to put at tokens of weight 0. The last makes ``0 * exp(...)`` NaN if a loss applies the weights too late."""


def masked_tokens_are_inert(bench: Bench) -> CheckResult:
    """Other logprobs and inputs at tokens of weight 0 change no bit, and these tokens have no gradient."""
    for batch in bench.batches:
        before = bench.outcome(batch)
        for row, mask in zip(before.gradients, batch.masked, strict=True):
            if np.asarray(row)[mask].any():
                return failed("masked gradient", "tokens of weight 0 have a gradient")
        keys = ["", *_per_token(batch)]
        for junk in JUNK_VALUES:
            if _same(bench, before, _with_junk(batch, keys, junk)):
                continue
            guilty = [key or "logprobs" for key in keys if not _same(bench, before, _with_junk(batch, [key], junk))]
            names = ", ".join(guilty) or "all inputs together"
            return failed("masked value", f"{names} of {junk:g} at tokens of weight 0 change the result")
    return passed("no bit changes, for any values")


def _per_token(batch: RandomBatch) -> list[str]:
    """The keys of the batch's datums with a value per token, except targets and weights."""
    inputs = batch.data[0].loss_fn_inputs
    return sorted(key for key, value in inputs.items() if value.shape and key not in ("target_tokens", "weights"))


def _with_junk(batch: RandomBatch, keys: Sequence[str], junk: float) -> RandomBatch:
    for key in keys:
        batch = batch.mapped(key, lambda values, mask: np.where(mask, junk, values))
    return batch


def _same(bench: Bench, before: Outcome, batch: RandomBatch) -> bool:
    after = bench.tried(batch)
    return after is not None and after.equals(before)


def keys_read(bench: Bench) -> set[str]:
    """The keys whose values the loss reads, of those in the checks' batches and in the recipes' datums."""
    read: set[str] = set()
    for keys in (*bench.kits, *(kit | USUAL_KEYS for kit in bench.kits)):
        batch = random_batch(bench.rng(len(keys)), keys)
        bench.outcome(RandomBatch([RecordedDatum(datum, read) for datum in batch.data], batch.logprobs))
    return read


def reads_what_it_declares(bench: Bench) -> CheckResult:
    """The loss reads its declared keys only, and all that it needs."""
    read = keys_read(bench)
    listed = ", ".join(sorted(read)) or "no key"
    if "weights" not in read:
        return failed("weights ignored", f"reads {listed}, and never weights")
    if bench.reduction is None:
        return noted(f"reads {listed}")
    if undeclared := sorted(read - bench.declared_keys):
        return failed("undeclared key", f"reads {', '.join(undeclared)}, which it does not declare")
    if unread := sorted(bench.loss.required - read - {"target_tokens"}):
        return noted(f"reads {listed}; never {', '.join(unread)}, which it declares to need")
    return passed(f"reads {listed}")


def missing_inputs_raise(bench: Bench) -> CheckResult:
    """A needed key that is missing, in one datum or in all, is an error; it is not replaced by 0."""
    batch = bench.batches[0]
    whole = bench.outcome(batch)
    for key in sorted((keys_read(bench) | bench.loss.required) & set(_per_token(batch))):
        for places, which in ((range(len(batch.data)), "all datums"), ([1], "one datum")):
            datums = {place: batch.data[place] for place in places}
            result = bench.tried(batch.with_datums({place: without(datum, key) for place, datum in datums.items()}))
            if result is None:
                continue
            zeros = {
                place: datum.with_inputs(**{key: np.zeros_like(datum.loss_fn_inputs[key].array)})
                for place, datum in datums.items()
            }
            # For other keys 0 may be a default.
            is_no_zero = key.endswith("logprobs") or key == "advantages"
            if is_no_zero and not result.equals(whole) and _same(bench, result, batch.with_datums(zeros)):
                return failed("missing key taken for 0", f"{key} missing in {which} is taken for 0.0", key=key)
            if key in bench.loss.required:
                return failed("missing key accepted", f"works without {key} in {which}, which it needs")
    return passed("a needed key that is missing is an error")


def misaligned_inputs_raise(bench: Bench) -> CheckResult:
    """Arrays of another length than the logprobs are refused; nothing is cut or padded to fit."""
    batch = bench.batches[0]
    # A datum whose last token counts, so that cutting it shows.
    index = next((i for i, mask in enumerate(batch.masked) if not mask[-1]), 0)
    matters = []
    for key in ["weights", *_per_token(batch)]:
        values = batch.data[index].loss_fn_inputs[key]
        shorter = unchecked(batch.data[index], **{key: type(values)(values.array[:-1])})
        result = bench.tried(batch.with_datums({index: shorter}))
        if result is None:
            matters.append(key)
        elif not result.equals(bench.outcome(batch)):
            return failed("misaligned", f"{key} one value short is cut or padded to fit")
    if not matters:
        return noted("reads no value per token")
    logprobs = [row[:-1] if i == index else row for i, row in enumerate(batch.logprobs)]
    if bench.tried(RandomBatch(batch.data, logprobs)) is not None:
        return failed("misaligned", "logprobs one value short are accepted beside longer inputs")
    return passed("refused")


def nan_is_noticed(bench: Bench) -> CheckResult:
    """NaN at a trained token raises an error, or makes the value or the gradient NaN, which the trainer rejects."""
    batch = bench.batches[0]
    for key in ["weights", *_per_token(batch)]:
        holed, moved = (_changed_at_trained(batch, key, change) for change in (lambda x: math.nan, lambda x: x + 0.1))
        result, result_of_moved = bench.tried(holed), bench.tried(moved)
        matters = result_of_moved is not None and not result_of_moved.equals(bench.outcome(batch))
        if result is not None and matters and result.finite:
            return failed("nan hidden", f"NaN in {key} gives a finite result")
    return passed("refused, or seen in the result")


def _changed_at_trained(batch: RandomBatch, key: str, change: Callable[[float], float]) -> RandomBatch:
    """The batch with another value at the first trained token of the first datum."""
    place = int(np.flatnonzero(~batch.masked[0])[0])
    values = batch.data[0].loss_fn_inputs[key].array.astype(np.float64)
    values[place] = change(values[place])
    return batch.with_datums({0: batch.data[0].with_inputs(**{key: values})})
