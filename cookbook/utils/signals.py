"""Ctrl-C and SIGTERM without loss of work: after the first the step finishes and is saved, the second stops immediately."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | int | None
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """The run stopped after ``step`` on request; everything is saved."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step}")
        self.step = step


def is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C caused ``error``: a library may turn an interrupt into an error of its own."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


class InterruptGuard:
    """Context in which the first signal sets ``asked``, and the second raises KeyboardInterrupt immediately."""

    def __init__(self) -> None:
        self.asked = False
        self._previous: dict[signal.Signals, Handler] = {}

    def __enter__(self) -> InterruptGuard:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print("\nstopping after this step; the second signal stops immediately", file=sys.stderr, flush=True)
