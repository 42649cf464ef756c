"""Checkpoints: folders that appear whole or not at all, and are checked by digest before they are loaded."""

from __future__ import annotations

from dataclasses import dataclass

from cookbook.errors import ConfigError


@dataclass
class CheckpointConfig:
    """When a run is saved. ``conf/checkpoint/default.yaml`` says what each field means."""

    every: int | None = 50
    final: bool = True
    keep: int | None = 3
    asynchronous: bool = False

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ConfigError(f"checkpoint.every must be at least 1, got {self.every}; null saves only at the end")
        if self.keep is not None and self.keep < 1:
            raise ConfigError(f"checkpoint.keep must be at least 1, got {self.keep}; null keeps all")
