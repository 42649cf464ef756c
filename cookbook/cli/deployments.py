"""``cookbook deployments``: vLLM servers that go on running between runs, by name."""

from __future__ import annotations

from omegaconf import DictConfig

from cookbook.cli import tables
from cookbook.config import build
from cookbook.deployments.http import Client
from cookbook.deployments.manager import DeploymentManager, Running
from cookbook.deployments.vllm import VllmConfig
from cookbook.engine.model import ModelConfig, context_length, load_tokenizer, resolved, with_dtype
from cookbook.errors import BackendError, ConfigError, RolloutError
from cookbook.suggest import did_you_mean

HEALTH_S = 2.0


def overrides(name: str, others: list[str]) -> list[str]:
    """Of ``conf/train.yaml``, for a deployment called ``name``: the groups ``model`` and ``deployment`` are read."""
    group = [] if any(other.startswith("deployment=") for other in others) else ["deployment=vllm"]
    return [*group, *others, f"deployment.name={name}", "deployment.on_exit=keep"]


def create(cfg: DictConfig) -> None:
    """Starts servers, or finds those that run already, and warms them up.

    Raises:
        ConfigError: a wrong value, or the name is in use.
        BackendError: there is no such model.
        RolloutError: a server does not come up.
    """
    model: ModelConfig = with_dtype(build(cfg.model, "model", ModelConfig))
    config = build(cfg.deployment, "deployment")
    if not isinstance(config, VllmConfig) or config.url is not None or config.name is None:
        raise ConfigError("deployments: only servers of deployment=vllm are started here; leave out deployment.url")
    options = config.options_for(model, config.max_length or _context(model))
    manager = DeploymentManager(say=print)
    with manager.held(config.name):
        _warmed(manager, config.name, manager.create(config.name, options, config.replicas, config.startup_s))


def print_list(*, table: bool) -> None:
    """One line a server that runs."""
    manager = DeploymentManager()
    rows = [
        (name, _health(one), one.url, str(one.pid), one.options.model, one.options.dtype, manager.user(name) or "nobody")
        for name, running in manager.running().items()
        for one in running
    ]
    head = ("deployment", "health", "url", "process", "model", "type", "used by process")
    tables.show("deployments", head, rows, table=table)


def scale(name: str, replicas: int, startup_s: float) -> None:
    """To so many servers, all made alike.

    Raises:
        ConfigError: no such deployment, or it is in use.
        RolloutError: a server does not come up.
    """
    manager = _manager_of(name)
    with manager.held(name):
        _warmed(manager, name, manager.scale(name, replicas, startup_s))


def warm_up(name: str) -> None:
    """Lets every server sample a token.

    Raises:
        ConfigError: no such deployment.
        RolloutError: one cannot.
    """
    manager = _manager_of(name)
    _warmed(manager, name, manager.running()[name])


def delete(name: str) -> None:
    """Ends its servers.

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
        there = f"there are {', '.join(known)}" if known else "there are none; make one with cookbook deployments create"
        raise ConfigError(f"deployments: nothing called {name!r} runs.{did_you_mean(name, known)} ({there})")
    return manager


def _warmed(manager: DeploymentManager, name: str, running: list[Running]) -> None:
    for one in running:
        manager.warm_up(one)
        print(f"{name}: {one.url} answers")


def _health(one: Running) -> str:
    try:
        Client(one.url, HEALTH_S).once("/health", method="GET")
    except RolloutError:
        return "silent"
    return "healthy"


def _context(model: ModelConfig) -> int:
    """The longest sequence that training would take, tokens."""
    from transformers import AutoConfig

    tokenizer = load_tokenizer(model)
    architecture = AutoConfig.from_pretrained(
        resolved(model.name), revision=model.revision, trust_remote_code=model.trust_remote_code
    )
    found = context_length(architecture, tokenizer)
    if found is None:
        raise BackendError(f"model.name: {model.name!r} does not say how long a sequence may be; set deployment.max_length")
    return found
