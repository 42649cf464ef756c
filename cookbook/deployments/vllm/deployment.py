"""Deployment ``vllm``: servers in other processes, which load the trainer's weights while they run."""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch

from cookbook import terminal
from cookbook.data.stop_tokens import stop_token_ids
from cookbook.deployments.vllm import api, process, sizing
from cookbook.deployments.vllm.http import Client
from cookbook.deployments.vllm.registry import DeploymentManager
from cookbook.deployments.vllm.replicas import AdapterServers, Servers
from cookbook.deployments.vllm.sampler import Pool
from cookbook.deployments.vllm.sizing import ServerSize
from cookbook.deployments.weight_sync import ChainSyncer
from cookbook.engine.memory import free_bytes
from cookbook.engine.model import AUTO, ModelConfig, resolved, with_quantization
from cookbook.engine.shape import Shape, is_adapter, shape_of
from cookbook.errors import ConfigError, RolloutError
from cookbook.futures import Future, done
from cookbook.protocols import Backend, CheckpointBackend, CheckpointTrainer, CheckpointWriter, Sampler, Trainer
from cookbook.types import Datum, ModelInput

log = logging.getLogger("cookbook")

CHECKED_TOKENS = 24
# Of logprobs. bfloat16 has 8 bits: the logprobs of two programs sometimes differ by 0.2.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.3}
NEEDS_LOCAL = "deployment=vllm needs backend=local: it serves checkpoints that a trainer writes to a disk of this machine"
PRIVATE_PREFIX = "run-"  # prefix of the names of deployments that one run uses
# Default of deployment.max_requests. A request has several completions: eight of each fill the 1,024 sequences and more that
# vLLM computes at a time on a large GPU, and the number adapts to congestion.
CPU_REQUESTS, GPU_REQUESTS = 64, 256


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
    kv_cache_gb: float | None = None
    threads: int = 1
    args: list[str] = field(default_factory=list)
    startup_s: float = 900.0
    timeout_s: float = 600.0
    retries: int = 6
    max_requests: int | None = None
    on_exit: str = "delete"
    deltas: int = 50
    chain_size: float = 2.0
    keep_chains: int = 1
    logprob_tolerance: float | Literal["auto"] | None = "auto"
    # Of :meth:`sized`.
    _size: ServerSize | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.on_exit not in ("delete", "keep"):
            raise ConfigError(f"deployment.on_exit: expected delete or keep, got {self.on_exit!r}")
        if self.on_exit == "keep" and self.name is None and self.url is None:
            raise ConfigError("deployment.on_exit=keep needs deployment.name, by which later runs find the servers")
        for key in ("replicas", "threads", "max_requests", "keep_chains"):
            if (value := getattr(self, key)) is not None and value < 1:
                raise ConfigError(f"deployment.{key} must be at least 1, got {value}")
        if self.dtype not in (None, *TOLERANCES):
            raise ConfigError(f"deployment.dtype: expected {' or '.join(TOLERANCES)}, got {self.dtype!r}")
        if self.retries < 0 or self.deltas < 0:
            raise ConfigError("deployment: retries and deltas must be at least 0")
        if self.chain_size < 1:
            raise ConfigError(f"deployment.chain_size must be at least 1, the size of a base, got {self.chain_size}")
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(f"deployment.max_length must be at least 1, got {self.max_length}; null: from the data")
        if self.kv_cache_gb is not None and self.kv_cache_gb <= 0:
            raise ConfigError(f"deployment.kv_cache_gb must be above 0, got {self.kv_cache_gb:g}; null: computed")
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
        if with_quantization(model).quantize:
            raise ConfigError(
                f"deployment: vLLM would add the adapter to other weights than the quantized ones it is trained on, got "
                f"model.quantize={model.quantize}; set deployment=embedded"
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
        self._refuse_dtype(self.dtype or trainer.model_config.dtype)
        if self.dtype is not None:
            trainer.set_checkpoint_dtype(self.dtype)
        return VllmDeployment(self._sized_for(trainer), trainer, live=live)

    def _refuse_dtype(self, dtype: str) -> None:
        # AUTO becomes one of them when the model is loaded.
        if dtype not in (AUTO, *TOLERANCES):
            raise ConfigError(f"deployment.dtype: vLLM serves {' or '.join(TOLERANCES)}, and the model is in {dtype}; set one")

    def sized(
        self,
        model: ModelConfig,
        shape: Shape | None,
        longest: int | None,
        trainer_gpus: tuple[int, ...],
        *,
        loaded: bool,
        trainer_share: float = 1.0,
    ) -> VllmConfig:
        """Return a copy with its size; see :class:`~cookbook.protocols.SizedDeployment`."""
        result = replace(self)
        # A server at a URL has its size already.
        if self.url is None:
            gpus = self._gpus(trainer_gpus)
            result._size = sizing.sized(
                shape,
                self.dtype or (shape.dtype if shape is not None and model.dtype == AUTO else model.dtype),
                self._memory(gpus, trainer_gpus, int(trainer_share * _trainer_bytes(model, shape, loaded=loaded))),
                max_length=self.max_length,
                longest=longest,
                kv_cache_bytes=None if self.kv_cache_gb is None else int(self.kv_cache_gb * (1 << 30)),
                max_requests=self.num_requests(gpus),
                gpus_per_server=len(gpus[0]) if gpus else 1,
            )
        return result

    def _memory(self, gpus: tuple[tuple[int, ...], ...], trainer_gpus: tuple[int, ...], reserved: int) -> sizing.Memory:
        """Return the memory of the device of the servers: of the GPU with the least, if there are several.

        ``reserved``: bytes that the trainer still allocates on its device.
        """
        if not gpus:
            free = free_bytes(torch.device("cpu"))
            shared = not trainer_gpus
            return sizing.Memory(free, reserved if shared else 0, self.replicas, "memory", cpu=True, shared=shared)
        used = sorted({number for numbers in gpus for number in numbers})
        shared = self._shares_gpus(gpus, trainer_gpus)
        index = 0 if shared else 1
        number = min(used, key=lambda gpu: torch.cuda.mem_get_info(gpu)[index])
        servers = -(-self.replicas // len(gpus))
        if not any(gpu in trainer_gpus for gpu in used):
            reserved = 0
        return sizing.Memory(
            torch.cuda.mem_get_info(number)[index], reserved, servers, f"GPU {number}", cpu=False, shared=shared
        )

    def _shares_gpus(self, gpus: tuple[tuple[int, ...], ...], trainer_gpus: tuple[int, ...]) -> bool:
        return bool(gpus) and (
            len(gpus) < self.replicas or any(number in trainer_gpus for numbers in gpus for number in numbers)
        )

    @property
    def longest(self) -> int | None:
        """Tokens of the longest sequence; None before :meth:`sized`, and for a server at ``url``."""
        return None if self._size is None else self._size.max_length

    @property
    def size_text(self) -> str:
        """One line about the size of the servers."""
        if (size := self._size) is None:
            return f"a server that runs already at {self.url}"
        servers = "1 server" if self.replicas == 1 else f"{self.replicas} servers, each"
        text = f"{servers} for sequences of up to {size.max_length:,} tokens"
        if size.row_bytes:
            text += f", {size.row_bytes / 1e6:,.1f} MB of keys and values each"
        if size.kv_cache_bytes is None:
            return f"{text}; vLLM takes {sizing.GPU_SHARE:.0%} of its GPU"
        return (
            f"{text}; {size.kv_cache_bytes / 1e9:.2f} GB for keys and values and {size.weight_bytes / 1e9:.2f} GB for "
            f"everything else"
        )

    def num_requests(self, gpus: tuple[tuple[int, ...], ...]) -> int:
        """Return the number of concurrent requests per server."""
        return self.max_requests or (GPU_REQUESTS if gpus else CPU_REQUESTS)

    def _sized_for(self, trainer: CheckpointTrainer) -> VllmConfig:
        """Return the configuration with its size: the size that the run has computed from its data, or one without data."""
        if self._size is not None or self.url is not None:
            return self
        return self.sized(trainer.model_config, _shape_of(trainer), None, trainer.gpus, loaded=True)

    def options(self, trainer: CheckpointTrainer) -> process.Options:
        return self._sized_for(trainer).options_for(trainer.model_config, trainer.adapted_model, trainer.gpus)

    def options_for(self, model: ModelConfig, base: str | None = None, trainer_gpus: tuple[int, ...] = ()) -> process.Options:
        """Return the options of the servers of ``model``. The configuration is that of :meth:`sized`.

        Args:
            base: name of the weights under the adapter, if ``model`` names an adapter.
            trainer_gpus: numbers of the GPUs with which the trainer computes.
        """
        assert self._size is not None
        gpus = self._gpus(trainer_gpus)
        name = base or model.name
        return process.Options(
            # Not resolved: a virtual environment's Python is a link, which must be called by its own path.
            python=str(Path(self.python).absolute()),
            model=resolved(name),
            dtype=self.dtype or model.dtype,
            max_length=self._size.max_length,
            kv_cache_bytes=self._size.kv_cache_bytes,
            kv_cache_is_fixed=self.kv_cache_gb is not None,
            threads=self.threads,
            lora_rank=model.lora_rank,
            args=tuple(self.args),
            gpus=gpus,
            shares_gpus=self._shares_gpus(gpus, trainer_gpus),
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


def _trainer_bytes(model: ModelConfig, shape: Shape | None, *, loaded: bool) -> int:
    """Return the bytes that a trainer of the model still allocates, apart from activations."""
    if shape is None:
        return 0
    return sizing.lasting_bytes(model, shape) + (0 if loaded else shape.weight_bytes)


def _shape_of(trainer: CheckpointTrainer) -> Shape | None:
    """Return the shape of the trainer's model. A model without a known context has the trainer's."""
    shape = shape_of(trainer.model_config)
    if shape is None:
        return Shape(trainer.tokenizer, trainer.max_length)
    return shape if shape.max_length is not None else replace(shape, max_length=trainer.max_length)


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
        dtype = self._config.dtype or self._trainer.model_config.dtype
        return TOLERANCES[dtype] if tolerance == "auto" else tolerance

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
        requests = config.num_requests(() if config.url is not None else config.options(trainer).gpus)
        pool = Pool(clients, api.max_length(clients), requests, stop_token_ids(trainer.tokenizer))
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
        manager.reap(PRIVATE_PREFIX)
        name = config.name or f"{PRIVATE_PREFIX}{secrets.token_hex(4)}"
        self._end.enter_context(manager.held(name))
        if config.on_exit == "delete":
            self._end.callback(manager.delete, name)
            self._kill = functools.partial(manager.kill, name)
        started = time.monotonic()
        running = manager.create(name, config.options(self._trainer), config.replicas, config.startup_s)
        for server in running:
            manager.warm_up(server)
        terminal.say(f"deployment: {name} is ready after {time.monotonic() - started:.0f} s")
        return [manager.client(server, config.timeout_s, config.retries) for server in running]


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
