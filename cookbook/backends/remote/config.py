"""Configuration of the backend ``remote``, and the clients of a :class:`~cookbook.service.ServiceClient` on that server."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cookbook.backends.client_factory import ClientTrainer, checkpoint_path
from cookbook.backends.remote import pointers
from cookbook.backends.remote.connection import SERVER_FIELDS, Connection, refuse_adapter, require_tinker
from cookbook.backends.remote.sampler import RemoteSampler
from cookbook.backends.remote.trainer import RemoteTrainer
from cookbook.engine.model import ModelConfig
from cookbook.errors import ConfigError
from cookbook.futures import Failures
from cookbook.protocols import Backend
from cookbook.types import Checkpoint, JsonObject

if TYPE_CHECKING:
    import tinker


class RemoteClients:
    """A :class:`~cookbook.backends.client_factory.ClientFactory` for a server. Pointers to checkpoints go to ``folder``."""

    def __init__(self, connection: Connection, folder: Path) -> None:
        self._connection = connection
        self._folder = folder
        self._unseeded = itertools.count(1)

    def model(self, name: str, options: JsonObject) -> ModelConfig:
        server_model = self._connection.info.model if self._connection.info else {}
        return ModelConfig(name, **{**{key: server_model[key] for key in SERVER_FIELDS if key in server_model}, **options})

    def saved_model(self, checkpoint: Checkpoint | str) -> ModelConfig:
        name, rank = self._connection.origin(pointers.address(checkpoint_path(checkpoint)))
        return self.model(name, {"lora_rank": rank})

    def trainer(self, model: ModelConfig, seed: int, unread: set[Failures]) -> RemoteTrainer:
        failures = Failures(unread)
        return RemoteTrainer(model, self._connection, seed=seed, folder=self._folder, failures=failures, owns_connection=False)

    def sampler(self, trainer: ClientTrainer, checkpoint: Checkpoint | str | None) -> RemoteSampler:
        """Return a sampler on saved weights or the base model. This does not create the run of ``trainer``."""
        if checkpoint is None:
            name = self._connection.model_name(ModelConfig(trainer.info().model_name))
            client = self._connection.sampler_of(base_model=name)
        else:
            client = self._connection.sampler_of(path=pointers.address(checkpoint_path(checkpoint)))
        return RemoteSampler(self._connection, client, 0, seeds=lambda _: next(self._unseeded))

    def capabilities(self) -> tinker.types.GetServerCapabilitiesResponse:
        return self._connection.capabilities()

    def rest_client(self) -> tinker.RestClient:
        return self._connection.rest

    def close(self) -> None:
        self._connection.close()


@dataclass
class RemoteConfig:
    """Address of a server, and how to use it. ``conf/backend/remote.yaml`` documents each field."""

    base_url: str
    api_key_env: str = "TINKER_API_KEY"
    api_key_file: str | None = None
    patience_s: float = 300.0
    all_logprobs: bool = False

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"backend.base_url: expected http://host:port or https://..., got {self.base_url!r}")
        if not self.patience_s > 0:
            raise ConfigError(f"backend.patience_s: expected a number above 0, got {self.patience_s}")

    def preflight(self, model: ModelConfig, backend: Backend) -> None:
        """Validate the settings. Raises ConfigError: ``tinker`` is not installed, or a server does not support the adapter."""
        require_tinker()
        refuse_adapter(model)

    def make_trainer(self, model: ModelConfig, *, seed: int, folder: Path) -> RemoteTrainer:
        """Return a trainer that is a run on the server. Checkpoints stay on the server; pointers to them go to ``folder``.

        Raises:
            ConfigError: the package ``tinker`` is missing, or the server's model settings differ from ``model``.
            BackendError: the server does not respond, refuses the key, or does not serve the model.
        """
        return RemoteTrainer(model, self._connection(), seed=seed, folder=folder)

    def clients(self, folder: Path) -> RemoteClients:
        """Return the factory of a :class:`~cookbook.service.ServiceClient`.

        Raises:
            ConfigError: the package ``tinker`` is missing.
            BackendError: the server does not respond, or refuses the key.
        """
        return RemoteClients(self._connection(), folder)

    def _connection(self) -> Connection:
        if self.api_key_file is None:
            key, name = os.environ.get(self.api_key_env), f"${self.api_key_env}"
        else:
            key, name = read_key(Path(self.api_key_file)), "backend.api_key_file"
        return Connection(self.base_url, key, name, self.patience_s, all_logprobs=self.all_logprobs)


def read_key(path: Path) -> str:
    """Return the API key in a file. Raises ConfigError: the file cannot be read, or is empty."""
    try:
        key = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"backend.api_key_file: cannot read {str(path)!r}: {error.strerror}") from None
    if not key:
        raise ConfigError(f"backend.api_key_file: {path} is empty; write the key into it")
    return key
