"""Helpers of tests of jobs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import waiting
from waiting import WAIT_S

LONG_S = 600.0


def until(done: Callable[[], Any], why: Callable[[], object] = lambda: "") -> None:
    waiting.until(done, why, limit_s=LONG_S)


def answers(url: str) -> bool:
    import httpx

    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url, timeout=WAIT_S).status_code == 200
    return False
