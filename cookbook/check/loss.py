"""All checks of a loss, in order."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cookbook.check import inputs, outputs, reduction
from cookbook.check.bench import REFUSALS, Bench, CheckResult, LossFunction, State, failed

Check = Callable[[Bench], CheckResult]

FIRST_CHECKS: dict[str, Check] = {
    "scalar and finite": outputs.scalar_and_finite,
    "differentiable": outputs.differentiable,
    "repeatable": outputs.repeatable,
}
"""Checks that the others depend on. If one of them fails, the others are skipped."""

LATER_CHECKS: dict[str, Check] = {
    "gradient = slope": outputs.equals_slope,
    "every token trained": outputs.every_token_trained,
    "reduction": reduction.reduction,
    "normalization": reduction.normalization,
    "weight 0 is inert": inputs.masked_tokens_are_inert,
    "order": reduction.order,
    "padding": reduction.padding,
    "micro-batches": reduction.micro_batches,
    "keys": inputs.reads_what_it_declares,
    "missing inputs": inputs.missing_inputs_raise,
    "misaligned inputs": inputs.misaligned_inputs_raise,
    "NaN": inputs.nan_is_noticed,
    "float32": outputs.single_precision,
    "metrics": outputs.metrics,
}


def check_loss(loss: LossFunction, seed: int = 0) -> list[CheckResult]:
    """Check a loss on small random batches of the inputs that it declares.

    Args:
        loss: a :class:`~cookbook.losses.Loss`, or any function ``loss(data, logprobs) -> (scalar, metrics)``. A function
            gets every key that recipes provide; attributes of it may declare more: ``needs``, a set of further keys, and
            ``stop_gradient``, a sentence about what it holds constant.
        seed: of the batches.

    Returns:
        One result per check, in a fixed order. Print the results, or read ``result.failed``.
    """
    bench = Bench(loss, seed)
    results: list[CheckResult] = []
    # The first of FIRST that failed.
    hurdle = ""
    for name, check in {**FIRST_CHECKS, **LATER_CHECKS}.items():
        if hurdle:
            results.append(CheckResult(name, State.skipped, f"not examined: {hurdle!r} comes first"))
            continue
        results.append(_made(bench, name, check))
        hurdle = name if results[-1].failed and name in FIRST_CHECKS else ""
    return results


def _made(bench: Bench, name: str, check: Check) -> CheckResult:
    """Run one check. A loss that raises an error on a valid batch fails it."""
    try:
        return replace(check(bench), check=name)
    except REFUSALS as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        keys = ", ".join(sorted(bench.batches[0].data[0].loss_fn_inputs))
        fault = "KeyError raised" if isinstance(error, KeyError) else "error raised"
        return replace(failed(fault, f"raised {reason}{_place(error)}", keys=keys), check=name)


def _place(error: BaseException) -> str:
    """Return the place of the error in the loss's file, or an empty text if the error was raised elsewhere."""
    bench = Path(__file__).resolve().parent
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    last_own = max(index for index, (path, _) in enumerate(frames) if path.resolve().parent == bench)
    inside = [frame for frame in frames[last_own + 1 :] if "site-packages" not in frame[0].parts]
    return f" ({inside[-1][0].name}:{inside[-1][1]})" if inside else ""
