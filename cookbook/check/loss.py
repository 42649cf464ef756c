"""Every check of a loss, in the order in which they make sense."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cookbook.check import gradients, inputs, outputs, sums
from cookbook.check.bench import Bench
from cookbook.check.measure import LossFunction
from cookbook.check.verdict import REFUSALS, State, Verdict, failed

Check = Callable[[Bench], Verdict]

FIRST: dict[str, Check] = {
    "scalar and finite": outputs.scalar_and_finite,
    "differentiable": gradients.differentiable,
    "repeatable": outputs.repeatable,
}
"""What the other checks build on: they are not made where one of these fails."""

THEN: dict[str, Check] = {
    "gradient = slope": gradients.equals_slope,
    "every token trained": gradients.every_token_trained,
    "reduction": sums.reduction,
    "normalization": sums.normalization,
    "weight 0 is inert": inputs.masked_tokens_are_inert,
    "order": sums.order,
    "padding": sums.padding,
    "micro-batches": sums.micro_batches,
    "keys": inputs.reads_what_it_declares,
    "missing inputs": inputs.missing_inputs_raise,
    "misaligned inputs": inputs.misaligned_inputs_raise,
    "NaN": inputs.nan_is_noticed,
    "float32": outputs.single_precision,
    "metrics": outputs.metrics,
}


def check_loss(loss: LossFunction, seed: int = 0) -> list[Verdict]:
    """Examines a loss on small random batches of the inputs it declares.

    Args:
        loss: a :class:`~cookbook.losses.Loss`, or any function ``loss(data, logprobs) -> (scalar, metrics)``. A function
            gets every key that recipes provide; attributes of it may declare more: ``needs``, a set of further keys, and
            ``stop_gradient``, a sentence about what it holds constant.
        seed: of the batches.

    Returns:
        A verdict per check, in a fixed order. Print them, or ask ``verdict.failed``.
    """
    bench = Bench(loss, seed)
    verdicts: list[Verdict] = []
    hurdle = ""  # the first of FIRST that failed
    for name, check in {**FIRST, **THEN}.items():
        if hurdle:
            verdicts.append(Verdict(name, State.skipped, f"not examined: {hurdle!r} comes first"))
            continue
        verdicts.append(_made(bench, name, check))
        hurdle = name if verdicts[-1].failed and name in FIRST else ""
    return verdicts


def _made(bench: Bench, name: str, check: Check) -> Verdict:
    """The verdict, also where the loss raises on a batch that is in order."""
    try:
        return replace(check(bench), check=name)
    except REFUSALS as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        keys = ", ".join(sorted(bench.draws[0].data[0].loss_fn_inputs))
        remedy = f"the datums carried {keys}"
        if isinstance(error, KeyError):
            remedy += "; a function declares further ones as my_loss.needs = {'key'}"
        verdict = failed(f"raised {reason}{_place(error)}", "a batch that is in order stops the run", remedy)
        return replace(verdict, check=name)


def _place(error: BaseException) -> str:
    """Where in the loss's file; nothing when the error was raised outside of it."""
    bench = Path(__file__).resolve().parent
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    last_own = max(index for index, (path, _) in enumerate(frames) if path.resolve().parent == bench)
    inside = [frame for frame in frames[last_own + 1 :] if "site-packages" not in frame[0].parts]
    return f" ({inside[-1][0].name}:{inside[-1][1]})" if inside else ""
