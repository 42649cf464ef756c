"""Output of a run while it trains: rows of metrics and samples, in files, trackers and on the terminal; and checkpoints."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from cookbook import terminal
from cookbook.checkpoints import CheckpointConfig, store
from cookbook.checkpoints.schedule import Progress
from cookbook.data import RejectedRows
from cookbook.errors import ConfigError, described
from cookbook.futures import Future
from cookbook.protocols import Sampler, SampleTracker, Tracker, Trainer
from cookbook.run.best_step import BestStep
from cookbook.run.folder import METRICS
from cookbook.run.hooks import writing_to
from cookbook.run.rollout_store import RolloutStore
from cookbook.sampling.evaluation import NUM_EXAMPLES, Example
from cookbook.terminal import Console
from cookbook.types import Checkpoint, JsonObject
from cookbook.utils import files
from cookbook.utils.words import counted

log = logging.getLogger("cookbook")

# Remedy in errors of writing.
DISK_FULL = "free disk space and run the same command to resume"


class Recorder:
    """Writes the rows of ``metrics.jsonl``, ``samples.jsonl`` and ``bad_rows.jsonl``, and passes them to the trackers.

    ``rollouts`` writes ``rollouts.jsonl.gz``. ``examples`` are the completions of the last evaluation.
    """

    def __init__(self, out: Path, trackers: Sequence[Tracker], refusals: RejectedRows, rollouts: RolloutStore) -> None:
        self.rollouts = rollouts
        self.metrics = JsonLines(out / METRICS)
        self.samples = JsonLines(out / "samples.jsonl")
        self.bad_rows = BadRows(out / "bad_rows.jsonl", refusals)
        self.trackers = Trackers(trackers)
        self.examples: Sequence[Example] = ()
        self._console: Console | None = None

    def keep_until(self, step: int) -> None:
        """Drop the rows of later steps: the resumed run writes them again."""
        for file in (self.metrics, self.samples, self.bad_rows, self.rollouts):
            file.keep_until(step)

    def close(self) -> None:
        for file in (self.metrics, self.samples, self.bad_rows):
            file.close()

    @contextlib.contextmanager
    def shown(self, total: int, done: int, eval_every: int | None) -> Iterator[None]:
        """Show the progress of a loop of ``total`` steps, of which ``done`` are finished, while the block runs.

        The loop is evaluated every ``eval_every`` steps, and at its end; None means at its end only.
        """
        with contextlib.closing(Console(total, done, eval_every)) as self._console:
            yield

    def note(self, line: str) -> None:
        """Print a line above the progress display."""
        if self._console is not None:
            self._console.note(line)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        self.metrics.write(step, row)
        self.trackers.call("log", step, row)
        if self._console is not None:
            self._console.update(step, row)

    def write_sample(self, step: int, sample: JsonObject) -> None:
        self.samples.write(step, sample)
        self.trackers.call("log_sample", step, sample)

    def write_examples(self, step: int, examples: Sequence[Example]) -> None:
        """Write the completions of an evaluation as samples, and keep the first ones for the end of the run."""
        self.examples = examples[:NUM_EXAMPLES]
        for example in examples:
            values = {"split": "eval", "prompt": example.prompt, "completion": example.completion, "reward": example.reward}
            self.write_sample(step, values | ({"parts": dict(example.parts)} if example.parts else {}))


class Trackers:
    """The trackers of one run. A tracker that raises is reported once, in one line, and switched off; the run continues."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers
        self._active: list[Tracker] = []

    def start(self, config: JsonObject, out: str, name: str, step: int) -> None:
        """Raise ConfigError: a tracker refuses to start, for example because its package is missing."""
        for tracker in self._trackers:
            if self._call(tracker, "start", config, out, name, step):
                self._active.append(tracker)

    def call(self, moment: str, *arguments: object) -> None:
        """Call the method ``moment`` of every tracker that is on: ``log``, ``log_sample`` (if it has the method) or ``end``."""
        self._active = [tracker for tracker in self._active if self._call(tracker, moment, *arguments)]

    def _call(self, tracker: Tracker, moment: str, *arguments: object) -> bool:
        """Return whether the tracker stays on."""
        if moment == "log_sample" and not isinstance(tracker, SampleTracker):
            return True
        try:
            getattr(tracker, moment)(*arguments)
            return True
        except (Exception, SystemExit) as error:
            if moment == "start" and isinstance(error, ConfigError):
                raise
            name = type(tracker).__name__
            result = "its last values may be missing" if moment == "end" else "the tracker is off, the run continues"
            log.warning("tracker %s: %s raised %s; %s", name, moment, described(error), result)
            log.info("the trace of tracker %s:", name, exc_info=error)
            return False


