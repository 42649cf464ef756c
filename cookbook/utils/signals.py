"""Signals without loss of work: after the first the step finishes and is saved, the second stops immediately.

Ctrl-C and SIGTERM; SIGHUP, which a closed terminal sends; and SIGUSR1, with which Slurm warns before a time limit.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | int | None
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A parent that ignores these, such as nohup, keeps ignoring them.
UNLESS_IGNORED = (signal.SIGHUP, signal.SIGUSR1)
# Signals within this time count as one: launchers and schedulers send two, or one to each process of a group.
ONE_REQUEST_S = 0.5


class Stopped(KeyboardInterrupt):
    """A signal ends the command. ``number`` is the signal's, which the exit code has: 128 + number."""

    def __init__(self, number: int = signal.SIGINT, text: str = "") -> None:
        super().__init__(text)
        self.number = number


class Interrupted(Stopped):
    """The run stopped after ``step`` on request; everything is saved."""

    def __init__(self, step: int, number: int = signal.SIGINT) -> None:
        super().__init__(number, f"stopped after step {step}")
        self.step = step


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command that a signal has ended, as shells count: 128 and the signal's number."""
    return 128 + (error.number if isinstance(error, Stopped) else signal.SIGINT)


def is_interrupt(error: BaseException | None) -> bool:
    """Whether a signal caused ``error``: a library may turn an interrupt into an error of its own."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _handled() -> list[signal.Signals]:
    return [*SIGNALS, *(number for number in UNLESS_IGNORED if signal.getsignal(number) != signal.SIG_IGN)]


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Raise :class:`Stopped` in the block at a signal that would end the process without a word, so that files are closed.

    Ctrl-C raises KeyboardInterrupt by itself.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    # A handler of the caller, such as a launcher's, stays.
    numbers = [number for number in _handled() if number != signal.SIGINT and signal.getsignal(number) == signal.SIG_DFL]
    previous: dict[signal.Signals, Handler] = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class InterruptGuard:
    """Context in which the first signal sets ``asked``, and the second raises :class:`Stopped` immediately."""

    def __init__(self) -> None:
        self.asked = False
        # Number of the signal that asked.
        self.number: int = signal.SIGINT
        self._asked_at = 0.0
        self._previous: dict[signal.Signals, Handler] = {}

    def __enter__(self) -> InterruptGuard:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _handled()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            if time.monotonic() - self._asked_at < ONE_REQUEST_S:
                return
            raise Stopped(number)
        self.asked, self.number, self._asked_at = True, number, time.monotonic()
        # The terminal may be gone: a signal must not fail the run.
        with contextlib.suppress(OSError, ValueError):
            print("\nstopping after this step; the second signal stops immediately", file=sys.stderr, flush=True)
