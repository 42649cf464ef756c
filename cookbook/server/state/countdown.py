"""Timer for clients that are late, which a stop of the server itself does not shorten."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TICK_S = 1.0
# A tick that is this much late means that the server was stopped (SIGSTOP, a sleeping machine), not that clients were silent.
STOPPED_S = 5.0


class Countdown:
    """Calls ``callback`` on the event loop after ``seconds``. After a stop of the server the countdown starts again.

    Without this rule, the timer would fire before the server has read what clients sent during the stop.
    """

    def __init__(self, seconds: float, callback: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = self._left = seconds
        self._callback = callback
        self._start_tick()

    def cancel(self) -> None:
        self._handle.cancel()

    def _start_tick(self) -> None:
        self._tick = min(TICK_S, self._left)
        self._due = self._loop.time() + self._tick
        self._handle = self._loop.call_later(self._tick, self._end_tick)

    def _end_tick(self) -> None:
        was_stopped = self._loop.time() - self._due > STOPPED_S
        self._left = self._seconds if was_stopped else self._left - self._tick
        if self._left > 0:
            self._start_tick()
        else:
            self._callback()
