"""When, and how, the deployment gets the trainer's weights."""

from __future__ import annotations

from dataclasses import dataclass

from cookbook.errors import ConfigError
from cookbook.protocols import Deployment, Sampler


@dataclass
class WeightSyncConfig:
    """``every``: optimizer steps between two syncs. Above 1, samples are up to ``every - 1`` steps old."""

    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"weight_sync.every must be at least 1, got {self.every}")


class DeploymentSyncer:
    """A :class:`~cookbook.protocols.WeightSyncer` that asks the deployment for a sampler of the trainer's current weights."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment

    def sync(self, step: int) -> Sampler:
        return self._deployment.load(step).result()
