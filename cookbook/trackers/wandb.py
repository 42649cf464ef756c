"""Weights & Biases. ``WANDB_MODE=offline`` writes a local run that ``wandb sync`` uploads later."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cookbook.errors import ConfigError, first_line
from cookbook.types import JsonObject
from cookbook.utils import files, packages, reachable
from cookbook.utils.paths import SWEEP

if TYPE_CHECKING:
    import wandb

log = logging.getLogger("cookbook")

# Seconds until a server that answers but does not start the run, or a missing login, makes the run record offline.
START_S = 20.0
# Seconds that the end of a run waits for uploads. Rows that are not uploaded by then stay in the run folder.
FINISH_S = 60.0
COLUMNS = ("step", "split", "prompt", "completion", "reward", "row")


@dataclass
class WandbTracker:
    """A :class:`~cookbook.protocols.SampleTracker`. A resumed run continues under the same W&B id.

    ``conf/tracker/wandb.yaml`` says what each field means.
    """

    project: str = "cookbook"
    entity: str | None = None
    mode: str | None = None
    group: str | None = None
    job_type: str | None = None
    notes: str | None = None
    tags: list[str] = field(default_factory=list)
    samples: int = 100
    # Rows that are not in a table yet.
    _rows: deque[list[object]] = field(default_factory=deque, init=False, repr=False)
    _step: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.samples < 0:
            raise ConfigError(f"tracker.wandb.samples must be at least 0, got {self.samples}; 0 logs no table")
        self._rows = deque(maxlen=self.samples)

    def preflight(self, *_: object) -> None:
        """Raise ConfigError: the package wandb is not installed."""
        packages.need("tracker", "wandb", "wandb", ", or leave tracker=wandb out")

    def start(self, config: JsonObject, out: str, name: str, step: int) -> None:
        self.preflight()
        import wandb

        os.environ.setdefault("WANDB_SILENT", "true")
        id_file = Path(out) / "wandb_id.txt"
        known = (id_file.read_text().strip() if id_file.exists() else "") or None

        def started(mode: str | None) -> wandb.Run:
            return wandb.init(
                project=self.project,
                entity=self.entity,
                name=name,
                mode=mode,  # type: ignore[arg-type]
                group=self.group or os.environ.get("WANDB_RUN_GROUP") or os.environ.get(SWEEP),
                job_type=self.job_type or os.environ.get("WANDB_JOB_TYPE") or config.get("recipe", {}).get("name"),
                notes=self.notes,
                tags=list(self.tags),
                config=dict(config),
                dir=str(Path(out).resolve()),
                id=known,
                resume="allow" if known else None,
                settings=_settings(),
            )

        try:
            mode = self.mode or os.environ.get("WANDB_MODE") or "online"
            if mode not in ("offline", "disabled") and (reason := reachable.no_answer(wandb.setup().settings.base_url)):
                raise wandb.errors.CommError(reason)
            self._run = started(self.mode)
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError, wandb.errors.CommError) as error:
            if "offline" in (self.mode, os.environ.get("WANDB_MODE")):
                raise
            is_login = isinstance(error, wandb.errors.AuthenticationError | wandb.errors.UsageError)
            remedy = "log in with `wandb login`" if is_login else "check the network and WANDB_BASE_URL"
            log.warning("tracker wandb: %s; the run is recorded offline; %s", first_line(error), remedy)
            self._run = started("offline")
        if known is None:
            files.write_text(id_file, f"{self._run.id}\n")
        self._show_place()

    def log_sample(self, step: int, sample: Mapping[str, object]) -> None:
        values = {"step": step, "split": "train", **sample}
        self._rows.append([values.get(column) for column in COLUMNS])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a row of metrics. A row with an evaluation gets a table of the samples since the last table."""
        self._step = step
        evaluated = any(key.startswith("eval/") for key in metrics)
        self._run.log({**metrics, **(self._table() if evaluated else {})}, step=step)

    def end(self, state: str) -> None:
        if self._rows:
            self._run.log(self._table(), step=self._step)
        self._run.finish(exit_code=0 if state == "finished" else 1)

    def _table(self) -> dict[str, object]:
        """Return the newest samples as a table, at most ``samples`` rows, and forget them."""
        import wandb

        rows, self._rows = list(self._rows), deque(maxlen=self.samples)
        return {"samples": wandb.Table(columns=list(COLUMNS), data=rows)} if rows else {}

    def _show_place(self) -> None:
        if self._run.url:
            line = f"wandb: {self._run.url}"
        elif self._run.settings.mode == "offline":
            line = f"wandb: offline; upload this run with: wandb sync {Path(self._run.dir).parent}"
        # W&B is disabled.
        else:
            return
        print(line, flush=True)
        log.info("%s", line)


def _settings() -> wandb.Settings:
    """Return the time limits of the client, whose own are 90 s for a start and none for the end."""
    import wandb

    settings = wandb.Settings(init_timeout=START_S, login_timeout=START_S)
    # Older clients have no such limit.
    if "finish_timeout" in wandb.Settings.model_fields:
        settings.finish_timeout = FINISH_S
        settings.finish_timeout_raises = False
    return settings
