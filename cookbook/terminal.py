"""The status line: what a command is waiting for. And standard streams that outlive their reader.

A terminal shows one line, which is replaced and at last cleared. Standard error that is a file or a pipe gets a plain line for
an activity that lasts, once for each kind of activity.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

log = logging.getLogger("cookbook")

TICK_S = 0.25
PLAIN_AFTER_S = 2.0  # of an activity, before it gets a plain line
LONG_S = 60.0  # of an activity, before its plain line is repeated; then at each doubling
NEVER = float("inf")


@dataclass(eq=False)
class Activity:
    """Something that takes a while. ``count`` of ``total`` ``noun`` are done; ``detail`` is a text, or returns one.

    ``plain_after_s``: seconds before a file or a pipe gets a line; activities inside of this one wait at least as long.
    """

    kind: str
    noun: str = ""
    total: int | None = None
    detail: str | Callable[[], str] = ""
    plain_after_s: float = field(default_factory=lambda: PLAIN_AFTER_S)
    count: int = 0
    started: float = field(default_factory=lambda: time.monotonic())
    next_line_s: float = 0.0

    def text(self) -> str:
        """The kind, the detail and the progress."""
        detail = self.detail() if callable(self.detail) else self.detail
        done = f"{self.count:,} of {self.total:,} {self.noun}" if self.total is not None else f"{self.count:,} {self.noun}"
        return ", ".join(part for part in (self.kind, detail, done if self.noun else "") if part)


_activities: list[Activity] = []  # the innermost last
_display: _Display | None = None


@contextlib.contextmanager
def doing(kind: str, **options: Any) -> Iterator[Activity]:
    """Show an :class:`Activity` while the block runs, if the command shows a status line."""
    one = Activity(kind, **options)
    _activities.append(one)
    if _display is not None:
        _display.wake()
    try:
        yield one
    finally:
        _activities.remove(one)


def line() -> str:
    """The innermost activity, within the one around it, and its seconds; empty if there is none."""
    stack = _activities[-2:]
    if not stack:
        return ""
    seconds = int(time.monotonic() - stack[-1].started)
    text = ": ".join([*(outer.kind for outer in stack[:-1]), stack[-1].text()])
    return f"{text} ({seconds} s)" if seconds else text


@contextlib.contextmanager
def shown(*, outlives_reader: bool = False) -> Iterator[None]:
    """Show activities while the block runs.

    Args:
        outlives_reader: a standard stream whose reader has closed the pipe drops its output, and raises no BrokenPipeError.
    """
    global _display
    streams, before = (sys.stdout, sys.stderr), _display
    _display = display = _Display(sys.stderr)
    try:
        if display.is_live or outlives_reader:
            sys.stdout, sys.stderr = (one and _Stream(one, display, outlives_reader) for one in streams)
        yield
    finally:
        display.end()
        _display = before
        sys.stdout, sys.stderr = streams


def pause() -> None:
    """Leave the terminal to another display, which shows :func:`line` itself."""
    if _display is not None:
        _display.paused = True
        _display.clear()


def resume() -> None:
    """Undo :func:`pause`."""
    if _display is not None:
        _display.paused = False


class _Display:
    """The thread that writes the status line to ``stream``."""

    def __init__(self, stream: TextIO | None) -> None:
        self.paused = False
        terminals = all(one is not None and one.isatty() for one in (stream, sys.stdout))
        self.is_live = terminals and os.environ.get("TERM") != "dumb"
        self._stream = stream
        self._lock = threading.RLock()
        self._drawn = False
        self._last_draw = 0.0
        self._said: set[str] = set()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Start the thread. A terminal gets its line at once: an import may keep the thread from running for a while."""
        if self._thread is None and not self._end.is_set():
            self._thread = threading.Thread(target=self._run, name="status line", daemon=True)
            self._thread.start()
        if self.is_live and time.monotonic() - self._last_draw > TICK_S / 2:
            self.tick()

    def tick(self) -> None:
        """Write what is due now."""
        with self._lock, contextlib.suppress(OSError, ValueError):  # the stream is closed
            if self.paused or self._end.is_set():
                return
            if self.is_live:
                self._draw()
            else:
                self._say()

    def clear(self) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._drawn and self._stream is not None:
                self._stream.write("\r\x1b[K")
                self._stream.flush()
                self._drawn = False

    def end(self) -> None:
        self.clear()
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(TICK_S):
            self.tick()

    def _draw(self) -> None:
        text = line()
        if not text or self._stream is None:
            self.clear()
            return
        columns = shutil.get_terminal_size().columns
        self._stream.write(f"\r{text[: columns - 1]}\x1b[K")
        self._stream.flush()
        self._drawn, self._last_draw = True, time.monotonic()

    def _say(self) -> None:
        """Print a line of an activity of a new kind, or of one that lasts very long."""
        stack = list(_activities)
        if not stack or self._stream is None:
            return
        one = stack[-1]
        lasted = time.monotonic() - one.started
        first = max(outer.plain_after_s for outer in stack) if one.kind not in self._said else LONG_S
        if lasted < max(first, one.next_line_s):
            return
        self._said.add(one.kind)
        one.next_line_s = max(LONG_S, 2 * lasted)
        print(line(), file=self._stream, flush=True)


class _Stream:
    """A standard stream that clears the status line before each write, and that may outlive its reader."""

    def __init__(self, stream: TextIO, display: _Display, outlives_reader: bool) -> None:
        self._stream = stream
        self._display = display
        self._outlives_reader = outlives_reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._display.clear()
        with self._without_reader():
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for one in lines:
            self.write(one)

    def flush(self) -> None:
        with self._without_reader():
            self._stream.flush()

    @contextlib.contextmanager
    def _without_reader(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            if not self._outlives_reader:
                raise
            write_nowhere(self._stream.fileno())
            log.info("the reader of %s has closed the pipe; the command continues without it", self._stream.name)


def write_nowhere(descriptor: int) -> None:
    """Send to the null device what is written to ``descriptor`` from now on, and what Python still buffers for it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