class JsonLines:
    """A file of JSON objects. Every row starts with its ``step``; a row has left the process when :meth:`write` returns.

    Raises:
        ConfigError: a write to the disk fails.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Values of the last row that this process wrote.
        self.last: JsonObject = {}
        self._file: TextIO | None = None

    def write(self, step: int, values: JsonObject) -> None:
        with writing_to(self.path, DISK_FULL):
            self._file = self._file or self.path.open("a", encoding="utf-8")
            self.last = {key: _finite(value) for key, value in values.items() if key != "step"}
            self._file.write(_line({"step": step, **self.last}))
            self._file.flush()

    def read(self) -> list[JsonObject]:
        """Return all whole rows. Damaged lines are left out and reported; a last line that a kill cut short is left out."""
        rows, damaged = self._read()
        if damaged:
            log.warning("%s: damaged in %s; the other rows are used", self.path, _lines(damaged))
        return rows

    def keep_until(self, step: int) -> None:
        """Drop the rows of later steps, which the resumed run writes again. A file with damaged lines is copied first."""
        if not self.path.exists():
            return
        rows, damaged = self._read()
        whole = "".join(_line(row) for row in rows if row["step"] <= step)
        if whole.encode() == self.path.read_bytes():
            return
        with writing_to(self.path, DISK_FULL):
            if damaged:
                names = (self.path.with_name(f"{self.path.name}.damaged-{n}") for n in itertools.count(1))
                copy = next(name for name in names if not name.exists())
                shutil.copy2(self.path, copy)
                log.warning("%s: damaged in %s; the other rows are used, and %s is a copy", self.path, _lines(damaged), copy)
            files.write_text(self.path, whole)

    def _read(self) -> tuple[list[JsonObject], list[int]]:
        """Return the rows, and the numbers of the damaged lines."""
        rows: list[JsonObject] = []
        damaged = []
        # The texts of a row may contain other characters that end a line.
        lines = self.path.read_bytes().split(b"\n") if self.path.exists() else []
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line.decode())
                if not (isinstance(row, dict) and isinstance(row.get("step"), int)):
                    raise ValueError("not a row of a run")
                rows.append(row)
            except ValueError:
                # The last line is empty, or was cut short by a kill.
                if number < len(lines):
                    damaged.append(number)
        return rows, damaged

    def close(self) -> None:
        if self._file is not None:
            # If a row could not be written, the error has already been raised.
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def _lines(numbers: Sequence[int]) -> str:
    first = f"line {numbers[0]}"
    return first if len(numbers) == 1 else f"{len(numbers)} lines ({first} is the first)"


def _line(row: JsonObject) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _finite(value: object) -> object:
    """Return None for NaN and infinity, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class BadRows(JsonLines):
    """Writes each row that the run leaves out to ``bad_rows.jsonl``, once, with the reason and the step at which it was met.

    A row met before the first step has step 0. The file is made with its first row.
    """

    def __init__(self, path: Path, refusals: RejectedRows) -> None:
        super().__init__(path)
        self._refusals = refusals
        # Number of refusals that have been handled.
        self._handled = 0
        self._known: set[str] = set()

    def keep_until(self, step: int) -> None:
        """Drop the rows met after ``step``: the resumed run meets them again."""
        super().keep_until(step)
        self._known = {row.get("row", "") for row in self.read()}

    def note(self, step: int) -> None:
        """Write the rows rejected since the last call, and log their number."""
        new = [refusal for refusal in self._refusals.found[self._handled :] if refusal.where not in self._known]
        self._handled = len(self._refusals.found)
        for refusal in new:
            self._known.add(refusal.where)
            self.write(step, {"row": refusal.where, "reason": refusal.reason, "policy": f"data.{refusal.policy}"})
        if new:
            log.warning("data: left out %s, listed in %s; the first: %s", counted(len(new), "row"), self.path, new[0].reason)

    def metrics(self, step: int) -> dict[str, float]:
        """Return the number of rows left out up to ``step`` as a metric; no metric if the number is 0."""
        self.note(step)
        return {"data/bad_rows": float(len(self._known))} if self._known else {}

    def summary(self) -> str | None:
        """Return a line for the end of the run; None if no row was left out."""
        count = len(self._known)
        return f"left out {counted(count, 'row')}, each with the reason in {self.path}" if count else None


