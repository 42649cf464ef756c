"""Clock of the server for ages and times of expiry, which a jump of the wall clock does not move."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from pathlib import Path

from cookbook.utils import files

log = logging.getLogger("cookbook")
FILE = "clock"


class Clock:
    """Seconds since 1970, counted with the monotonic clock since the first start of the server in its folder.

    The time in which no server runs does not count: only the wall clock knows it, and the wall clock may jump. ``file`` keeps
    the time across restarts.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = _stored(file) - time.monotonic()

    def now(self) -> float:
        return self._offset + time.monotonic()

    def wall_time(self, moment: float) -> float:
        """Return the wall clock's time at a moment of this clock."""
        return time.time() + moment - self.now()

    def store(self) -> None:
        """Write the time to the file. A full disk costs the time since the last success."""
        with contextlib.suppress(OSError):
            files.write_text(self._file, f"{self.now():.3f}\n")


def _stored(file: Path) -> float:
    """Return the time in a file; without a valid file, the time of the wall clock."""
    try:
        seconds = float(file.read_text(encoding="utf-8"))
        if math.isfinite(seconds):
            return seconds
        reason = f"it contains {seconds}"
    except FileNotFoundError:
        return time.time()
    except (OSError, ValueError) as error:
        reason = str(error)
    log.warning("%s: cannot be read (%s); ages of checkpoints are counted from the wall clock", file, reason)
    return time.time()
