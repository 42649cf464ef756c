"""Which server, and how patient to be with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cookbook.engine.model import ModelConfig
from cookbook.errors import ConfigError
from cookbook.protocols import Backend

if TYPE_CHECKING:
    from cookbook.backends.homes import Home
    from cookbook.backends.remote.trainer import RemoteTrainer


@dataclass
class RemoteConfig:
    """``conf/backend/remote.yaml`` says what each field means."""

    base_url: str
    api_key_env: str = "TINKER_API_KEY"
    patience_s: float = 300.0
    all_logprobs: bool = False

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"backend.base_url: expected http://host:port or https://..., got {self.base_url!r}")
        if not self.patience_s > 0:
            raise ConfigError(f"backend.patience_s must be above 0, got {self.patience_s}")

    def preflight(self, model: ModelConfig, backend: Backend) -> None:
        """Raises ConfigError: the package ``tinker`` is missing, or the server cannot make the adapter."""
        from cookbook.backends.remote.server import package, refuse_adapter  # they import torch and tinker

        package()
        refuse_adapter(model)

    def make_trainer(self, model: ModelConfig, *, seed: int, folder: Path) -> RemoteTrainer:
        """A run on the server. Its checkpoints stay there; ``folder`` gets what finds them again.

        Raises:
            ConfigError: the package ``tinker`` is missing, or the server computes otherwise than ``model`` says.
            BackendError: the server does not answer, refuses the key, or has another model.
        """
        from cookbook.backends.remote.server import Server  # they import torch and tinker
        from cookbook.backends.remote.trainer import RemoteTrainer

        return RemoteTrainer(model, Server(self), seed=seed, folder=folder)

    def home(self, folder: Path) -> Home:
        """Where a :class:`~cookbook.service.ServiceClient` computes. Raises as :meth:`make_trainer`."""
        from cookbook.backends.remote.home import RemoteHome

        return RemoteHome(self, folder)
