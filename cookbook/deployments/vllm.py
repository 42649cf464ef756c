"""Samples from vLLM, in processes of its own, whose weights are replaced where they are while they go on serving."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.checkpoints.chain import SamplerCheckpoints
from cookbook.deployments import control, server
from cookbook.deployments.adapters import AdapterServers
from cookbook.deployments.http import Client
from cookbook.deployments.manager import DeploymentManager
from cookbook.deployments.sampler import Pool, Replica
from cookbook.deployments.servers import Servers
from cookbook.engine.model import AUTO, ModelConfig, resolved
from cookbook.errors import ConfigError, RolloutError
from cookbook.futures import Future, done
from cookbook.protocols import Backend, Sampler, TrainingClient
from cookbook.types import Datum, ModelInput
from cookbook.weight_sync import ChainSyncer

log = logging.getLogger("cookbook")

CHECKED_TOKENS = 24
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.3}  # bfloat16 has 8 bits: two programs differ by 0.2 of a logprob now and then
NEEDS_LOCAL = "deployment=vllm needs backend=local: it serves checkpoints that a local trainer writes"
PRIVATE = "run-"  # how names begin that are of one run only


@dataclass
class VllmConfig:
    """``conf/deployment/vllm.yaml`` says what each field means.

    The server of ``url`` must have been started as :func:`cookbook.deployments.server.command` does, with that function's
    :func:`~cookbook.deployments.server.environment`: with the routes for control, and with what loads checkpoints.
    """

    python: str = ".venv-vllm/bin/python"
    name: str | None = None
    url: str | None = None
    replicas: int = 1
    dtype: str | None = None
    max_length: int | None = None
    kv_cache_gb: float = 0.25
    threads: int = 1
    args: list[str] = field(default_factory=list)
    startup_s: float = 900.0
    timeout_s: float = 600.0
    retries: int = 6
    max_requests: int = 64
    on_exit: str = "delete"
    deltas: int = 50
    keep_chains: int = 1
    logprob_tolerance: float | Literal["auto"] | None = "auto"

    def __post_init__(self) -> None:
        if self.on_exit not in ("delete", "keep"):
            raise ConfigError(f"deployment.on_exit: expected delete or keep, got {self.on_exit!r}")
        if self.on_exit == "keep" and self.name is None and self.url is None:
            raise ConfigError("deployment.on_exit=keep needs deployment.name, by which the servers are found again")
        for key in ("replicas", "threads", "max_requests", "keep_chains"):
            if (value := getattr(self, key)) < 1:
                raise ConfigError(f"deployment.{key} must be at least 1, got {value}")
        if self.dtype not in (None, *TOLERANCES):
            raise ConfigError(f"deployment.dtype: expected {' or '.join(TOLERANCES)}, got {self.dtype!r}")
        if self.retries < 0 or self.deltas < 0:
            raise ConfigError("deployment: retries and deltas must be at least 0")
        if self.url is not None and self.replicas != 1:
            raise ConfigError("deployment.url names one running server; leave deployment.replicas=1")

    def preflight(self, model: ModelConfig, backend: Backend) -> None:
        """Raises ConfigError: the backend writes no checkpoint to serve, vLLM cannot serve it, or Python has no vLLM."""
        if not isinstance(backend, LocalConfig):
            raise ConfigError(NEEDS_LOCAL)
        self._refuse_dtype(self.dtype or model.dtype)
        if self.url is None and self.name is None:  # servers of a name may run already
            server.check_python(str(Path(self.python).absolute()))

    def deploy(self, trainer: TrainingClient, *, live: bool) -> VllmDeployment:
        """Starts the servers, or finds them.

        Raises:
            ConfigError: the trainer cannot be served so.
            RolloutError: a server does not come up.
        """
        if not isinstance(trainer, LocalTrainer):
            raise ConfigError(NEEDS_LOCAL)
        self._refuse_dtype(self.options(trainer).dtype)
        if self.dtype is not None:
            trainer.sampler_checkpoints = SamplerCheckpoints(self.dtype)
        return VllmDeployment(self, trainer, live=live)

    def _refuse_dtype(self, dtype: str) -> None:
        if dtype not in (AUTO, *TOLERANCES):  # which stands for one of them
            raise ConfigError(f"deployment.dtype: vLLM serves {' or '.join(TOLERANCES)}, and the model is in {dtype}; set one")

    def options(self, trainer: LocalTrainer) -> server.Options:
        config = trainer.engine.model.config
        return self.options_for(config, trainer.max_length, _base_name(trainer))

    def options_for(self, model: ModelConfig, max_length: int, base: str | None = None) -> server.Options:
        """What a server of ``model`` is started with. ``base``: the name of what its adapter lies on, where that is another.

        ``max_length``: the model's own, tokens.
        """
        name = base or model.name
        return server.Options(
            # Not resolved: the link is what makes it the environment's Python.
            python=str(Path(self.python).absolute()),
            model=resolved(name),
            dtype=self.dtype or model.dtype,
            max_length=self.max_length or max_length,
            kv_cache_bytes=int(self.kv_cache_gb * (1 << 30)),
            threads=self.threads,
            lora_rank=model.lora_rank,
            args=tuple(self.args),
        )


class VllmDeployment:
    """A :class:`~cookbook.protocols.Deployment` on vLLM servers, its own or one that runs already."""

    def __init__(self, config: VllmConfig, trainer: LocalTrainer, *, live: bool) -> None:
        self._config = config
        self._trainer = trainer
        self._end = contextlib.ExitStack()
        try:
            self.servers = self._servers(live)
            self._end.callback(self.servers.close)
        except BaseException:
            self._end.close()
            raise
        deltas = 0 if trainer.engine.model.is_lora else config.deltas  # an adapter stands alone
        self.syncer = ChainSyncer(trainer, self.servers, deltas=deltas, keep=config.keep_chains)

    def load(self, step: int) -> Future[Sampler]:
        """The weights are there when this returns, and a few logprobs have been compared with the trainer's."""
        sampler = self.syncer.sync(step)
        if self._tolerance is not None:
            check_logprobs(self._trainer, sampler, self._tolerance)
        return done(sampler)

    @property
    def _tolerance(self) -> float | None:
        found = self._config.logprob_tolerance
        return TOLERANCES[self._config.options(self._trainer).dtype] if found == "auto" else found

    def close(self) -> None:
        self._end.close()

    def _servers(self, live: bool) -> Servers:
        trainer, config, clients = self._trainer, self._config, self._clients()
        replicas = [Replica(client, control.max_length(client), config.max_requests) for client in clients]
        pool = Pool(replicas, config.max_requests)
        if not trainer.engine.model.is_lora:
            return Servers(clients, pool, trainer.seed, live=live)
        name = f"sync-{secrets.token_hex(4)}-000000"  # so a killed run's is cleared away with other syncs' checkpoints
        return AdapterServers(clients, pool, trainer.seed, save_adapted=lambda: trainer.save_adapted_weights(name).result())

    def _clients(self) -> list[Client]:
        config = self._config
        if config.url is not None:
            client = Client(config.url.rstrip("/"), config.timeout_s, config.retries)
            server.wait_until_healthy(client, None, config.startup_s, _say)
            return [client]
        manager = DeploymentManager(say=_say)
        manager.reap(PRIVATE)
        name = config.name or f"{PRIVATE}{secrets.token_hex(4)}"
        self._end.enter_context(manager.held(name))
        if config.on_exit == "delete":
            self._end.callback(manager.delete, name)
        started = time.monotonic()
        running = manager.create(name, config.options(self._trainer), config.replicas, config.startup_s)
        for one in running:
            manager.warm_up(one)
        _say(f"deployment: {name} is ready after {time.monotonic() - started:.0f} s")
        return [manager.client(one, config.timeout_s, config.retries) for one in running]


def _base_name(trainer: LocalTrainer) -> str | None:
    """What an adapter says that it lies on."""
    model = trainer.engine.model
    return model.network.active_peft_config.base_model_name_or_path if model.is_lora else None


def check_logprobs(trainer: TrainingClient, sampler: Sampler, tolerance: float) -> None:
    """Compares what both say of the same tokens: equal digests do not tell whether a server computes with what it holds.

    Raises:
        RolloutError: they differ by more than ``tolerance``.
    """
    tokens = np.random.default_rng(0).integers(0, len(trainer.tokenizer), CHECKED_TOKENS).tolist()
    datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
    own = trainer.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    served = np.array(sampler.compute_logprobs(tokens).result()[1:], dtype=np.float64)
    gap = float(np.abs(own - served).max())
    log.info("logprobs of the deployment differ from the trainer's by at most %.2g", gap)
    if not gap <= tolerance:
        raise RolloutError(
            f"weight sync: the deployment's logprobs differ from the trainer's by {gap:.3g}, more than {tolerance:g}: it does "
            "not compute with the weights it holds, or with other precision; for that raise deployment.logprob_tolerance"
        )


def _say(line: str) -> None:
    print(line, flush=True)
    log.info("%s", line)
