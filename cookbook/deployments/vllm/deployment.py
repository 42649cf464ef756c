"""Deployment ``vllm``: servers in other processes, which load the trainer's weights while they run."""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch

from cookbook import terminal
from cookbook.data.stop_tokens import stop_token_ids
from cookbook.deployments.vllm import api, process
from cookbook.deployments.vllm.http import Client
from cookbook.deployments.vllm.registry import DeploymentManager
from cookbook.deployments.vllm.replicas import AdapterServers, Servers
from cookbook.deployments.vllm.sampler import Pool
from cookbook.deployments.weight_sync import ChainSyncer
from cookbook.engine.model import AUTO, ModelConfig, resolved
from cookbook.engine.shape import is_adapter
from cookbook.errors import ConfigError, RolloutError
from cookbook.futures import Future, done
from cookbook.protocols import Backend, CheckpointBackend, CheckpointTrainer, CheckpointWriter, Sampler, Trainer
from cookbook.types import Datum, ModelInput

log = logging.getLogger("cookbook")

CHECKED_TOKENS = 24
# Of logprobs. bfloat16 has 8 bits: the logprobs of two programs sometimes differ by 0.2.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.3}
NEEDS_LOCAL = "deployment=vllm needs backend=local: it serves checkpoints that a trainer writes to a disk of this machine"
PRIVATE = "run-"  # prefix of the names of deployments that one run uses


