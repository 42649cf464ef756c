"""Samples from the trainer's own weights, in its process: weight sync costs nothing, and every replica is the trainer."""

from __future__ import annotations

from dataclasses import dataclass

from cookbook.backends.local import LocalTrainer
from cookbook.errors import ConfigError
from cookbook.futures import Future
from cookbook.protocols import Sampler, TrainingClient


@dataclass
class EmbeddedConfig:
    """``max_batch_tokens``: prompt and completion tokens sampled at once."""

    max_batch_tokens: int = 65536

    def deploy(self, trainer: TrainingClient, *, live: bool) -> EmbeddedDeployment:
        """``live`` samples from the trainer's own weights; otherwise every sync copies them, so that samplers may lag behind.

        Raises:
            ConfigError: the trainer is not in this process.
        """
        if not isinstance(trainer, LocalTrainer):
            raise ConfigError("deployment=embedded needs backend=local: it samples from a trainer in the same process")
        return EmbeddedDeployment(trainer, self.max_batch_tokens, live)


class EmbeddedDeployment:
    """A :class:`~cookbook.protocols.Deployment` in the trainer's process."""

    def __init__(self, trainer: LocalTrainer, max_batch_tokens: int, live: bool) -> None:
        self._trainer = trainer
        self._live = live
        trainer.max_batch_tokens = max_batch_tokens

    def load(self, step: int) -> Future[Sampler]:
        return self._trainer.live_sampler(step) if self._live else self._trainer.snapshot_sampler(step)  # type: ignore[return-value]

    def close(self) -> None:
        """Nothing of its own to close."""
