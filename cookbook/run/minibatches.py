"""Parts of one batch of rollouts, each for an optimizer step of its own, and their form in a checkpoint."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from cookbook.data import RowDatum
from cookbook.types import Array, Datum, JsonObject, ModelInput


def split(data: Sequence[Datum], count: int) -> list[list[Datum]]:
    """Return ``count`` parts of ``data`` of nearly equal size: part i has the datums i, i + count, i + 2 count, ...

    Consecutive datums are completions of one prompt, so every part has some of each prompt. Parts are empty if there are fewer
    datums than parts.
    """
    return [list(data[start::count]) for start in range(count)]


def state(minibatches: Sequence[Sequence[Datum]]) -> JsonObject:
    """Return the minibatches as JSON-compatible values, from which :func:`restored` makes the same bits."""
    arrays: dict[str, Array] = {}
    rows = []
    for number, datum in enumerate(datum for part in minibatches for datum in part):
        arrays[f"{number}/"] = np.asarray(datum.model_input.to_ints(), np.int64)
        arrays |= {f"{number}/{name}": tensor.array for name, tensor in datum.loss_fn_inputs.items()}
        rows.append([datum.where, datum.question] if isinstance(datum, RowDatum) else None)
    file = io.BytesIO()
    np.savez_compressed(file, **cast("dict[str, Any]", arrays))
    return {"sizes": [len(part) for part in minibatches], "rows": rows, "arrays": base64.b64encode(file.getvalue()).decode()}


def restored(stored: JsonObject | None) -> list[list[Datum]]:
    """Return the minibatches of a checkpoint; none if it was saved between two batches of rollouts."""
    if stored is None:
        return []
    inputs: list[dict[str, Array]] = [{} for _ in stored["rows"]]
    tokens: dict[int, list[int]] = {}
    with np.load(io.BytesIO(base64.b64decode(stored["arrays"])), allow_pickle=False) as arrays:
        for key in arrays.files:
            number, _, name = key.partition("/")
            if name:
                inputs[int(number)][name] = arrays[key]
            else:
                tokens[int(number)] = arrays[key].tolist()
    data: list[Datum] = []
    for number, row in enumerate(stored["rows"]):
        model_input = ModelInput.from_ints(tokens[number])
        data.append(Datum(model_input, inputs[number]) if row is None else RowDatum(model_input, inputs[number], *row))
    parts, start = [], 0
    for size in stored["sizes"]:
        parts.append(data[start : start + size])
        start += size
    return parts