@dataclass
class VllmConfig:
    """Options of vLLM servers. ``conf/deployment/vllm.yaml`` documents each field.

    A server at ``url`` must have been started with the command of :func:`cookbook.deployments.vllm.process.command` and the
    variables of :func:`~cookbook.deployments.vllm.process.environment`, for its control routes and cookbook's worker extension.
    """

    has_own_weights: ClassVar[bool] = True

    python: str = ".venv-vllm/bin/python"
    name: str | None = None
    url: str | None = None
    replicas: int = 1
    dtype: str | None = None
    max_length: int | None = None
    gpus: list[int] | None = None
    kv_cache_gb: float = 0.25
    threads: int = 1
    args: list[str] = field(default_factory=list)
    startup_s: float = 900.0
    timeout_s: float = 600.0
    retries: int = 6
    max_requests: int = 64
    on_exit: str = "delete"
    deltas: int = 50
    chain_size: float = 2.0
    keep_chains: int = 1
    logprob_tolerance: float | Literal["auto"] | None = "auto"

    def __post_init__(self) -> None:
        if self.on_exit not in ("delete", "keep"):
            raise ConfigError(f"deployment.on_exit: expected delete or keep, got {self.on_exit!r}")
        if self.on_exit == "keep" and self.name is None and self.url is None:
            raise ConfigError("deployment.on_exit=keep needs deployment.name, by which later runs find the servers")
        for key in ("replicas", "threads", "max_requests", "keep_chains"):
            if (value := getattr(self, key)) < 1:
                raise ConfigError(f"deployment.{key} must be at least 1, got {value}")
        if self.dtype not in (None, *TOLERANCES):
            raise ConfigError(f"deployment.dtype: expected {' or '.join(TOLERANCES)}, got {self.dtype!r}")
        if self.retries < 0 or self.deltas < 0:
            raise ConfigError("deployment: retries and deltas must be at least 0")
        if self.chain_size < 1:
            raise ConfigError(f"deployment.chain_size must be at least 1, the size of a base, got {self.chain_size}")
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(f"deployment.max_length must be at least 1, got {self.max_length}; null: the model's own")
        if self.url is not None and self.replicas != 1:
            raise ConfigError("deployment.url names one running server; leave deployment.replicas=1")
        if self.gpus is not None and (len(set(self.gpus)) != len(self.gpus) or not self.gpus or min(self.gpus) < 0):
            raise ConfigError(f"deployment.gpus: expected different numbers of GPUs, got {self.gpus}; the first GPU is 0")
        if self.gpus is not None and len(self.gpus) % self.replicas:
            raise ConfigError(
                f"deployment.gpus: every server needs as many GPUs as the others, got {len(self.gpus)} for {self.replicas} "
                "servers; change deployment.gpus or deployment.replicas"
            )

    def preflight(self, model: ModelConfig, backend: Backend) -> None:
        """Raises ConfigError: the backend writes no sampler checkpoints, vLLM cannot serve them, or Python has no vLLM."""
        if not (isinstance(backend, CheckpointBackend) and backend.writes_checkpoints):
            raise ConfigError(NEEDS_LOCAL)
        self._refuse_dtype(self.dtype or model.dtype)
        if model.add_tokens and is_adapter(model):
            raise ConfigError(
                "deployment: vLLM does not load an adapter with trained embeddings of added tokens; set model.lora_rank=0, or "
                "deployment=embedded"
            )
        if self.gpus is not None and max(self.gpus) >= (count := torch.cuda.device_count()):
            raise ConfigError(
                f"deployment.gpus: this machine has {count} GPUs, got {self.gpus}; the first GPU is 0, and null chooses "
                "automatically"
            )
        # The servers of a named deployment may run already.
        if self.url is None and self.name is None:
            process.check_python(str(Path(self.python).absolute()))

    def deploy(self, trainer: Trainer, *, live: bool) -> VllmDeployment:
        """Start the servers, or find those of ``name`` or ``url``.

        Raises:
            ConfigError: vLLM cannot serve the trainer's weights.
            RolloutError: a server does not start.
        """
        if not isinstance(trainer, CheckpointWriter):
            raise ConfigError(NEEDS_LOCAL)
        self._refuse_dtype(self.options(trainer).dtype)
        if self.dtype is not None:
            trainer.set_checkpoint_dtype(self.dtype)
        return VllmDeployment(self, trainer, live=live)

    def _refuse_dtype(self, dtype: str) -> None:
        # AUTO becomes one of them when the model is loaded.
        if dtype not in (AUTO, *TOLERANCES):
            raise ConfigError(f"deployment.dtype: vLLM serves {' or '.join(TOLERANCES)}, and the model is in {dtype}; set one")

    def options(self, trainer: CheckpointTrainer) -> process.Options:
        return self.options_for(trainer.model_config, trainer.max_length, trainer.adapted_model, trainer.gpus)

    def options_for(
        self, model: ModelConfig, max_length: int, base: str | None = None, trainer_gpus: tuple[int, ...] = ()
    ) -> process.Options:
        """Return the options of the servers of ``model``.

        Args:
            max_length: the longest sequence of the model, tokens.
            base: name of the weights under the adapter, if ``model`` names an adapter.
            trainer_gpus: numbers of the GPUs with which the trainer computes.
        """
        gpus = self._gpus(trainer_gpus)
        is_shared = len(gpus) < self.replicas or any(number in trainer_gpus for numbers in gpus for number in numbers)
        name = base or model.name
        return process.Options(
            # Not resolved: a virtual environment's Python is a link, which must be called by its own path.
            python=str(Path(self.python).absolute()),
            model=resolved(name),
            dtype=self.dtype or model.dtype,
            max_length=self.max_length or max_length,
            kv_cache_bytes=int(self.kv_cache_gb * (1 << 30)),
            threads=self.threads,
            lora_rank=model.lora_rank,
            args=tuple(self.args),
            gpus=gpus,
            shares_gpus=bool(gpus) and is_shared,
        )

    def _gpus(self, trainer_gpus: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the numbers of the GPUs of each server; fewer entries than servers: the servers share them; none: CPUs.

        By default each server gets a GPU that the trainer does not use. Only if the trainer uses all of them, the servers
        share its GPUs.
        """
        if self.gpus is not None:
            size = len(self.gpus) // self.replicas
            return tuple(tuple(self.gpus[start : start + size]) for start in range(0, len(self.gpus), size))
        every = range(torch.cuda.device_count())
        free = [number for number in every if number not in trainer_gpus] or every
        return tuple((number,) for number in free[: self.replicas])


class VllmDeployment:
    """A :class:`~cookbook.protocols.Deployment` on vLLM servers, started for the run or before it."""

    def __init__(self, config: VllmConfig, trainer: CheckpointTrainer, *, live: bool) -> None:
        self._config = config
        self._trainer = trainer
        self._end = contextlib.ExitStack()
        self._kill: Callable[[], None] = lambda: None
        self.syncer: ChainSyncer | None = None
        try:
            self._end.callback(self._delete_checkpoints)
            self.servers = self._servers(live)
            self._end.callback(self.servers.close)
        except BaseException:
            self._end.close()
            raise
        deltas = 0 if trainer.model_config.lora_rank else config.deltas  # an adapter has no deltas
        self.syncer = ChainSyncer(trainer, self.servers, deltas=deltas, keep=config.keep_chains, chain_size=config.chain_size)

    def _delete_checkpoints(self) -> None:
        """Delete the checkpoints of syncs. A server that outlives the run may read its newest adapter again."""
        if self.syncer is not None:
            outlives = self._config.url is not None or self._config.on_exit == "keep"
            self.syncer.delete_checkpoints(keep_newest=outlives and self._trainer.model_config.lora_rank > 0)

    def load(self, step: int) -> Future[Sampler]:
        """Load the weights into the servers, and compare a few logprobs with the trainer's."""
        assert self.syncer is not None
        sampler = self.syncer.sync(step)
        if self._tolerance is not None:
            check_logprobs(self._trainer, sampler, self._tolerance)
        return done(sampler)

    @property
    def _tolerance(self) -> float | None:
        tolerance = self._config.logprob_tolerance
        return TOLERANCES[self._config.options(self._trainer).dtype] if tolerance == "auto" else tolerance

    def close(self) -> None:
        try:
            self._end.close()
        except BaseException:
            # Such as a second Ctrl-C.
            self.kill()
            raise

    def kill(self) -> None:
        """End the servers that :meth:`close` would end, without waiting for them."""
        self._kill()

    def _servers(self, live: bool) -> Servers:
        trainer, config, clients = self._trainer, self._config, self._clients()
        pool = Pool(clients, api.max_length(clients), config.max_requests, stop_token_ids(trainer.tokenizer))
        if not trainer.model_config.lora_rank:
            return Servers(clients, pool, trainer.seed, live=live)
        # A name like those of syncs, so that a later run deletes the checkpoint of a killed run.
        name = f"sync-{secrets.token_hex(4)}-000000"
        return AdapterServers(clients, pool, trainer.seed, save_adapted=lambda: trainer.save_adapted_weights(name).result())

    def _clients(self) -> list[Client]:
        config = self._config
        if config.url is not None:
            client = Client(config.url.rstrip("/"), config.timeout_s, config.retries)
            process.wait_until_healthy(client, None, config.startup_s, terminal.say)
            return [client]
        manager = DeploymentManager(say=terminal.say)
        manager.reap(PRIVATE)
        name = config.name or f"{PRIVATE}{secrets.token_hex(4)}"
        self._end.enter_context(manager.held(name))
        if config.on_exit == "delete":
            self._end.callback(manager.delete, name)
            self._kill = functools.partial(manager.kill, name)
        started = time.monotonic()
        running = manager.create(name, config.options(self._trainer), config.replicas, config.startup_s)
        for one in running:
            manager.warm_up(one)
        terminal.say(f"deployment: {name} is ready after {time.monotonic() - started:.0f} s")
        return [manager.client(one, config.timeout_s, config.retries) for one in running]


def check_logprobs(trainer: Trainer, sampler: Sampler, tolerance: float) -> None:
    """Compare logprobs of trainer and deployment: equal digests do not prove that a server computes with these weights.

    Raises:
        RolloutError: the logprobs differ by more than ``tolerance``.
    """
    tokens = np.random.default_rng(0).integers(0, len(trainer.tokenizer), CHECKED_TOKENS).tolist()
    datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
    own = trainer.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    served = np.array(sampler.compute_logprobs(tokens).result()[1:], dtype=np.float64)
    gap = float(np.abs(own - served).max())
    log.info("logprobs of the deployment differ from the trainer's by at most %.2g", gap)
    if not gap <= tolerance:
        raise RolloutError(
            f"weight sync: the deployment's logprobs differ from the trainer's by {gap:.3g}, more than {tolerance:g}: it "
            "does not compute with these weights, or has another precision; in that case raise deployment.logprob_tolerance"
        )
