"""Waiting in tests: for an event, never for a time. A limit ends a test that hangs, and says nothing about speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
# Limit of every wait, join, result and request of a test, in seconds: far more than any takes on a busy machine.
WAIT_S = 60.0
POLL_S = 0.01


def until(condition: Callable[[], T], why: Callable[[], object] = lambda: "", limit_s: float = WAIT_S) -> T:
    """Wait until the condition is true, and return its value. ``why`` says what is the case at the limit."""
    end = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end, why()
        time.sleep(POLL_S)
    return found
