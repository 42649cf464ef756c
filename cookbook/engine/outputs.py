"""What a call of the engine returns, from what its passes found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cookbook.engine.loss_gradient import number
from cookbook.engine.passes import Scores, Wanted
from cookbook.types import Datum, ForwardBackwardOutput, TensorData


def output(
    data: Sequence[Datum],
    scores: Scores,
    value: Tensor | None,
    metrics: Mapping[str, Any],
    router_weight: float = 0.0,
) -> ForwardBackwardOutput:
    """Logprobs of every datum, NaN where none was computed; the loss with its metrics, where there is one."""
    for index, mask in scores.left_out.items():
        scores.logprobs[index] = scores.logprobs[index].masked_fill(_like(mask, scores.logprobs[index]), float("nan"))
    outputs = [{"logprobs": TensorData.from_torch(logprobs)} for logprobs in scores.ordered()]
    found = {key: number(key, metric) for key, metric in metrics.items()} | _token_metrics(data, scores)
    if value is not None:
        total = float(value)
        if scores.router is not None:
            found["loss/router"] = float(scores.router.loss())
            total += router_weight * found["loss/router"]
        found = {"loss": total, "loss:sum": total, **found}
    return ForwardBackwardOutput(outputs, found)


def empty_output(with_loss: bool = True) -> ForwardBackwardOutput:
    """The output of a call without datums: a loss is a sum, and an empty sum is 0."""
    return ForwardBackwardOutput([], {"loss": 0.0, "loss:sum": 0.0} if with_loss else {})


def same_pass(one: Datum, other: Datum) -> bool:
    """Whether the model makes the same logprobs of both."""
    keys = ("target_tokens", "temperature")
    pairs = [(one.loss_fn_inputs.get(key), other.loss_fn_inputs.get(key)) for key in keys]
    return one.model_input.tokens == other.model_input.tokens and all(
        a is b or (a is not None and b is not None and np.array_equal(a.array, b.array)) for a, b in pairs
    )


def columns(scores: Scores, wanted: Wanted) -> list[list[Tensor]]:
    """What a loss is called with besides the datums."""
    entropy = [scores.entropy[index] for index in range(len(scores.entropy))]
    return [scores.ordered(), entropy] if wanted.entropy else [scores.ordered()]


def _like(mask: Tensor, values: Tensor) -> Tensor:
    """``(T,)`` as it fits beside ``(T,)`` or ``(T, K)``."""
    return mask if values.ndim == 1 else mask[:, None]


def _token_metrics(data: Sequence[Datum], scores: Scores) -> dict[str, float]:
    """Means over the tokens whose weight is not zero: every token where a datum has no weights."""
    if not scores.hit:
        return {}
    entropy, hit, count = 0.0, 0.0, 0
    for index, datum in enumerate(data):
        mask: Any = slice(None)
        if "weights" in datum.loss_fn_inputs:
            weights = datum.loss_fn_inputs["weights"].array
            mask = torch.from_numpy(weights.reshape(len(weights), -1).any(-1)) if weights.ndim else slice(None)
        kept = scores.hit[index][mask]
        entropy += float(scores.entropy[index][mask].double().sum())
        hit += float(kept.sum())
        count += kept.numel()
    if not count:
        return {}
    return {"tokens/accuracy": hit / count, "tokens/entropy": entropy / count, "tokens/trained": float(count)}
