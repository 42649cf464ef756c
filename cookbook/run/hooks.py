"""Hooks: user code that a run calls at fixed moments; and the hook that every run has, which writes ``status.json``.

Derive from :class:`Hook` and override the methods you need.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cookbook.errors import ConfigError, CookbookError, HookError, described
from cookbook.utils import files

if TYPE_CHECKING:
    from cookbook.protocols import Sampler
    from cookbook.types import Checkpoint, JsonObject

log = logging.getLogger("cookbook")

STATUS = "status.json"
# Seconds that ``step`` may lag behind while a run is in progress.
EVERY_S = 1.0
RUNNING, FINISHED, INTERRUPTED, FAILED = "running", "finished", "interrupted", "failed"


class Hook:
    """Base class of hooks, whose methods do nothing.

    A hook that raises ends the run: the step is finished and saved first, then the command exits with code 2 and one line
    that names the hook's file and line. The trace goes to ``log.txt``. The failed hook is called once more, for ``on_end``.

    ``run`` is the object that the recipe receives (:class:`cookbook.run.Run`).
    """

    def on_start(self, run: object) -> None:
        """Called before the first step, after a checkpoint to resume from has been loaded."""

    def on_step(self, run: object, step: int, metrics: Mapping[str, float]) -> None:
        """Called after every optimizer step, with its row of ``metrics.jsonl``."""

    def on_checkpoint(self, run: object, checkpoint: Checkpoint) -> None:
        """Called after a checkpoint has been written."""

    def on_weight_sync(self, run: object, sampler: Sampler) -> None:
        """Called after the deployment has received new weights."""

    def on_eval(self, run: object, step: int, metrics: Mapping[str, float]) -> None:
        """Called after an evaluation."""

    def on_end(self, run: object, state: str) -> None:
        """Called at the end; ``state`` is ``finished``, ``interrupted`` or ``failed``."""


class HookCalls:
    """Calls the hooks of one run. ``failure`` is the first error that a hook raised; the run then ends at its next safe point.

    ``hooks`` is read at every call, so that a hook may add another one.
    """

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self.failure: HookError | None = None
        self._hooks = hooks
        self._started: list[Hook] = []
        # By id().
        self._failed: set[int] = set()
        # Whether the run ends for another reason than a hook.
        self._ending = False

    def start(self, run: object) -> None:
        """Call ``on_start`` of every hook.

        Raises:
            HookError: a hook raised. The hooks after it are not called.
        """
        for hook in list(self._hooks):
            self._call(hook, "on_start", run)
            self.check()
            self._started.append(hook)

    def call(self, moment: str, *arguments: object) -> None:
        """Call the method ``moment`` of every hook that has not failed yet."""
        for hook in self._hooks:
            if id(hook) not in self._failed:
                self._call(hook, moment, *arguments)

    def end(self, run: object, state: str) -> None:
        """Call ``on_end`` of every hook that was started, the last one first, even if one of them raises.

        Raises:
            HookError: a hook raised now, and the run had not ended for another reason.
        """
        self._ending = state != "finished"
        for hook in reversed(self._started):
            self._call(hook, "on_end", run, "failed" if self.failure and state == "finished" else state)
        if state == "finished":
            self.check()

    def check(self) -> None:
        """Raise HookError if a hook has raised."""
        if self.failure is not None:
            raise self.failure

    def _call(self, hook: Hook, moment: str, *arguments: object) -> None:
        try:
            getattr(hook, moment)(*arguments)
        except (Exception, SystemExit) as error:
            line = f"hook {type(hook).__name__}: {moment} raised {described(error)}"
            log.info("the trace of hook %s:", type(hook).__name__, exc_info=error)
            self._failed.add(id(hook))
            if self.failure is None and not self._ending:
                self.failure = HookError(line)
            # The terminal shows another error as the reason why the run ended.
            else:
                log.warning("%s", line)


@dataclass
class Status(Hook):
    """Writes ``status.json``.

    ``step`` steps are finished. ``saved_step`` is the step of the newest checkpoint that this process saved or resumed from.
    ``resume`` is the command that resumes the run. ``started_from`` is another run's checkpoint that this run began with; it is
    None after the run has saved a checkpoint of its own.
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
        """Write the state ``running``, and at the end how the block ended.

        Raises:
            ConfigError: the file cannot be written at the start. Later such an error is a warning, and the run continues.
        """
        with writing_to(self.folder):
            self._write(RUNNING)
        try:
            yield
        except BaseException as error:
            self._note(INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED, error)
            raise
        self._note(FINISHED)

    def on_start(self, run: object) -> None:
        if first_step := getattr(run, "first_step", 0):
            self.step = self.saved_step = first_step
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
            log.warning("%s: cannot be written: %s", self.folder / STATUS, reason.strerror)

    def _write(self, state: str, error: BaseException | None = None) -> None:
        self._written = time.monotonic()
        content = {
            "state": state,
            "step": self.step,
            "saved_step": self.saved_step,
            "error": None if error is None else _one_line(error),
            "resume": self.resume,
            "started_from": self.started_from,
            "pid": os.getpid(),
            "host": platform.node(),
            "started": self.started,
            "updated": _now(),
        }
        files.write_text(self.folder / STATUS, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_status(folder: Path) -> JsonObject | None:
    """Return the content of ``status.json``; None if the file is missing or damaged."""
    try:
        content = json.loads((folder / STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


@contextlib.contextmanager
def writing_to(place: Path, remedy: str = "choose another folder with out=...") -> Iterator[None]:
    """Raise ConfigError with ``remedy`` if the block raises OSError: a run folder, or a file, cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"out: cannot write to {place}: {error.strerror}; {remedy}") from None


def _one_line(error: BaseException) -> str:
    """Return the error as the terminal shows it, on one line."""
    if isinstance(error, CookbookError):
        return str(error)
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


@contextlib.contextmanager
def logging_to(out: Path) -> Iterator[None]:
    """Write cookbook's messages to ``log.txt``. If the disk is full, messages are lost, and a write of the run fails elsewhere.

    Raises:
        ConfigError: the file cannot be opened.
    """
    with writing_to(out / "log.txt"):
        file = logging.FileHandler(out / "log.txt", encoding="utf-8")
    file.handleError = lambda record: None  # type: ignore[method-assign]
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(file)
    try:
        yield
    except BaseException as error:
        log.info("ended by %s", type(error).__name__, exc_info=not isinstance(error, KeyboardInterrupt | HookError))
        raise
    else:
        log.info("finished")
    finally:
        log.removeHandler(file)
        with contextlib.suppress(OSError):
            file.close()
