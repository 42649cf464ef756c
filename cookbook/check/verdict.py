"""What a check found, and what it would mean in training."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cookbook.errors import CookbookError

# What somebody's loss may raise when it refuses a batch, or has a mistake in it.
REFUSALS = (
    CookbookError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


class State(StrEnum):
    """How a check ended."""

    passed = "ok"
    failed = "FAILED"
    noted = "note"  # worth knowing, and as declared
    skipped = "-"  # not examined, because of an earlier failure


@dataclass(frozen=True)
class Verdict:
    """``found`` is what was measured; of a failure, ``harm`` is what it does to a run and ``remedy`` what to change."""

    check: str
    state: State
    found: str
    harm: str = ""
    remedy: str = ""

    @property
    def failed(self) -> bool:
        return self.state is State.failed

    def __str__(self) -> str:
        rest = f"; in training: {self.harm}; change: {self.remedy}" if self.failed else ""
        return f"{self.state:<6}  {self.check}: {self.found}{rest}"


def passed(found: str) -> Verdict:
    return Verdict("", State.passed, found)


def noted(found: str) -> Verdict:
    return Verdict("", State.noted, found)


def failed(found: str, harm: str, remedy: str) -> Verdict:
    return Verdict("", State.failed, found, harm, remedy)
