"""How far a run has come, and how often something is due on its way: by optimizer steps, tokens or minutes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Progress:
    """Over all sittings of a run: optimizer steps, tokens that went through forward_backward, minutes of training."""

    steps: int = 0
    tokens: int = 0
    minutes: float = 0.0

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> Progress:
        """Where the run stood that wrote a checkpoint's manifest; zeros for what it does not say."""
        stated = manifest.get("run", {}).get("progress", {})
        return cls(int(manifest["step"]), int(stated.get("tokens", 0)), float(stated.get("minutes", 0.0)))


@dataclass(frozen=True)
class Cadence:
    """Every so many steps, every so many tokens, every so many minutes, by each of them that is not None."""

    steps: int | None = None
    tokens: int | None = None
    minutes: float | None = None

    def due(self, before: Progress, now: Progress) -> bool:
        """Whether a multiple lies between the two, ``now`` included."""
        ways = (
            (self.steps, before.steps, now.steps),
            (self.tokens, before.tokens, now.tokens),
            (self.minutes, before.minutes, now.minutes),
        )
        return any(size is not None and earlier // size < later // size for size, earlier, later in ways)
