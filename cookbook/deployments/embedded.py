"""Samples from the trainer's own weights, where it is: weight sync moves nothing, and every replica is the trainer."""

from __future__ import annotations

from dataclasses import dataclass

from cookbook.futures import Future
from cookbook.protocols import Sampler, TrainingClient


@dataclass
class EmbeddedConfig:
    """``max_batch_tokens``: prompt and completion tokens sampled at once."""

    max_batch_tokens: int = 65536

    def deploy(self, trainer: TrainingClient, *, live: bool) -> EmbeddedDeployment:
        """``live`` samples from the trainer's own weights; otherwise every sync copies them, so that samplers may lag behind.

        Raises:
            ConfigError: the trainer takes no such ``max_batch_tokens``.
        """
        trainer.max_batch_tokens = self.max_batch_tokens
        return EmbeddedDeployment(trainer, live)


class EmbeddedDeployment:
    """A :class:`~cookbook.protocols.Deployment` of the trainer itself."""

    def __init__(self, trainer: TrainingClient, live: bool) -> None:
        self._trainer = trainer
        self._live = live

    def load(self, step: int) -> Future[Sampler]:
        return self._trainer.live_sampler(step) if self._live else self._trainer.lagging_sampler(step)

    def close(self) -> None:
        """Nothing of its own to close."""
