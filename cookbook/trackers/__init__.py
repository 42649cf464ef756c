"""Where metrics go: the console and ``metrics.jsonl`` always, other places when asked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cookbook.errors import ConfigError, described
from cookbook.protocols import SampleTracker, Tracker

log = logging.getLogger("cookbook")


class Trackers:
    """The trackers of one run. A tracker that raises is reported once, in one line, and switched off; the run continues."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers
        self._active: list[Tracker] = []

    def start(self, config: Mapping[str, Any], out: str, name: str, step: int) -> None:
        """Raises ConfigError: a tracker refuses to start, for example because its package is missing."""
        for tracker in self._trackers:
            if self._call(tracker, "start", lambda one: one.start(config, out, name, step)):
                self._active.append(tracker)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call_all("log", lambda tracker: tracker.log(step, metrics))

    def log_sample(self, step: int, sample: Mapping[str, Any]) -> None:
        """Passes a row of ``samples.jsonl`` to the trackers that take samples."""
        self._call_all("log_sample", lambda one: one.log_sample(step, sample) if isinstance(one, SampleTracker) else None)

    def end(self, state: str) -> None:
        self._call_all("end", lambda tracker: tracker.end(state))

    def _call_all(self, moment: str, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._active):
            self._call(tracker, moment, call)

    def _call(self, tracker: Tracker, moment: str, call: Callable[[Tracker], None]) -> bool:
        """Whether the call succeeded."""
        try:
            call(tracker)
            return True
        except (Exception, SystemExit) as error:
            if moment == "start" and isinstance(error, ConfigError):
                raise
            self._active = [one for one in self._active if one is not tracker]
            name = type(tracker).__name__
            result = "its last values may be missing" if moment == "end" else "the tracker is off, the run continues"
            log.warning("tracker %s: %s raised %s; %s", name, moment, described(error), result)
            log.info("the trace of tracker %s:", name, exc_info=error)
            return False
