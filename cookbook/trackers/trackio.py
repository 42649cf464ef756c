"""Trackio: metrics in a local database (the folder ``TRACKIO_DIR``), which ``trackio show`` draws."""

from __future__ import annotations

import contextlib
import io
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cookbook.types import JsonObject
from cookbook.utils import files, packages


@dataclass
class TrackioTracker:
    """A :class:`~cookbook.protocols.Tracker`. A resumed run continues under the same name.

    ``conf/tracker/trackio.yaml`` says what each field means.
    """

    project: str = "cookbook"
    group: str | None = None
    space_id: str | None = None

    def preflight(self, *_: object) -> None:
        """Raise ConfigError: the package trackio is not installed."""
        packages.need("tracker", "trackio", "trackio", ", or leave tracker=trackio out")

    def start(self, config: JsonObject, out: str, name: str, step: int) -> None:
        self.preflight()
        import trackio

        # Trackio finds a run by its name, and two folders of one name would otherwise share a run.
        name_file = Path(out) / "trackio_name.txt"
        known = name_file.read_text().strip() if name_file.exists() else ""
        name = known or f"{name}-{secrets.token_hex(2)}"
        # Its own lines would stand between those of the run.
        with contextlib.redirect_stdout(io.StringIO()):
            self._run = trackio.init(
                project=self.project,
                name=name,
                group=self.group,
                space_id=self.space_id,
                config=dict(config),
                resume="allow" if known else "never",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        if not known:
            files.write_text(name_file, f"{name}\n")
        print(f"trackio: run {name}; show it with: trackio show --project {self.project}", flush=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def end(self, state: str) -> None:
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):
            trackio.finish()
