"""Moments of a run that other code may want to know about. Derive from :class:`Hook` and override what you need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cookbook.protocols import Sampler
    from cookbook.types import Checkpoint


class Hook:
    """Does nothing at every moment of a run. An exception in a hook fails the run.

    ``run`` is what the recipe receives (:class:`cookbook.run.Run`).
    """

    def on_start(self, run: object) -> None:
        """Before the first step, after a checkpoint to resume from has been loaded."""

    def on_step(self, run: object, step: int, metrics: Mapping[str, float]) -> None:
        """After every optimizer step, with the row that goes to ``metrics.jsonl``."""

    def on_checkpoint(self, run: object, checkpoint: Checkpoint) -> None:
        """After a checkpoint has been written."""

    def on_weight_sync(self, run: object, sampler: Sampler) -> None:
        """After the deployment has got new weights."""

    def on_eval(self, run: object, step: int, metrics: Mapping[str, float]) -> None:
        """After an evaluation."""

    def on_end(self, run: object, state: str) -> None:
        """At the end: ``finished``, ``interrupted`` or ``failed``."""
