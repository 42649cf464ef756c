"""``cookbook serve``: from a configuration to a listening server."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from omegaconf import DictConfig

from cookbook.backends.local import LocalConfig
from cookbook.config import build
from cookbook.engine.model import ModelConfig
from cookbook.errors import ConfigError
from cookbook.typed import convert

NEEDS = ("fastapi", "uvicorn", "pydantic", "google.protobuf", "zstandard")


def run(cfg: DictConfig, _: list[str]) -> None:
    """Types the configuration, then serves until stopped.

    Raises:
        ConfigError: a wrong value, or a package of the extra ``server`` is missing.
        BackendError: the model cannot be loaded.
    """
    _check_installed()
    from cookbook.server.config import ServerConfig
    from cookbook.server.serve import serve

    model: ModelConfig = build(cfg.model, "model", ModelConfig)
    backend: LocalConfig = build(cfg.backend, "backend", LocalConfig)
    server: ServerConfig = build(cfg.server, "server", ServerConfig)
    serve(model, backend, server, seed=convert(cfg.seed, int, "seed"), out=Path(convert(cfg.out, str, "out")))


def _check_installed() -> None:
    for name in NEEDS:
        parent = name.partition(".")[0]
        if importlib.util.find_spec(parent) is None or importlib.util.find_spec(name) is None:
            raise ConfigError(f"serve: the package {name!r} is not installed; install post-training-cookbook[server]")
