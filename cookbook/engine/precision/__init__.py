"""Precision of the products of training passes."""

from cookbook.engine.precision.attention import attended, half_attention, kept_bytes_per_token, multiplies_half
from cookbook.engine.precision.choice import DEFAULT, EXACT, Precision, instructions, sampling_precision

__all__ = [
    "DEFAULT",
    "EXACT",
    "Precision",
    "attended",
    "half_attention",
    "instructions",
    "kept_bytes_per_token",
    "multiplies_half",
    "sampling_precision",
]
