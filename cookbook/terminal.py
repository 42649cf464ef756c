"""Output on the terminal: the status line, the progress of a run, warnings, and standard streams that outlive their reader.

The status line names the current activity. A terminal shows one line, which is replaced and at last cleared. If standard error
is a file or a pipe, an activity that lasts gets a plain line, once for each kind of activity.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

log = logging.getLogger("cookbook")

TICK_S = 0.25
# Age of an activity at which it gets a plain line.
PLAIN_AFTER_S = 2.0
# Age at which its plain line is repeated, and again at each doubling.
LONG_S = 60.0
NEVER_S = float("inf")


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
        """Return the kind, the detail and the progress."""
        detail = self.detail() if callable(self.detail) else self.detail
        done = f"{self.count:,} of {self.total:,} {self.noun}" if self.total is not None else f"{self.count:,} {self.noun}"
        return ", ".join(part for part in (self.kind, detail, done if self.noun else "") if part)


def say(line: str) -> None:
    """Print a line on standard output, and write it to the run's log."""
    print(line, flush=True)
    log.info("%s", line)


# The innermost activity is the last.
_activities: list[Activity] = []
_display: _Display | None = None


@contextlib.contextmanager
def doing(kind: str, **options: Any) -> Iterator[Activity]:
    """Show an :class:`Activity` while the block runs, if the command shows a status line."""
    activity = Activity(kind, **options)
    _activities.append(activity)
    if _display is not None:
        _display.wake()
    try:
        yield activity
    finally:
        _activities.remove(activity)


