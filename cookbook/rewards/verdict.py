"""What one call of a reward comes to: a number, or why there is none. Never a zero by mistake."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, SupportsFloat

from cookbook.errors import CookbookError, DataError, described


@dataclass(frozen=True)
class Fault:
    """Why there is no number. ``message`` reads well behind the place of the row; ``cause`` is what the reward raised.

    ``of_row``: it is the row that is at fault, whatever the completion.
    """

    message: str
    cause: BaseException | None = None
    of_row: bool = False

    @property
    def trace(self) -> str | None:
        """The cause's trace, as text."""
        return None if self.cause is None else "".join(traceback.format_exception(self.cause))


class TraceError(Exception):
    """Stands for an exception of another process. Its text is that one's trace."""


def judge(reward: Callable[[str, Mapping[str, Any]], Any], completion: str, values: Mapping[str, Any]) -> float | Fault:
    """The reward of one completion of the row that holds ``values``."""
    try:
        value = reward(completion, values)
    except CookbookError as error:
        return Fault(f"reward: {error}", error, of_row=isinstance(error, DataError))
    except Exception as error:  # noqa: BLE001 - the reward is the user's code
        return Fault(f"the reward raised {described(error)}; mend the reward or row", error)
    return _number(value)


def _number(value: Any) -> float | Fault:
    try:
        number = float(value) if isinstance(value, SupportsFloat) else None
    except (TypeError, ValueError):  # an array of several numbers
        number = None
    if number is None:
        return Fault(f"the reward returned {type(value).__name__}, not a number; return one float")
    if not math.isfinite(number):
        return Fault(f"the reward returned {number}; return a finite number")
    return number
