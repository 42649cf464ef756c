"""``status.json`` of a run folder: how the run stands, for whoever looks in from outside.

A process that was killed leaves ``running`` behind. ``pid`` tells which it was, and nobody holds the folder's ``.lock`` then.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cookbook import atomic
from cookbook.errors import CookbookError
from cookbook.hooks import Hook
from cookbook.types import Checkpoint

log = logging.getLogger("cookbook")

NAME = "status.json"
EVERY_S = 1.0  # how old ``step`` may be while a run goes on
RUNNING, FINISHED, INTERRUPTED, FAILED = "running", "finished", "interrupted", "failed"


@dataclass
class Status(Hook):
    """Keeps ``status.json``. ``step`` steps are finished, ``saved_step`` has the newest checkpoint of this sitting, or the
    one it resumed from; ``resume`` is the command that resumes. ``started_from`` is another run's checkpoint that this run
    began with; once the run has saved one of its own, it is None.
    """

    folder: Path
    resume: str
    started_from: str | None = None
    step: int = 0
    saved_step: int | None = None
    started: str = field(default_factory=lambda: _now())
    _written: float = 0.0

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """While it is entered the run is running; afterwards the file says how it ended.

        Raises:
            OSError: the file cannot be written at the start. Later that is a warning: the run has more to lose.
        """
        self._write(RUNNING)
        try:
            yield
        except BaseException as error:
            self._note(INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED, error)
            raise
        self._note(FINISHED)

    def on_start(self, run: Any) -> None:
        if run.first_step:
            self.step = self.saved_step = run.first_step
            self._note(RUNNING)

    def on_step(self, run: object, step: int, metrics: Mapping[str, float]) -> None:
        self.step = step
        if time.monotonic() - self._written >= EVERY_S:
            self._note(RUNNING)

    def on_checkpoint(self, run: object, checkpoint: Checkpoint) -> None:
        self.saved_step = checkpoint.step
        self.started_from = None
        self._note(RUNNING)

    def _note(self, state: str, error: BaseException | None = None) -> None:
        try:
            self._write(state, error)
        except OSError as reason:
            log.warning("%s: cannot be written: %s", self.folder / NAME, reason.strerror)

    def _write(self, state: str, error: BaseException | None = None) -> None:
        self._written = time.monotonic()
        content = {
            "state": state,
            "step": self.step,
            "saved_step": self.saved_step,
            "error": _said(error),
            "resume": self.resume,
            "started_from": self.started_from,
            "pid": os.getpid(),
            "host": platform.node(),
            "started": self.started,
            "updated": _now(),
        }
        atomic.write_text(self.folder / NAME, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read(folder: Path) -> dict[str, Any] | None:
    """What stands in the file; None when there is none, or it is not one of ours."""
    try:
        found = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _said(error: BaseException | None) -> str | None:
    """As the terminal has it, on one line."""
    if error is None or isinstance(error, CookbookError):
        return None if error is None else str(error)
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
