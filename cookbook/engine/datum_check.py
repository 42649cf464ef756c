"""What a datum must be before a model computes on it."""

from __future__ import annotations

from cookbook.errors import DataError
from cookbook.types import Datum


def check_datum(datum: Datum, index: int, vocabulary: int, max_length: int) -> None:
    """Everything that would otherwise fail deep inside the model, or not at all."""
    if "target_tokens" not in datum.loss_fn_inputs:
        raise DataError(
            f"datum {index}: missing required field 'target_tokens'; build it with datum_from_tokens_weights, or add the "
            "input tokens shifted by one"
        )
    length = datum.model_input.length
    targets = datum.loss_fn_inputs["target_tokens"].array
    if length == 0:
        raise DataError(f"datum {index}: model_input is empty; give at least one token")
    if length > max_length:
        raise DataError(f"datum {index}: {length} tokens exceed the model's context of {max_length}; shorten it")
    if targets.dtype.kind not in "iu" or targets.ndim not in (1, 2):
        raise DataError(
            f"datum {index}: target_tokens must be integers of shape (T,) or (T, K), got {targets.dtype} {targets.shape}"
        )
    if "temperature" in datum.loss_fn_inputs:
        heat = datum.loss_fn_inputs["temperature"].array
        if heat.ndim or not 0 < float(heat) < float("inf"):
            raise DataError(f"datum {index}: temperature must be one number > 0, got {heat.tolist()}")
    if not targets.size:
        raise DataError(f"datum {index}: target_tokens of shape {targets.shape} hold no target; give at least one per position")
    if (low := int(targets.min())) < 0:
        place = int(targets.argmin()) // (targets.size // len(targets))
        raise DataError(
            f"datum {index}: target_tokens holds {low} at position {place}, which is no token; to leave the position out, give "
            "it weight 0 and any token"
        )
    for key, low, high in (
        ("model_input", min(datum.model_input.tokens), max(datum.model_input.tokens)),
        ("target_tokens", int(targets.min()), int(targets.max())),
    ):
        if low < 0 or high >= vocabulary:
            wrong = low if low < 0 else high
            raise DataError(
                f"datum {index}: {key} holds token {wrong}, and the vocabulary has {vocabulary}; use this model's tokenizer"
            )
