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
    verdicts = [_made(bench, name, check) for name, check in FIRST.items()]
    if any(verdict.failed for verdict in verdicts):
        # A failure of the first makes the second meaningless as well.
        index = next(index for index, verdict in enumerate(verdicts) if verdict.failed)
        names = [*list(FIRST)[index + 1 :], *THEN]
        skipped = [Verdict(name, State.skipped, f"not examined: {verdicts[index].check!r} comes first") for name in names]
        return [*verdicts[: index + 1], *skipped]
    return [*verdicts, *(_made(bench, name, check) for name, check in THEN.items())]


def _made(bench: Bench, name: str, check: Check) -> Verdict:
    """The verdict, also where the loss raises on a batch that is in order."""
    try:
        verdict = check(bench)
    except REFUSALS as error:
        keys = ", ".join(sorted(bench.draws[0].data[0].loss_fn_inputs))
        verdict = failed(
            f"raised {type(error).__name__}: {str(error).partition(chr(10))[0]}{_place(error)}",
            "a batch that is in order stops the run",
            f"the datums carried {keys}" + ("; a function declares further ones as my_loss.needs = {'key'}" * _is_key(error)),
        )
    return replace(verdict, check=name)


def _is_key(error: BaseException) -> bool:
    return isinstance(error, KeyError)


def _place(error: BaseException) -> str:
    """Where in the user's file, or nothing when it was raised in one of ours."""
    own = Path(__file__).resolve().parent
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).resolve().parent != own]
    mine = [frame for frame in frames if "site-packages" not in frame.filename]
    return f" ({Path(mine[-1].filename).name}:{mine[-1].lineno})" if mine else ""
