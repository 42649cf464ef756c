"""Precision of the products of training passes and of sampling."""

from cookbook.engine.precision.attention import (
    attended,
    half_attention,
    kept_bytes_per_token,
    multiplies_half,
    query_blocks,
    rounded,
)
from cookbook.engine.precision.cast_weights import CastWeights
from cookbook.engine.precision.choice import DEFAULT, EXACT, Precision, instructions, sampling_precision

__all__ = [
    "DEFAULT",
    "EXACT",
    "CastWeights",
    "Precision",
    "attended",
    "half_attention",
    "instructions",
    "kept_bytes_per_token",
    "multiplies_half",
    "query_blocks",
    "rounded",
    "sampling_precision",
]
