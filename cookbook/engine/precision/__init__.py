"""Precision of the products of training passes."""

from cookbook.engine.precision.attended import attended
from cookbook.engine.precision.choice import DEFAULT, EXACT, Precision, instructions

__all__ = ["DEFAULT", "EXACT", "Precision", "attended", "instructions"]
