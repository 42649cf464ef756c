"""Tinker's ``RestClient`` for a trainer in this process: what can be said of folders on this disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from cookbook.checkpoints import inventory, manifest
from cookbook.engine.model import LORA_FILE
from cookbook.errors import CheckpointError, ConfigError
from cookbook.futures import Future, done
from cookbook.types import GetServerCapabilitiesResponse


@dataclass(frozen=True)
class WeightsInfo:
    """What saved weights are of; ``lora_rank`` None: every parameter."""

    base_model: str
    is_lora: bool
    lora_rank: int | None


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint in a list. ``tinker_path`` is its folder here."""

    checkpoint_id: str
    checkpoint_type: str  # training | sampler
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
    """``folder`` is where checkpoints go. What only a server has (runs, sessions, users) is refused by name."""

    def __init__(self, folder: Path, capabilities: Callable[[], GetServerCapabilitiesResponse]) -> None:
        self._folder = folder
        self._capabilities = capabilities

    def get_server_capabilities(self) -> Future[GetServerCapabilitiesResponse]:
        return done(self._capabilities())

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> Future[WeightsInfo]:
        """Raises CheckpointError: there is no checkpoint in that folder."""
        facts = manifest.read(Path(tinker_path))
        rank = json.loads((Path(tinker_path) / LORA_FILE).read_text())["r"] if facts["lora"] else None
        return done(WeightsInfo(facts["base_model"], bool(facts["lora"]), rank))

    def list_user_checkpoints(self, limit: int = 100, offset: int = 0) -> Future[CheckpointsList]:
        """The checkpoints below ``checkpoint_dir``, newest first; damaged ones are left out."""
        try:
            whole = [entry for entry in inventory.entries(self._folder) if entry.facts is not None]
        except CheckpointError:
            whole = []
        return done(CheckpointsList([_listed(entry) for entry in whole[::-1][offset : offset + limit]]))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        raise ConfigError(
            f"create_rest_client().{name}: a trainer in this process keeps no runs, sessions or users; use base_url of a server"
        )


def _listed(entry: inventory.Entry) -> SavedCheckpoint:
    kind = "sampler" if entry.is_sampled_from else "training"
    time = datetime.fromtimestamp(entry.written / 1e9, UTC)
    return SavedCheckpoint(entry.folder.name, kind, time, str(entry.folder), entry.num_bytes)


RestClient = Any
"""That of the ``tinker`` package, or :class:`LocalRestClient`."""
