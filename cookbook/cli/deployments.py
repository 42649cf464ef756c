"""``cookbook deployments``: named vLLM servers that keep running between runs."""

from __future__ import annotations

from omegaconf import DictConfig

from cookbook.cli.check_data import context
from cookbook.config.nodes import build
from cookbook.deployments.vllm.deployment import VllmConfig
from cookbook.deployments.vllm.http import Client
from cookbook.deployments.vllm.registry import DeploymentManager, RunningServer
from cookbook.engine.model import ModelConfig, load_tokenizer, with_dtype
from cookbook.engine.shape import Shape, shape_of
from cookbook.errors import ConfigError, RolloutError
from cookbook.utils import tables
from cookbook.utils.suggest import did_you_mean

HEALTH_S = 2.0


def overrides(name: str, others: list[str]) -> list[str]:
    """Return the overrides of ``conf/train.yaml`` for a deployment; it reads the groups ``model`` and ``deployment``."""
    group = [] if any(other.startswith("deployment=") for other in others) else ["deployment=vllm"]
    return [*group, *others, f"deployment.name={name}", "deployment.on_exit=keep"]


def create(cfg: DictConfig, _: list[str]) -> None:
    """Start servers, or find those that already run, and warm them up.

    Raises:
        ConfigError: a wrong value, or the name is in use.
        BackendError: the model is unknown.
        RolloutError: a server does not start.
    """
    model: ModelConfig = with_dtype(build(cfg.model, "model", ModelConfig))
    config = build(cfg.deployment, "deployment")
    if not isinstance(config, VllmConfig) or config.url is not None or config.name is None:
        raise ConfigError("deployments: only servers of deployment=vllm are started here; leave out deployment.url")
    shape = shape_of(model) or Shape(load_tokenizer(model), context(model, load_tokenizer(model)))
    options = config.sized(model, shape, None, (), loaded=True).options_for(model)
    manager = DeploymentManager(say=print)
    with manager.held(config.name):
        _warmed(manager, config.name, manager.create(config.name, options, config.replicas, config.startup_s))


def print_list(*, table: bool) -> None:
    """Print one line per server that runs."""
    manager = DeploymentManager()
    rows = [
        (
            name,
            _health(server),
            server.url,
            str(server.pid),
            server.options.model,
            server.options.dtype,
            manager.user(name) or "none",
        )
        for name, running in manager.running().items()
        for server in running
    ]
    head = ("deployment", "health", "url", "process", "model", "type", "used by process")
    tables.show("deployments", head, rows, table=table)


def scale(name: str, replicas: int, startup_s: float) -> None:
    """Start or end servers until ``replicas`` of them run, all with the same options.

    Raises:
        ConfigError: no such deployment, or it is in use.
        RolloutError: a server does not start.
    """
    manager = _manager_of(name)
    with manager.held(name):
        _warmed(manager, name, manager.scale(name, replicas, startup_s))


def warm_up(name: str) -> None:
    """Let every server sample one token.

    Raises:
        ConfigError: no such deployment.
        RolloutError: a server fails.
    """
    manager = _manager_of(name)
    _warmed(manager, name, manager.running()[name])


def delete(name: str) -> None:
    """End the servers of a deployment.

    Raises:
        ConfigError: no such deployment, or it is in use.
    """
    manager = _manager_of(name)
    with manager.held(name):
        manager.delete(name)
    print(f"{name}: ended")


def _manager_of(name: str) -> DeploymentManager:
    manager = DeploymentManager(say=print)
    known = list(manager.running())
    if name not in known:
        running = f"choose one of {', '.join(known)}" if known else "no deployment is running; see cookbook deployments create"
        raise ConfigError(f"deployments: not running, got {name!r}; {running}.{did_you_mean(name, known)}".removesuffix("."))
    return manager


def _warmed(manager: DeploymentManager, name: str, running: list[RunningServer]) -> None:
    for server in running:
        manager.warm_up(server)
        print(f"{name}: {server.url} answers")


def _health(server: RunningServer) -> str:
    try:
        Client(server.url, HEALTH_S).once("/health", method="GET")
    except RolloutError:
        return "silent"
    return "healthy"
