"""What a person sees while a run goes on: a live display on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from cookbook import terminal

# Metric, label, format: what is worth a place on one line, in this order, when the run has it.
SHOWN = [
    ("loss", "loss", "{:.4f}"),
    ("reward/mean", "reward", "{:.3f}"),
    ("rewards/margin", "margin", "{:.3f}"),
    ("eval/loss", "eval loss", "{:.4f}"),
    ("eval/accuracy", "eval accuracy", "{:.1%}"),
    ("time/tokens_per_s", "tokens/s", "{:,.0f}"),
]


class Console:
    """Progress of one run: bar, step, the metrics of ``SHOWN``, time left."""

    def __init__(self, total: int, first: int) -> None:
        self.total = total
        self._latest: dict[str, float] = {}
        self._first = first
        self._started = time.monotonic()
        self._last_line = self._started
        self._display = _Display(total, first) if sys.stdout is not None and sys.stdout.isatty() else None

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        self._latest.update(metrics)
        if self._display:
            self._display.update(step, _status(self._latest))
            return
        now = time.monotonic()
        # An evaluation that stands further up is not printed again.
        if _worth_a_line(step, self.total, metrics) or now - self._last_line >= terminal.LONG_S:
            self._last_line = now
            print(f"step {step}/{self.total}  {_status(metrics)}  {self._time_left(step)}".rstrip(), flush=True)

    def note(self, line: str) -> None:
        """A line above the display."""
        if self._display:
            self._display.note(line)
        else:
            print(line, flush=True)

    def close(self) -> None:
        if self._display:
            self._display.stop()
            self._display = None

    def _time_left(self, step: int) -> str:
        done = step - self._first
        if done < 1 or step >= self.total:
            return ""
        seconds = (time.monotonic() - self._started) / done * (self.total - step)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d} left"


def _status(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{label} {form.format(metrics[key])}" for key, label, form in SHOWN if key in metrics)


def _worth_a_line(step: int, total: int, metrics: Mapping[str, float]) -> bool:
    """Whether a step is one of about twenty in a run, or has an evaluation."""
    return step % max(total // 20, 1) == 0 or step == total or any(key.startswith("eval/") for key in metrics)


class _Display:
    """Lines that stay in place: the steps done, the metrics, and the current activity. One line would not hold them all."""

    def __init__(self, total: int, first: int) -> None:
        from rich.console import Group, RenderableType
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.text import Text

        left = (TimeRemainingColumn(), TextColumn("left"))
        self._progress = Progress(TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24), *left)
        self._task = self._progress.add_task("train", total=total, completed=first)
        self._status = Text()

        def lines() -> RenderableType:
            activity = terminal.line()
            return Group(self._progress, self._status, *([Text(activity, style="dim", no_wrap=True)] if activity else []))

        self._live = Live(get_renderable=lines)
        terminal.pause()
        self._live.start()

    def update(self, step: int, status: str) -> None:
        self._progress.update(self._task, completed=step)
        self._status.plain = status

    def note(self, line: str) -> None:
        self._live.console.print(line, highlight=False, markup=False)

    def stop(self) -> None:
        self._live.stop()
        terminal.resume()
