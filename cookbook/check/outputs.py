"""Checks of what a loss returns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cookbook.check import measure
from cookbook.check.bench import Bench
from cookbook.check.verdict import Verdict, failed, passed

SINGLE = 1e-4  # relative: a few hundred rounding errors of float32


def scalar_and_finite(bench: Bench) -> Verdict:
    """``(scalar tensor, metrics)``, and a finite number."""
    values = []
    for draw in bench.draws:
        ready = bench.prepared(draw)
        leaves = [torch.tensor(row, requires_grad=True) for row in ready.logprobs]
        result: Any = bench.call(ready.data, leaves)
        if problem := _not_a_result(result):
            return failed(problem, "the trainer refuses it at the first step", "return (scalar tensor, dict of metrics)")
        values.append(float(result[0].detach()))
    if not np.isfinite(values).all():
        bad = next(value for value in values if not math.isfinite(value))
        return failed(
            f"{bad} for an ordinary batch",
            "the trainer stops, naming the datums",
            "look for log or division of 0, and for exp of what may be large",
        )
    return passed(f"{len(values)} batches, values from {min(values):.3g} to {max(values):.3g}")


def _not_a_result(result: Any) -> str:
    """What is wrong with what a loss returned; empty when nothing is."""
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        return f"returned a {type(result).__name__} that is not (scalar, metrics)"
    value = result[0]
    if not isinstance(value, Tensor):
        return f"the value is a {type(value).__name__}, not a tensor"
    return "" if value.numel() == 1 else f"the value has shape {tuple(value.shape)}"


def repeatable(bench: Bench) -> Verdict:
    """The same batch gives the same bits, and is left as it was."""
    for draw in bench.draws:
        ready = bench.prepared(draw)
        before = [{key: value.array.copy() for key, value in one.loss_fn_inputs.items()} for one in ready.data]
        first, second = bench.raw(ready), bench.raw(ready)
        for one, arrays in zip(ready.data, before, strict=True):
            for key, array in arrays.items():
                if not np.array_equal(array, one.loss_fn_inputs[key].array, equal_nan=True):
                    return failed(
                        f"it writes into the datum's {key}",
                        "the next pass over the same datum, or the next epoch, trains on other numbers",
                        "work on a copy: to_torch() shares its memory, so no += and no method that ends in _",
                    )
        if (first.value, first.gradients) != (second.value, second.gradients):
            return failed(
                f"{first.value:.12g}, then {second.value:.12g} for the same batch",
                "a resumed run goes elsewhere, and nothing can be compared",
                "draw no random numbers in a loss, and keep no state in it",
            )
    return passed("the same bits again, and the batch as it was")


def single_precision(bench: Bench) -> Verdict:
    """Runs compute in float32."""
    worst = 0.0
    for draw in bench.draws:
        double, single = bench.outcome(draw), bench.outcome(draw, torch.float32)
        if not np.isfinite(measure.flat(single.gradients)).all() or not math.isfinite(single.value):
            worst = math.inf
            break
        worst = max(worst, bench.difference(double, single))
    if worst > SINGLE:
        return failed(
            f"relative difference {worst:.1e}",
            "runs compute in float32, where this is noise in every update",
            "use expm1, log1p and logsigmoid, and subtract before you exponentiate",
        )
    return passed(f"relative difference at most {worst:.1e}")


def metrics(bench: Bench) -> Verdict:
    """Names and finite numbers."""
    names: dict[str, None] = {}
    for draw in bench.draws:
        for name, value in bench.outcome(draw).metrics.items():
            if problem := _not_a_metric(value):
                return failed(f"{name!r} {problem}", "the run stops, or its curves have holes", "make it one finite float")
            names[name] = None
    return passed(", ".join(names) or "none")


def _not_a_metric(value: Any) -> str:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            return f"is a tensor of shape {tuple(value.shape)}"
        value = value.detach().item()
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return f"is a {type(value).__name__}"
    return "" if math.isfinite(value) else f"is {value}"
