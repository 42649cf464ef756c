"""Checkpoints: folders that appear whole or not at all, and are checked by digest before they are loaded."""

from __future__ import annotations

from dataclasses import dataclass

from cookbook.checkpoints.cadence import Cadence
from cookbook.errors import ConfigError


@dataclass
class CheckpointConfig:
    """When a run is saved, and what stays. ``conf/checkpoint/default.yaml`` says what each field means."""

    every: int | None = 50
    every_tokens: int | None = None
    every_minutes: float | None = None
    final: bool = True
    keep: int | None = 3
    keep_every: int | None = None
    keep_every_tokens: int | None = None
    keep_every_minutes: float | None = None
    asynchronous: bool = False

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise ConfigError(f"checkpoint.keep must be at least 1, got {self.keep}; null keeps all")
        for name, default in (("every", "null saves only at the end"), ("keep_every", "null keeps none of the older ones")):
            for unit, least in (("", "at least 1"), ("_tokens", "at least 1"), ("_minutes", "above 0")):
                value = getattr(self, name + unit)
                if value is not None and not (value > 0 if unit == "_minutes" else value >= 1):
                    raise ConfigError(f"checkpoint.{name}{unit} must be {least}, got {value}; {default}")

    @property
    def saving(self) -> Cadence:
        """When the run is saved."""
        return Cadence(self.every, self.every_tokens, self.every_minutes)

    @property
    def staying(self) -> Cadence:
        """Which checkpoints stay for good, however many are newer."""
        return Cadence(self.keep_every, self.keep_every_tokens, self.keep_every_minutes)
