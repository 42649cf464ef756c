"""Passes of the trainer that a run and its calibration share."""

from __future__ import annotations

from collections.abc import Sequence

from cookbook.futures import Future
from cookbook.losses import LOSSES, CrossEntropy
from cookbook.losses.base import Loss
from cookbook.protocols import Trainer
from cookbook.types import Datum, ForwardBackwardOutput, TensorData


def backward(trainer: Trainer, loss: Loss, data: Sequence[Datum]) -> Future[ForwardBackwardOutput]:
    """Add the gradient of ``loss`` on prepared ``data``. The trainer computes a built-in loss itself, by its name."""
    if LOSSES.get(loss.name) == f"{type(loss).__module__}:{type(loss).__qualname__}":
        return trainer.forward_backward(data, loss.name, loss.call_options())
    return trainer.forward_backward_custom(data, loss)


def target_logprobs(trainer: Trainer, data: Sequence[Datum]) -> list[TensorData]:
    """Return the logprobs of the targets of rollouts under the current weights, at the temperature of the rollouts."""
    fields = ("target_tokens", "temperature")
    rows = [
        Datum(datum.model_input, {key: datum.loss_fn_inputs[key] for key in fields if key in datum.loss_fn_inputs})
        for datum in data
    ]
    outputs = trainer.forward(rows, CrossEntropy.name).result().loss_fn_outputs
    return [output["logprobs"] for output in outputs]
