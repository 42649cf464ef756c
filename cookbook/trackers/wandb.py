"""Weights & Biases. ``WANDB_MODE=offline`` writes a local run that ``wandb sync`` uploads later."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cookbook import atomic
from cookbook.errors import ConfigError


@dataclass
class WandbTracker:
    """A :class:`~cookbook.protocols.Tracker`. A resumed run goes on under the same W&B id."""

    project: str = "cookbook"
    entity: str | None = None
    mode: str | None = None
    tags: list[str] = field(default_factory=list)
    _run: Any = field(default=None, init=False, repr=False)

    def preflight(self, *_: object) -> None:
        """Raises ConfigError: the package wandb is not installed."""
        if importlib.util.find_spec("wandb") is None:
            raise ConfigError(
                "tracker: wandb is not installed; pip install 'post-training-cookbook[wandb]', or leave tracker=wandb out"
            )

    def start(self, config: Mapping[str, Any], out: str, name: str, step: int) -> None:
        self.preflight()
        import wandb

        os.environ.setdefault("WANDB_SILENT", "true")
        id_file = Path(out) / "wandb_id.txt"
        known = id_file.read_text().strip() if id_file.exists() else None
        try:
            self._run = wandb.init(
                project=self.project,
                entity=self.entity,
                name=name,
                mode=self.mode,  # type: ignore[arg-type]
                tags=list(self.tags),
                config=dict(config),
                dir=str(Path(out).resolve()),
                id=known,
                resume="allow" if known else None,
            )
        except wandb.errors.Error as error:  # no key, no network
            raise ConfigError(f"tracker: wandb: {error}; log in with `wandb login`, or set WANDB_MODE=offline") from None
        if known is None:
            atomic.write_text(id_file, f"{self._run.id}\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def end(self, state: str) -> None:
        self._run.finish(exit_code=0 if state == "finished" else 1)
