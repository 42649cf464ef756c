"""``bad_rows.jsonl`` of a run folder: the rows that the run leaves out, and why."""

from __future__ import annotations

import logging
from pathlib import Path

from cookbook.data import Refusals
from cookbook.trackers.jsonl import JsonLines

log = logging.getLogger("cookbook")

NAME = "bad_rows.jsonl"


class BadRows:
    """Each row once, however often it is met and the run is gone on with; at the step that met it, 0 before the first.

    There is no file without bad rows.
    """

    def __init__(self, folder: Path, refusals: Refusals) -> None:
        self.file = JsonLines(folder / NAME)
        self._refusals = refusals
        self._noted = 0  # of what the refusals have found
        self._known: set[str] = set()

    def go_on(self, step: int) -> None:
        """Forgets what was met after ``step``: it will be met again."""
        self.file.keep_until(step)
        self._known = {row.get("row", "") for row in self.file.read()}

    def note(self, step: int) -> None:
        """Writes down what has been refused since the last call, and says so in the log."""
        found = [one for one in self._refusals.found[self._noted :] if one.where not in self._known]
        self._noted = len(self._refusals.found)
        for one in found:
            self._known.add(one.where)
            self.file.write(step, {"row": one.where, "reason": one.reason, "policy": f"data.{one.policy}"})
        if found:
            log.warning("data: left out %s, listed in %s; the first: %s", _rows(len(found)), self.file.path, found[0].reason)

    def metrics(self, step: int) -> dict[str, float]:
        """How many there are after ``step``; nothing where there are none."""
        self.note(step)
        return {"data/bad_rows": float(len(self._known))} if self._known else {}

    def summary(self) -> str | None:
        """A line for the end of the run."""
        count = len(self._known)
        return f"left out {_rows(count)}, each with the reason in {self.file.path}" if count else None


def _rows(count: int) -> str:
    return f"{count:,} row{'s' * (count != 1)}"
