"""Where the clients of a :class:`~cookbook.service.ServiceClient` compute: in this process, or on a server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from cookbook.backends.failures import Failures
from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.backends.remote.sampler import RemoteSampler
from cookbook.backends.remote.trainer import RemoteTrainer
from cookbook.backends.rest import LocalRestClient, RestClient
from cookbook.backends.sampling import LocalSampler
from cookbook.checkpoints import manifest
from cookbook.engine.model import ModelConfig
from cookbook.paths import packaged
from cookbook.types import Checkpoint, GetServerCapabilitiesResponse, SupportedModel

Trainer = LocalTrainer | RemoteTrainer
AnySampler = LocalSampler | RemoteSampler


class Home(Protocol):
    """Makes trainers and samplers."""

    def model(self, name: str, options: Mapping[str, Any]) -> ModelConfig:
        """A model by its name. ``options`` are fields of its configuration; the rest is as it is where it computes."""
        ...

    def saved_model(self, checkpoint: Checkpoint | str) -> ModelConfig:
        """Raises CheckpointError: it is damaged, or is not there."""
        ...

    def trainer(self, model: ModelConfig, seed: int, unread: set[Failures]) -> Trainer: ...

    def sampler(self, trainer: Trainer, checkpoint: Checkpoint | str | None) -> AnySampler:
        """On saved weights, or on those the trainer was made with."""
        ...

    def capabilities(self) -> Any:
        """The models, as :class:`~cookbook.types.GetServerCapabilitiesResponse` has them."""
        ...

    def rest_client(self) -> RestClient: ...

    def close(self) -> None: ...


class EmbeddedHome:
    """In this process. ``folder`` is where checkpoints go."""

    def __init__(self, config: LocalConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._lengths: dict[str, int | None] = {"tiny": None}  # of the models that have been used

    def model(self, name: str, options: Mapping[str, Any]) -> ModelConfig:
        return ModelConfig(shipped(name), **options)

    def saved_model(self, checkpoint: Checkpoint | str) -> ModelConfig:
        """As a model to load: a model folder, or an adapter that names its base. Raises CheckpointError: it is damaged."""
        folder = place(checkpoint)
        return ModelConfig(folder, dtype=manifest.verify(Path(folder))["dtype"])

    def trainer(self, model: ModelConfig, seed: int, unread: set[Failures]) -> LocalTrainer:
        made = LocalTrainer(model, self._config, seed=seed, folder=self._folder, failures=Failures(unread))
        self._lengths["tiny" if model.name == shipped("tiny") else model.name] = made.max_length
        return made

    def sampler(self, trainer: Trainer, checkpoint: Checkpoint | str | None) -> AnySampler:
        """The trainer was made with the saved weights."""
        return trainer.live_sampler(0).result()

    def capabilities(self) -> GetServerCapabilitiesResponse:
        return GetServerCapabilitiesResponse([SupportedModel(name, length) for name, length in self._lengths.items()])

    def rest_client(self) -> LocalRestClient:
        return LocalRestClient(self._folder, self.capabilities)

    def close(self) -> None:
        """Nothing of its own to close."""


def place(checkpoint: Checkpoint | str) -> str:
    return str(checkpoint.path if isinstance(checkpoint, Checkpoint) else checkpoint)


def shipped(name: str) -> str:
    return str(packaged("data") / "tiny") if name == "tiny" else name
