"""TensorBoard event files, in ``<out>/tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cookbook.utils import packages


@dataclass
class TensorBoardTracker:
    """A :class:`~cookbook.protocols.Tracker`."""

    def preflight(self, *_: object) -> None:
        """Raise ConfigError: the package tensorboard is not installed."""
        packages.need("tracker", "tensorboard", "tensorboard", ", or leave tracker=tensorboard out")

    def start(self, config: Mapping[str, object], out: str, name: str, step: int) -> None:
        self.preflight()
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard drops the values that an earlier process wrote for later steps.
        self._writer = SummaryWriter(str(Path(out) / "tensorboard"), purge_step=step + 1 if step else None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def end(self, state: str) -> None:
        self._writer.close()
