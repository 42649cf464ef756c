"""Results of a run, read from its folder: what :func:`cookbook.train` returns."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path

from cookbook.checkpoints import store
from cookbook.errors import ConfigError
from cookbook.run import folder as run_folder
from cookbook.run import hooks, report
from cookbook.run.recorder import JsonLines
from cookbook.types import JsonObject
from cookbook.utils.words import counted


@dataclass(frozen=True, repr=False)
class RunResult:
    """Metrics, samples and checkpoints of the run in ``folder``. Each property reads the folder again.

    ``RunResult("runs/mine")`` also reads a run of another process, even while the run trains.

    Raises:
        ConfigError: the folder holds no run.
    """

    folder: Path

    def __init__(self, folder: Path | str) -> None:
        object.__setattr__(self, "folder", Path(folder))
        if not (self.folder / run_folder.CONFIG).is_file():
            raise ConfigError(f"RunResult: {folder} is not a run (no {run_folder.CONFIG}); pass the folder of a run")

    @property
    def config(self) -> JsonObject:
        """The resolved configuration."""
        return run_folder.load_config(self.folder)

    @property
    def metrics(self) -> list[JsonObject]:
        """One dict per logged step: ``step`` and the metrics of the step. ``pandas.DataFrame`` accepts the list."""
        return self._rows()

    @property
    def samples(self) -> list[JsonObject]:
        """The logged completions, one dict each: step, prompt, completion, reward. Empty if the recipe does not sample."""
        return self._rows("samples.jsonl")

    @property
    def checkpoints(self) -> list[Path]:
        """The folders of the training checkpoints, oldest first."""
        return store.all_steps(self.folder / "checkpoints")

    @property
    def objective(self) -> float | None:
        """The last value of ``eval.objective``; None if the run has not reported the metric."""
        return report.objective(self._rows(), (self.config.get("eval") or {}).get("objective"))

    def _rows(self, name: str = run_folder.METRICS) -> list[JsonObject]:
        return JsonLines(self.folder / name).read() if (self.folder / name).exists() else []

    def __repr__(self) -> str:
        rows = self._rows()
        state = (hooks.read_status(self.folder) or {}).get("state", "unknown")
        values = [(headline.key, report.series(rows, headline.key)) for headline in report.HEADLINES]
        measured = [(key, points[-1][1]) for key, points in values if points][:2]
        texts = [f"{key} {report.spelled(key, value)}" for key, value in measured]
        if any(report.is_judged(key) for key, _ in measured):
            texts.append(f"judged by {report.judge_of_run(self.folder)}")
        saved = len(self.checkpoints)
        facts = [str(state), counted(rows[-1]["step"] if rows else 0, "step"), *texts, counted(saved, "checkpoint")]
        return f"<RunResult {self.folder}: {', '.join(facts)}>"

    def _repr_html_(self) -> str:
        """Return the summary and the curves, which a notebook shows."""
        curves = self.folder / "curves.svg"
        return f"<p>{html.escape(repr(self))}</p>{curves.read_text(encoding='utf-8') if curves.is_file() else ''}"
