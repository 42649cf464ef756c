"""``failed_batch/`` of a run folder: what a call was given whose loss or gradient came out NaN or infinite, to look at."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook import atomic
from cookbook.data import Renderer, RowDatum
from cookbook.errors import CookbookError, DataError, NonFiniteError
from cookbook.futures import Future
from cookbook.protocols import TrainingClient
from cookbook.types import Datum

log = logging.getLogger("cookbook")

FOLDER = "failed_batch"
SHOWN = 4  # rows named in the message


@dataclass(frozen=True)
class Call:
    """A call of the trainer for the ``step``-th optimizer step. An ``update`` is of all the data since the one before it."""

    step: int
    data: Sequence[Datum]
    future: Future[Any]
    update: bool = False

    def succeeded(self) -> bool:
        return self.future.done() and self.future.failure() is None


class Calls:
    """The calls that may still fail, and those that have, since training last got on."""

    def __init__(self) -> None:
        self._calls: deque[Call] = deque()

    def add(self, call: Call) -> None:
        while any(one.update and one.succeeded() for one in self._calls) or (self._calls and self._calls[0].succeeded()):
            self._calls.popleft()
        self._calls.append(call)

    def failed(self) -> Call | None:
        """The first that has: what goes wrong after it, here or elsewhere, comes of it."""
        return next((call for call in self._calls if call.future.failure() is not None), None)


def explained(error: CookbookError, calls: Calls, out: Path, trainer: TrainingClient, renderer: Renderer) -> BaseException:
    """What a run that ends with ``error`` is to say: the error of the call that failed first, if one did; and where numbers of
    its batch are at fault, of which rows they are and where the batch is.
    """
    call = calls.failed()
    cause = call and call.future.exception()  # so that it counts as read
    if call is None or not call.data or not isinstance(cause, NonFiniteError | DataError):
        return cause or error
    blamed = _blamed(cause)
    rows = _rows(call.data, blamed)
    path = out / FOLDER / f"step-{call.step:06d}.jsonl"
    try:
        path.parent.mkdir(exist_ok=True)
        atomic.write_text(path, _lines(call, blamed, trainer, renderer))
    except OSError as reason:
        log.warning("%s: cannot be written: %s", path, reason.strerror)
        return type(cause)(f"step {call.step}: {cause} ({rows})")
    return type(cause)(f"step {call.step}: {cause} ({rows}; the batch is in {path})")


def _blamed(error: CookbookError) -> Sequence[int]:
    if isinstance(error, NonFiniteError):
        return error.datums
    found = re.match(r"datum (\d+)\b", str(error))
    return [int(found[1])] if found else []


def _rows(data: Sequence[Datum], blamed: Sequence[int]) -> str:
    """The rows of the datums to blame, or of all."""
    found = dict.fromkeys(_where(data[index]) for index in blamed or range(len(data)))
    places = [place for place in found if place]
    shown = ", ".join(places[:SHOWN]) + (", ..." if len(places) > SHOWN else "")
    count = f"{len(data)} datums" if not blamed else ""
    return " of ".join(part for part in (count, shown) if part) or f"{len(data)} datums"


def _where(datum: Datum) -> str:
    return datum.where if isinstance(datum, RowDatum) else ""


def _lines(call: Call, blamed: Sequence[int], trainer: TrainingClient, renderer: Renderer) -> str:
    """One JSON object per datum. ``logprobs`` are those under the weights as they are, which is before the update."""
    logprobs: Sequence[Any] = [None] * len(call.data)
    with contextlib.suppress(CookbookError, RuntimeError):  # the trainer may be unable to do that much
        output = trainer.forward(call.data, "cross_entropy").result()
        logprobs = [row["logprobs"].tolist() for row in output.loss_fn_outputs]
    lines = []
    for index, (datum, found) in enumerate(zip(call.data, logprobs, strict=True)):
        tokens = datum.model_input.to_ints()
        row = {
            "step": call.step,
            "datum": index,
            "row": _where(datum),
            "blamed": index in blamed,
            "text": renderer.tokenizer.decode(tokens),
            "tokens": tokens,
            **{key: tensor.tolist() for key, tensor in datum.loss_fn_inputs.items()},
            "logprobs": found,
        }
        lines.append(json.dumps(_spelled(row), ensure_ascii=False) + "\n")
    return "".join(lines)


def _spelled(value: Any) -> Any:
    """JSON has no NaN and no infinity, and they are what one looks for here."""
    if isinstance(value, dict):
        return {key: _spelled(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_spelled(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
