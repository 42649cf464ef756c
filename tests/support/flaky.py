"""A deployment of the trainer itself whose requests fail, as those to a server do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cookbook.deployments.embedded import EmbeddedConfig, EmbeddedDeployment
from cookbook.errors import RolloutError, SampleRefusedError, SamplerUnavailableError
from cookbook.futures import Future, done
from cookbook.protocols import Sampler

ERRORS = {
    "passing": SamplerUnavailableError,
    "timeout": TimeoutError,
    "refused": SampleRefusedError,
    "fatal": RolloutError,
    "bug": ZeroDivisionError,
}


@dataclass
class FlakyConfig(EmbeddedConfig):
    """``rate`` of the requests fail, which ones ``seed`` decides; and all of them from request ``outage`` on."""

    rate: float = 0.0
    seed: int = 0
    outage: int | None = None
    error: str = "passing"

    def deploy(self, trainer: Any, *, live: bool) -> FlakyDeployment:
        trainer.max_batch_tokens = self.max_batch_tokens
        return FlakyDeployment(EmbeddedDeployment(trainer, live), self)


class FlakyDeployment:
    def __init__(self, inner: EmbeddedDeployment, config: FlakyConfig) -> None:
        self._inner = inner
        self._config = config
        self._fails = _failures(config)

    def load(self, step: int) -> Future[Sampler]:
        return done(FlakySampler(self._inner.load(step).result(), self._fails, self._config))

    def close(self) -> None:
        self._inner.close()


class FlakySampler:
    def __init__(self, inner: Any, fails: Iterator[bool], config: FlakyConfig) -> None:
        self.step = inner.step
        self._inner = inner
        self._fails = fails
        self._config = config

    def sample(self, *request: Any) -> Future[Any]:
        if not next(self._fails):
            return self._inner.sample(*request)
        future: Future[Any] = Future()
        future.set_exception(ERRORS[self._config.error]("the server is on fire"))
        return future

    def compute_logprobs(self, prompt: Any) -> Future[Any]:
        return self._inner.compute_logprobs(prompt)


def _failures(config: FlakyConfig) -> Iterator[bool]:
    draws = np.random.default_rng(config.seed)
    for number in itertools.count():
        yield bool(draws.random() < config.rate) or (config.outage is not None and number >= config.outage)
