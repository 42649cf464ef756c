"""The loss on held-out rows, during a run and in ``cookbook eval``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from cookbook import terminal
from cookbook.losses import Loss
from cookbook.losses.base import Scope
from cookbook.protocols import Trainer
from cookbook.sampling.evaluation import ROWS, Evaluation
from cookbook.types import Datum


def held_out_loss(trainer: Trainer, loss: Loss, data: Sequence[Datum]) -> Evaluation:
    """Return the loss and its metrics on held-out ``data``, each named ``eval/...``, and ``eval/rows``."""
    prepared = loss.prepare(data)
    with terminal.doing("evaluating", detail=f"{len(data):,} datums"):
        output = trainer.forward(prepared, "cross_entropy").result()
    logprobs = [row["logprobs"].to_torch() for row in output.loss_fn_outputs]
    with torch.no_grad():
        value, metrics = loss(prepared, logprobs)
    tokens = {key: number for key, number in output.metrics.items() if key.startswith("tokens/")}
    numbers = {"loss": float(value), **{key: float(number) for key, number in metrics.items()}, **tokens}
    numbers.pop("tokens/trained", None)
    # Two sides of a pair are one row, and an answer to another prompt, with the label 0, is none.
    is_row = ["labels" not in datum.loss_fn_inputs or datum.loss_fn_inputs["labels"].array[0] != 0 for datum in data]
    num_rows = sum(is_row) / (2 if loss.scope is Scope.pair else 1)
    return Evaluation({**{f"eval/{key}": number for key, number in meaningful(numbers, loss).items()}, ROWS: num_rows})


def meaningful(metrics: Mapping[str, float], loss: Loss) -> dict[str, float]:
    """Drop misleading metrics: accuracy would count as hits the tokens of answers that the loss makes less likely."""
    misleading = "tokens/accuracy" if loss.scope is Scope.pair or "labels" in loss.needs else None
    return {key: value for key, value in metrics.items() if key != misleading}
