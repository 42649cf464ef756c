"""Mathematical answers, compared by the package math-verify."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from cookbook.errors import DataError
from cookbook.sampling.rewards.builtin import GOLD_MARK, Limits, cell
from cookbook.types import JsonObject
from cookbook.utils import packages

# Seconds that math-verify gives one expression. Its alarm needs the main thread of a process.
ALARM_S = 5


@dataclass(frozen=True)
class MathVerify(Limits):
    r"""1 if the completion's answer equals the gold answer as mathematics: ``\boxed{\frac{1}{2}}`` is 0.5, ``x=3`` is 3.

    The gold answer is the column's text after ``####``, else all of it. In a worker process an expression that takes more than
    ``ALARM_S`` seconds counts as wrong.
    """

    column: str = "answer"
    workers: int = field(default=1, repr=False, kw_only=True)

    def preflight(self, *_: object) -> None:
        """Raise ConfigError: the package math-verify is not installed."""
        packages.need("reward=math_verify", "math_verify", "math-verify")

    def __call__(self, completion: str, row: JsonObject) -> float:
        from math_verify import parse, verify

        # It warns about every call without an alarm.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        text = str(cell(row, self.column))
        text = text.partition(GOLD_MARK)[2] if GOLD_MARK in text else text
        alarm = ALARM_S if self.workers else None
        # math-verify looks for LaTeX between dollars; a bare answer such as "\\frac{1}{2}" has none.
        gold = parse(f"${text.strip().strip('$')}$", parsing_timeout=alarm)
        if not gold:
            raise DataError(
                f'"{self.column}" holds no mathematical answer, got {text!r}; set reward.column to a column with answers'
            )
        return float(verify(gold, parse(completion, parsing_timeout=alarm), timeout_seconds=alarm))
