"""Marks of parametrized cases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def rest_slow(cases: Iterable[Any], fast: int = 1) -> list[Any]:
    """Return ``cases`` with the mark `slow` on all but the first ``fast``; a tuple holds the values of several names."""
    return [case if index < fast else _slow(case) for index, case in enumerate(cases)]


def _slow(case: Any) -> Any:
    if hasattr(case, "marks"):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
