"""Clients of a :class:`~cookbook.service.ServiceClient` that computes in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from cookbook.backends.client_factory import ClientTrainer, PromptSampler, checkpoint_path
from cookbook.backends.local.trainer import LocalTrainer
from cookbook.backends.model_source import sampling_target
from cookbook.checkpoints import inventory, manifest
from cookbook.engine.model import LORA_FILE, ModelConfig, check_trainable
from cookbook.errors import CheckpointError, ConfigError
from cookbook.futures import Failures, Future, done
from cookbook.protocols import EngineBackend
from cookbook.types import Checkpoint, GetServerCapabilitiesResponse, JsonObject, SupportedModel


@dataclass(frozen=True)
class WeightsInfo:
    """Model of saved weights. ``lora_rank`` is None if all parameters were trained."""

    base_model: str
    is_lora: bool
    lora_rank: int | None


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint in a list. ``tinker_path`` is its folder on this disk."""

    checkpoint_id: str
    # "training" or "sampler".
    checkpoint_type: str
    time: datetime
    tinker_path: str
    size_bytes: int
    public: bool = False
    user_metadata: None = None
    expires_at: None = None


@dataclass(frozen=True)
class CheckpointsList:
    checkpoints: list[SavedCheckpoint]
    cursor: None = None


class LocalRestClient:
    """Lists the checkpoints in ``folder``. Methods for runs, sessions and users raise ConfigError: only a server has these."""

    def __init__(self, folder: Path, capabilities: Callable[[], GetServerCapabilitiesResponse]) -> None:
        self._folder = folder
        self._capabilities = capabilities

    def get_server_capabilities(self) -> Future[GetServerCapabilitiesResponse]:
        return done(self._capabilities())

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> Future[WeightsInfo]:
        """Return the model of a checkpoint. Raises CheckpointError: the folder is not a checkpoint."""
        facts = manifest.read(Path(tinker_path))
        rank = json.loads((Path(tinker_path) / LORA_FILE).read_text())["r"] if facts["lora"] else None
        return done(WeightsInfo(facts["base_model"], bool(facts["lora"]), rank))

    def list_user_checkpoints(self, limit: int = 100, offset: int = 0) -> Future[CheckpointsList]:
        """List the checkpoints below ``checkpoint_dir``, newest first, without damaged ones."""
        try:
            intact = [entry for entry in inventory.entries(self._folder) if entry.facts is not None]
        except CheckpointError:
            intact = []
        return done(CheckpointsList([_listed(entry) for entry in intact[::-1][offset : offset + limit]]))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        raise ConfigError(
            f"create_rest_client().{name}: only a server has runs, sessions and users; pass base_url to ServiceClient"
        )


def _listed(entry: inventory.CheckpointEntry) -> SavedCheckpoint:
    kind = "sampler" if entry.is_sampled_from else "training"
    time = datetime.fromtimestamp(entry.written / 1e9, UTC)
    return SavedCheckpoint(entry.folder.name, kind, time, str(entry.folder), entry.num_bytes)


class LocalClients:
    """A :class:`~cookbook.backends.client_factory.ClientFactory` of embedded trainers. Checkpoints go to ``folder``."""

    def __init__(self, backend: EngineBackend, folder: Path) -> None:
        self._backend = backend
        self._folder = folder
        # Maximum sequence length by model, None if the model was not loaded yet. The included model is always listed.
        self._lengths: dict[str, int | None] = {"tiny": None}

    def model(self, name: str, options: JsonObject) -> ModelConfig:
        return ModelConfig(sampling_target(name), **options)

    def saved_model(self, checkpoint: Checkpoint | str) -> ModelConfig:
        """Return the configuration that loads a checkpoint: a model folder, or an adapter that names its base model.

        Raises:
            CheckpointError: the checkpoint is missing or damaged.
        """
        folder = sampling_target(checkpoint_path(checkpoint))
        return ModelConfig(folder, dtype=manifest.verify(Path(folder))["dtype"])

    def trainer(self, model: ModelConfig, seed: int, unread: set[Failures]) -> LocalTrainer:
        check_trainable(model)
        trainer = LocalTrainer(model, self._backend, seed=seed, folder=self._folder, failures=Failures(unread))
        self._lengths["tiny" if model.name == sampling_target("tiny") else model.name] = trainer.max_length
        return trainer

    def sampler(self, trainer: ClientTrainer, checkpoint: Checkpoint | str | None) -> PromptSampler:
        """Return a sampler on the initial weights of ``trainer``, which are those of ``checkpoint``."""
        sampler: PromptSampler = trainer.live_sampler(0).result()
        return sampler

    def capabilities(self) -> GetServerCapabilitiesResponse:
        return GetServerCapabilitiesResponse([SupportedModel(name, length) for name, length in self._lengths.items()])

    def rest_client(self) -> LocalRestClient:
        return LocalRestClient(self._folder, self.capabilities)

    def close(self) -> None:
        """Do nothing: the service closes the trainers, and no other resource is open."""
