"""Deployment ``embedded``: the trainer samples from its own weights, so a weight sync transfers no data."""

from __future__ import annotations

from dataclasses import dataclass

from cookbook.futures import Future
from cookbook.protocols import MAX_BATCH_TOKENS, Sampler, Trainer


@dataclass
class EmbeddedConfig:
    """``max_batch_tokens``: limit on the prompt and completion tokens that are sampled together."""

    max_batch_tokens: int = MAX_BATCH_TOKENS

    def deploy(self, trainer: Trainer, *, live: bool) -> EmbeddedDeployment:
        """Return the deployment.

        Args:
            live: sample from the weights in training; otherwise each sync copies the weights, so that samplers may lag behind.

        Raises:
            ConfigError: the trainer does not allow this ``max_batch_tokens``.
        """
        trainer.max_batch_tokens = self.max_batch_tokens
        return EmbeddedDeployment(trainer, live)


class EmbeddedDeployment:
    """A :class:`~cookbook.protocols.Deployment` of the trainer itself."""

    def __init__(self, trainer: Trainer, live: bool) -> None:
        self._trainer = trainer
        self._live = live

    def load(self, step: int) -> Future[Sampler]:
        return self._trainer.live_sampler(step) if self._live else self._trainer.lagging_sampler(step)

    def close(self) -> None:
        """Do nothing: the run closes the trainer."""
