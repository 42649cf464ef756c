"""``cookbook serve``: build a server from its configuration and run it."""

from __future__ import annotations

import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from cookbook.config.nodes import build
from cookbook.config.typed import convert
from cookbook.engine.model import ModelConfig
from cookbook.engine.parallel import RanksLostError
from cookbook.errors import ConfigError, CookbookError
from cookbook.protocols import DeploymentConfig, EngineBackend, Preflight, RankBackend, SeparateDeployment
from cookbook.run.settings import pin_model

if TYPE_CHECKING:
    from cookbook.server.config import ServerConfig


def run(cfg: DictConfig, _: list[str]) -> None:
    """Build the model, backend and server from the configuration, and serve until stopped.

    Raises:
        ConfigError: a wrong value, or a package of the extra ``server`` is missing.
        BackendError: the model cannot be loaded.
    """
    try:
        _serve(cfg)
    except Exception as error:
        # srun ends with the exit code of another rank, which the failure of this one has ended. A restart replaces lost ranks.
        if _is_rank() and not isinstance(error, RanksLostError):
            from cookbook.server.config import record_failure

            message = f"rank {os.environ['RANK']} failed: {type(error).__name__}: {error}"
            record_failure(cfg.server.get("failure_file"), str(error) if isinstance(error, CookbookError) else message)
        raise


def verify(cfg: DictConfig, _: list[str]) -> None:
    """Check every file in the folder of a server, without its model. Raises CookbookError: a file is damaged."""
    try:
        from cookbook.server.verify import verify as verify_folder
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    verify_folder(Path(convert(cfg.out, str, "out")))


def _missing(error: ModuleNotFoundError) -> ConfigError:
    return ConfigError(f"serve: the package {error.name!r} is not installed; install post-training-cookbook[server]")


def _is_rank() -> bool:
    """Whether srun or torchrun has started this process as one rank of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _serve(cfg: DictConfig) -> None:
    try:
        from cookbook.server.config import ServerConfig
        from cookbook.server.rank import choose_gpu, exit_now, serve_on_ranks
        from cookbook.server.serve import serve
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    pin_model(cfg)
    model: ModelConfig = build(cfg.model, "model", ModelConfig)
    backend = build(cfg.backend, "backend")
    if not isinstance(backend, EngineBackend):
        raise ConfigError(
            f"backend: serve needs a backend that computes in this process, got {type(backend).__name__}; use backend=local"
        )
    server: ServerConfig = build(cfg.server, "server", ServerConfig)
    seed, out = convert(cfg.seed, int, "seed"), Path(convert(cfg.out, str, "out"))
    deployment = _deployment(cfg, model, backend)
    if deployment is not None or not isinstance(backend, RankBackend):
        serve(model, backend, server, seed=seed, out=out, deployment=deployment)
    elif _is_rank():
        choose_gpu()
        serve_on_ranks(model, backend, server, backend.shard_of(model), seed=seed, out=out)
        exit_now(0)
    elif backend.num_ranks > 1:
        _supervise(model, backend, server, seed, out)
    else:
        serve(model, backend, server, seed=seed, out=out)


def _deployment(cfg: DictConfig, model: ModelConfig, backend: EngineBackend) -> DeploymentConfig | None:
    """Return where the endpoint samples; None: in this process. Raises ConfigError: it cannot serve the model."""
    if "deployment" not in cfg:
        return None
    deployment: DeploymentConfig = build(cfg.deployment, "deployment")
    if not isinstance(deployment, SeparateDeployment):
        raise ConfigError("deployment: cookbook serve samples in its own process without a deployment; leave deployment out")
    if isinstance(backend, RankBackend) and (backend.num_ranks > 1 or _is_rank()):
        raise ConfigError("deployment: cookbook serve needs one rank for a deployment of its own; leave backend.ranks at 1")
    if isinstance(deployment, Preflight) and isinstance(backend, RankBackend):
        deployment.preflight(model, backend)
    return deployment


def _supervise(model: ModelConfig, backend: RankBackend, server: ServerConfig, seed: int, out: Path) -> None:
    """Serve on several ranks of this machine until a signal ends them.

    Raises:
        CookbookError: as :func:`run`, or the ranks are lost repeatedly.
    """
    from cookbook.backends.group.start import check_model
    from cookbook.backends.group.supervisor import RankSupervisor
    from cookbook.server.serve import open_listener

    backend.preflight(model, backend)
    # Wrong settings and a wrong model are refused before the ranks start.
    check_model(model)
    server.key_ring()
    server.check_tls()
    config = {**backend.rank_config(model, seed), "server": asdict(server), "out": str(out), "key": None}
    with open_listener(server) as listener:
        supervisor = RankSupervisor(backend.num_ranks, config, listener)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: supervisor.signal(signal.SIGTERM))
        supervisor.run()