@dataclass
class Saver:
    """Saves the trainer to ``folder``, at most one checkpoint at a time.

    ``saved`` is the progress of the newest checkpoint; that checkpoint may still be pending.
    """

    config: CheckpointConfig
    trainer: Trainer
    folder: Path
    saved: Progress
    best: BestStep
    # The step of the pending checkpoint, and its future.
    _pending: tuple[int, Future[Checkpoint]] | None = None

    @property
    def has_written(self) -> bool:
        """Whether a pending checkpoint is written, so that :meth:`wait` does not block."""
        return self._pending is not None and self._pending[1].done()

    @property
    def steps(self) -> list[int]:
        """The steps of all checkpoints, in order."""
        return [int(path.name.removeprefix("step-")) for path in store.all_steps(self.folder)]

    def due(self, now: Progress, total: int) -> bool:
        """Whether to save after this step of ``total``."""
        is_best = self.best.step == now.steps and self.saved.steps < now.steps
        return is_best or self.config.saving.due(self.saved, now) or (now.steps == total and self.config.final)

    def start(self, now: Progress, facts: JsonObject, sampler: Sampler | None, *, last: bool, complete: bool) -> None:
        """Begin a checkpoint with ``facts`` in its manifest; the previous one must have been waited for.

        Between two weight syncs the checkpoint also holds the older weights of ``sampler``. Delaying the checkpoint until the
        next sync would store less, but Ctrl-C must not wait for a sync, and a run must be able to stop after every step.

        Args:
            last: no training follows, so that the checkpoint need not be copied to write it in the background.
            complete: the run has made all its steps.
        """
        # Trainers of other packages may not have the argument.
        weights_only = {"optimizer": False} if complete and not self.config.final_state else {}
        saving = self.trainer.save_state(
            store.step_name(now.steps),
            overwrite=True,
            facts={"run": facts},
            sampler=sampler,
            asynchronous=self.config.asynchronous and not last,
            **weights_only,
        )
        self._pending, self.saved = (now.steps, saving), now

    def wait(self) -> Checkpoint | None:
        """Wait for the pending checkpoint, delete old ones, and return it; None if no checkpoint is pending.

        Raises:
            CheckpointError: the checkpoint could not be saved.
            ConfigError: the recipe's loop does not make exactly one optimizer step per turn, so that the run cannot resume.
        """
        if self._pending is None:
            return None
        (step, saving), self._pending = self._pending, None
        with terminal.doing(f"saving step {step}", plain_after_s=10):
            checkpoint = saving.result()
        if checkpoint.step != step:
            raise ConfigError(
                f"recipe: after {step} turns of run.steps the model has seen {checkpoint.step} optimizer steps; "
                "call run.optim_step(step) once per turn"
            )
        self.prune(step)
        log.info("saved %s", checkpoint.path)
        return checkpoint

    def prune(self, step: int) -> None:
        """Delete the checkpoints up to ``step`` that ``checkpoint.keep`` and the other options of retention do not keep."""
        store.prune(self.folder, self.config.keep, step, self.config.staying, self.best.step)
