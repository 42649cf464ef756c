"""Calling a reward: what it raises or returns is never taken for a zero."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsFloat

from cookbook.data.rows import Row
from cookbook.errors import CookbookError, RolloutError
from cookbook.protocols import Reward

log = logging.getLogger(__name__)


def score(reward: Reward, completions: Sequence[str], rows: Sequence[Row]) -> list[float]:
    """The reward of each completion, shape ``(B,)``; ``rows[i]`` is the row ``completions[i]`` answers.

    Raises:
        RolloutError: the reward raised, with its own error as the cause and its trace in the log, or returned anything
            but a finite number; both name the row.
    """
    judged = []
    for completion, row in zip(completions, rows, strict=True):
        with _Naming(row.where):
            value = reward(completion, row.values)
        judged.append(_number(value, row.where))
    return judged


class _Naming:
    """Turns whatever the user's code raises into a RolloutError that names the row and keeps the error as its cause."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, CookbookError):
            raise RolloutError(f"{self.where}: reward: {error}") from error
        if isinstance(error, Exception):
            frame = traceback.extract_tb(trace)[-1]
            last = traceback.format_exception_only(error)[-1].strip()
            log.error("%s: the reward's own trace", self.where, exc_info=error)
            place = f"{Path(frame.filename).name}:{frame.lineno}"
            raise RolloutError(f"{self.where}: the reward raised {last} ({place}); mend the reward or row") from error


def _number(value: Any, where: str) -> float:
    try:
        number = float(value) if isinstance(value, SupportsFloat) else None
    except (TypeError, ValueError):  # an array of several numbers
        number = None
    if number is None:
        raise RolloutError(f"{where}: the reward returned {type(value).__name__}, not a number; return one float")
    if not math.isfinite(number):
        raise RolloutError(f"{where}: the reward returned {number}; return a finite number")
    return number
