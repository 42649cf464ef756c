"""Start of a private group: checks of the packages and the model, and the trainer of the group."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING

from cookbook.engine.model import ModelConfig, load_tokenizer
from cookbook.engine.shape import shape_of
from cookbook.errors import ConfigError
from cookbook.types import JsonObject

if TYPE_CHECKING:
    from cookbook.backends.remote.group_trainer import GroupTrainer

# Packages of the extras `server` and `tinker`: the ranks are a server, and the run is its client.
NEEDS = ("fastapi", "uvicorn", "pydantic", "google.protobuf", "zstandard", "tinker")


def preflight(model: ModelConfig) -> None:
    """Raises ConfigError: a package is missing, or the server cannot create the adapter."""
    from cookbook.backends.remote.connection import refuse_adapter

    for name in NEEDS:
        parent = name.partition(".")[0]
        if importlib.util.find_spec(parent) is None or importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"backend.ranks: the package {name!r} is not installed; install post-training-cookbook[server,tinker]"
            )
    refuse_adapter(model)


def check_model(model: ModelConfig) -> None:
    """Check that the model exists, without its weights. Raises CookbookError: the model cannot be loaded."""
    if shape_of(model) is None:
        # The model is not on this disk yet. Its tokenizer is a small download, and fails if the model does not exist.
        load_tokenizer(model)


def trainer_of(
    size: int,
    config: JsonObject,
    model: ModelConfig,
    *,
    seed: int,
    folder: Path,
    all_logprobs: bool,
    gpus: tuple[int, ...],
) -> GroupTrainer:
    """Start ``size`` ranks and return their trainer. The ranks end when the trainer is closed.

    Args:
        config: configuration of each rank; see :func:`cookbook.server.rank.main`.
        gpus: numbers of the GPUs of the ranks; empty: CPUs.

    Raises:
        BackendError: the ranks cannot load the model, or end early.
    """
    # Imported here: a trainer in this process needs no HTTP client.
    from cookbook.backends.remote.group_trainer import GroupTrainer, PrivateGroup

    try:
        json.dumps(config)
    except TypeError as error:
        raise ConfigError(
            f"backend.ranks: the ranks need a configuration of plain values ({error}); name a file.py:name"
        ) from None
    group = PrivateGroup(size, config, folder)
    return GroupTrainer(model, group, seed=seed, folder=folder, all_logprobs=all_logprobs, gpus=gpus)
