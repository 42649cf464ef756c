"""Clients of one server, which share a session there."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cookbook.backends.failures import Failures
from cookbook.backends.homes import AnySampler, Trainer, place
from cookbook.backends.remote import pointers
from cookbook.backends.remote.config import RemoteConfig
from cookbook.backends.remote.facts import DECIDED_THERE
from cookbook.backends.remote.sampler import RemoteSampler
from cookbook.backends.remote.server import Server
from cookbook.backends.remote.trainer import RemoteTrainer
from cookbook.engine.model import ModelConfig
from cookbook.types import Checkpoint


class RemoteHome:
    """On a server. ``folder`` gets pointers to what is saved there."""

    def __init__(self, config: RemoteConfig, folder: Path) -> None:
        self._server = Server(config)
        self._folder = folder
        self._unseeded = itertools.count(1)

    def model(self, name: str, options: Mapping[str, Any]) -> ModelConfig:
        there = self._server.facts.model if self._server.facts else {}
        return ModelConfig(name, **{**{key: there[key] for key in DECIDED_THERE if key in there}, **options})

    def saved_model(self, checkpoint: Checkpoint | str) -> ModelConfig:
        name, rank = self._server.origin(pointers.address(place(checkpoint)))
        return self.model(name, {"lora_rank": rank})

    def trainer(self, model: ModelConfig, seed: int, unread: set[Failures]) -> RemoteTrainer:
        return RemoteTrainer(model, self._server, seed=seed, folder=self._folder, failures=Failures(unread), owns_server=False)

    def sampler(self, trainer: Trainer, checkpoint: Checkpoint | str | None) -> AnySampler:
        """Makes no run for it."""
        if checkpoint is None:
            name = self._server.model_name(ModelConfig(trainer.info().model_name))
            client = self._server.sampler_of(base_model=name)
        else:
            client = self._server.sampler_of(path=pointers.address(place(checkpoint)))
        return RemoteSampler(self._server, client, 0, seeds=lambda _: next(self._unseeded))

    def capabilities(self) -> Any:
        return self._server.capabilities()

    def rest_client(self) -> Any:
        """That of the ``tinker`` package."""
        return self._server.rest

    def close(self) -> None:
        self._server.close()
