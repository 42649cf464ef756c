"""Calling a reward: what it raises, returns or never returns is never taken for a zero."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cookbook.errors import BadRowError, RolloutError
from cookbook.rewards.limits import Limits
from cookbook.rewards.python import Python
from cookbook.rewards.verdict import Fault, judge
from cookbook.rewards.worker import Workers

if TYPE_CHECKING:
    from cookbook.data.rows import Row
    from cookbook.protocols import Reward

log = logging.getLogger(__name__)

Pending = Callable[[], float]
"""Gives the reward, once it is there. Raises RolloutError, which names the row, where there is none."""


class Judge:
    """Calls a reward as its :class:`Limits` say. Which process called it, and when, makes no difference to the rewards.

    Raises:
        ConfigError: the reward has workers and cannot be sent to them.
    """

    def __init__(self, reward: Reward) -> None:
        self.reward = reward
        self._workers = Workers(reward) if isinstance(reward, Limits) and reward.workers else None

    def submit(self, completion: str, row: Row) -> Pending:
        """The reward of a completion of ``row``. Workers begin at once; without any, it is called when it is asked for."""
        if self._workers is None:
            return lambda: _told(judge(self.reward, completion, row.values), row.where)
        future = self._workers.submit(completion, row.values)
        return lambda: _told(future.result(), row.where)

    def fingerprint(self) -> str:
        """What tells the reward from another one, in every process alike."""
        if isinstance(self.reward, Python):
            return f"{self.reward!r} {self.reward.digest}"
        kind = type(self.reward)
        return repr(self.reward) if dataclasses.is_dataclass(kind) else f"{kind.__module__}:{kind.__qualname__}"

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()


def score(reward: Reward, completions: Sequence[str], rows: Sequence[Row]) -> list[float]:
    """The reward of each completion, shape ``(B,)``; ``rows[i]`` is the row ``completions[i]`` answers.

    Raises:
        RolloutError: the reward raised, with its own error as the cause and its trace in the log, or returned anything
            but a finite number; both name the row.
    """
    pairs = zip(completions, rows, strict=True)
    return [_told(judge(reward, completion, row.values), row.where) for completion, row in pairs]


def _told(found: float | Fault, where: str) -> float:
    if not isinstance(found, Fault):
        return found
    if found.message.startswith("the reward raised"):
        log.info("%s: the reward's own trace", where, exc_info=found.cause)  # for log.txt; the terminal has one line
    kind = BadRowError if found.of_row else RolloutError
    raise kind(f"{where}: {found.message}") from found.cause