def line() -> str:
    """Return the innermost activity, within the one around it, and its seconds; empty without an activity."""
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
            sys.stdout, sys.stderr = (stream and _Stream(stream, display, outlives_reader) for stream in streams)
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
        terminals = all(output is not None and output.isatty() for output in (stream, sys.stdout))
        self.is_live = terminals and os.environ.get("TERM") != "dumb" and not in_notebook()
        self._stream = stream
        self._lock = threading.RLock()
        self._drawn = False
        self._last_draw = -math.inf
        self._said: set[str] = set()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Start the thread. A terminal gets its line immediately: an import may keep the thread from running for a while."""
        if self._thread is None and not self._end.is_set():
            self._thread = threading.Thread(target=self._run, name="status line", daemon=True)
            self._thread.start()
        if self.is_live and time.monotonic() - self._last_draw > TICK_S / 2:
            self.tick()

    def tick(self) -> None:
        """Write what is due now."""
        # A closed stream raises ValueError.
        with self._lock, contextlib.suppress(OSError, ValueError):
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
        activity = stack[-1]
        lasted = time.monotonic() - activity.started
        first = max(outer.plain_after_s for outer in stack) if activity.kind not in self._said else LONG_S
        if lasted < max(first, activity.next_line_s):
            return
        self._said.add(activity.kind)
        activity.next_line_s = max(LONG_S, 2 * lasted)
        print(line(), file=self._stream, flush=True)


class _Stream:
    """A standard stream that clears the status line before each write, and that may outlive its reader."""

    def __init__(self, stream: TextIO, display: _Display, outlives_reader: bool) -> None:
        self._stream = stream
        self._display = display
        self._outlives_reader = outlives_reader

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._display.clear()
        with self._without_reader():
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._without_reader():
            self._stream.flush()

    @contextlib.contextmanager
    def _without_reader(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # A pipe without a reader, a terminal that is gone (EIO), a full disk.
            if not self._outlives_reader:
                raise
            write_nowhere(self._stream.fileno())
            if isinstance(error, BrokenPipeError):
                log.info("the reader of %s has closed the pipe; the command continues without it", self._stream.name)
            else:
                log.info("%s cannot be written: %s; the command continues without it", self._stream.name, error.strerror)


def make_writable() -> None:
    """Replace a closed standard stream by the null device, and characters that a stream cannot encode by question marks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # Open until the process ends.
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def write_nowhere(descriptor: int) -> None:
    """Send to the null device what is written to ``descriptor`` from now on, and what Python still buffers for it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


# ---- progress of a run ---------------------------------------------------------------------------------------------

# Metric, label and format of the values shown on one line, in this order.
SHOWN_METRICS = [
    ("loss", "loss", "{:.4f}"),
    ("reward/mean", "reward", "{:.3f}"),
    ("rewards/margin", "margin", "{:.3f}"),
    ("eval/loss", "eval loss", "{:.4f}"),
    ("eval/accuracy", "eval accuracy", "{:.1%}"),
    ("time/tokens_per_s", "tokens/s", "{:,.0f}"),
]


# Steps whose mean duration estimates that of the steps to come, and the number of them that an estimate needs.
RECENT_STEPS = 20
FEWEST_STEPS = 2


class TimeLeft:
    """Estimate of the seconds until the end of a run of ``total`` steps.

    The estimate is the mean duration of recent steps, plus the duration of the last evaluation for each evaluation to come:
    one every ``eval_every`` steps, and one at the end. The first step of a process is left out, because it contains warm-up
    and compilation. There is no estimate before two steps after it.
    """

    def __init__(self, total: int, eval_every: int | None) -> None:
        self._total, self._eval_every = total, eval_every
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)
        self._eval_s: float | None = None
        self._is_warm = False

    def observe(self, step: int, seconds: float, eval_s: float | None) -> None:
        """Note the seconds since the row of metrics before that of ``step``, of which an evaluation took ``eval_s``."""
        if eval_s is not None:
            self._eval_s = eval_s
        # The row of step 0 has only an evaluation.
        if step == 0:
            return
        if self._is_warm:
            self._steps.append(max(seconds - (eval_s or 0.0), 0.0))
        self._is_warm = True

    def after(self, step: int) -> float | None:
        """Return the seconds from the end of ``step`` to the end of the run; None while there is no estimate."""
        if len(self._steps) < FEWEST_STEPS or step >= self._total:
            return None
        every = self._eval_every or self._total
        # Multiples of `every` after `step`, and the last step if it is not a multiple.
        evaluations = self._total // every - step // every + (self._total % every > 0)
        mean = sum(self._steps) / len(self._steps)
        return mean * (self._total - step) + evaluations * (self._eval_s or 0.0)


class Console:
    """Progress of one run: a bar, the step, the metrics ``SHOWN_METRICS`` and the time left. A log gets about 20 lines."""

    def __init__(self, total: int, first: int, eval_every: int | None = None) -> None:
        self.total = total
        self._latest: dict[str, float] = {}
        self._left = TimeLeft(total, eval_every)
        self._last_update = self._last_line = time.monotonic()
        self._display: _StepDisplay | _NotebookDisplay | None = None
        if in_notebook():
            self._display = _NotebookDisplay(total, first)
        elif sys.stdout is not None and sys.stdout.isatty():
            self._display = _StepDisplay(total, first)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        self._latest.update(metrics)
        now = time.monotonic()
        self._left.observe(step, now - self._last_update, metrics.get("time/eval_s"))
        self._last_update = now
        seconds = self._left.after(step)
        left = "" if seconds is None else f"{duration(seconds)} left"
        is_due = _worth_a_line(step, self.total, metrics) or now - self._last_line >= LONG_S
        if is_due:
            self._last_line = now
            # An evaluation that is already in the line above is not repeated.
            text = f"step {step}/{self.total}  {_status(metrics)}  {left}".rstrip()
            log.info("%s", text)
            if not self._display:
                print(text, flush=True)
        if self._display:
            self._display.update(step, _status(self._latest), left)

    def note(self, line: str) -> None:
        """Print a line above the display."""
        if self._display:
            self._display.note(line)
        else:
            print(line, flush=True)

    def close(self) -> None:
        if self._display:
            self._display.stop()
            self._display = None


def duration(seconds: float) -> str:
    """Return ``1:05`` for 65 seconds, and ``1:01:05`` for an hour more."""
    minutes, seconds_left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds_left:02d}" if hours else f"{minutes}:{seconds_left:02d}"


def _status(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{label} {form.format(metrics[key])}" for key, label, form in SHOWN_METRICS if key in metrics)


def _worth_a_line(step: int, total: int, metrics: Mapping[str, float]) -> bool:
    """Whether a step is one of about twenty in a run, or has an evaluation."""
    return step % max(total // 20, 1) == 0 or step == total or any(key.startswith("eval/") for key in metrics)


class _StepDisplay:
    """Lines that stay in place: the steps done, the metrics, and the current activity. One line would not hold them all."""

    def __init__(self, total: int, first: int) -> None:
        from rich.console import Group, RenderableType
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.text import Text

        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24), TextColumn("{task.fields[left]}"))
        self._progress = Progress(*columns)
        self._task = self._progress.add_task("train", total=total, completed=first, left="")
        self._status = Text()

        def lines() -> RenderableType:
            activity = line()
            return Group(self._progress, self._status, *([Text(activity, style="dim", no_wrap=True)] if activity else []))

        self._live = Live(get_renderable=lines)
        pause()
        self._live.start()

    def update(self, step: int, status: str, left: str) -> None:
        self._progress.update(self._task, completed=step, left=left)
        self._status.plain = status

    def note(self, line: str) -> None:
        self._live.console.print(line, highlight=False, markup=False)

    def stop(self) -> None:
        self._live.stop()
        resume()


class _NotebookDisplay:
    """One output of a notebook's cell that changes in place: a bar, the steps done, the metrics. No escape codes."""

    def __init__(self, total: int, first: int) -> None:
        # Every kernel has imported the module, and cookbook does not depend on the package.
        display = sys.modules["IPython.display"].display

        self._total = total
        self._shown = (first, "")
        self._last_draw = -math.inf
        self._handle = display(self._content(), raw=True, display_id=True)

    def update(self, step: int, status: str, left: str) -> None:
        self._shown = (step, f"{status}  {left}".rstrip())
        if time.monotonic() - self._last_draw > TICK_S:
            self._draw()

    def note(self, line: str) -> None:
        print(line, flush=True)

    def stop(self) -> None:
        self._draw()

    def _draw(self) -> None:
        self._last_draw = time.monotonic()
        self._handle.update(self._content(), raw=True)

    def _content(self) -> dict[str, str]:
        step, status = self._shown
        text = f"step {step}/{self._total}  {status}".rstrip()
        bar = f'<progress value="{step}" max="{self._total}"></progress>'
        return {"text/plain": text, "text/html": f"<div>{bar} {text}</div>"}


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, whose output is no terminal."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and type(shell).__module__.startswith("ipykernel")


# ---- warnings ------------------------------------------------------------------------------------------------------


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current ``sys.stderr``: a live display replaces that stream, to keep its own lines below."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


@contextlib.contextmanager
def warnings_shown() -> Iterator[None]:
    """Show cookbook's warnings on the terminal, and pass no message of cookbook to other log handlers of the process."""
    handler = _StderrHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = True
