"""Configuration of the backend ``local``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from cookbook.backends.group import start
from cookbook.backends.local.clients import LocalClients
from cookbook.backends.local.trainer import LocalTrainer
from cookbook.engine.batch.plan import PACKINGS
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.head.linear_logprobs.implementations import CCE, HeadImpl, check_filter_eps, resolve
from cookbook.engine.model import AUTO, LanguageModel, ModelConfig, SharedBase, load
from cookbook.engine.optimizer import update_rule
from cookbook.engine.parallel import SHARDS, led
from cookbook.engine.precision import EXACT, Precision
from cookbook.engine.ranks.commands import Placed
from cookbook.engine.ranks.loading import load_on
from cookbook.engine.ranks.processes import joined
from cookbook.engine.shape import is_adapter, num_parameters
from cookbook.errors import ConfigError
from cookbook.protocols import Backend
from cookbook.types import JsonObject

if TYPE_CHECKING:
    from cookbook.backends.remote.group_trainer import GroupTrainer

NO_SHARD = "none"
# Bytes per trained parameter: weight, gradient, two moments and a float32 master copy.
TRAINED_BYTES = 18
# Bytes per frozen parameter of a model with an adapter.
FROZEN_BYTES = 4
# A model that needs less than this fraction of a GPU's memory is replicated on every rank, not sharded. The rest of the memory
# is for activations and for the server's copy of the weights.
REPLICA_FRACTION = 0.5
# Default of matmul_precision on a GPU.
GPU_MATMUL = "high"


@dataclass
class LocalConfig:
    """Device, memory and arithmetic of the embedded trainer. ``conf/backend/local.yaml`` documents each field."""

    # See :class:`~cookbook.protocols.CheckpointBackend`.
    writes_checkpoints: ClassVar[bool] = True

    device: str = "auto"
    threads: int = 1
    micro_batch_tokens: int = 8192
    packing: str = "auto"
    shared_prompts: bool = True
    fused_layers: bool = True
    trim_last_layer: bool = True
    head_impl: HeadImpl = "auto"
    cce_filter_eps: float | str | None = None
    activation_checkpointing: bool | str = "auto"
    activation_offloading: bool = False
    optimizer: str = "adamw"
    optimizer_offload: bool = False
    matmul_precision: str | None = None
    autocast: str | None = None
    token_metrics: bool = True
    all_logprobs: bool = False
    retain_gb: float = 4.0
    shard_gb: float = 5.0
    gpus: int | None = None
    ranks: int | None = None
    shard: str = AUTO

    def __post_init__(self) -> None:
        if self.packing not in PACKINGS:
            raise ConfigError(f"backend.packing: expected one of {', '.join(PACKINGS)}, got {self.packing!r}")
        # Resolve this now, so that an error in a user's file is reported before the model is loaded.
        self._head = resolve(self.head_impl, "backend.head_impl")
        self.cce_filter_eps = check_filter_eps(self.cce_filter_eps, "backend.cce_filter_eps")
        if self.cce_filter_eps is not None and self.head_impl != CCE:
            raise ConfigError(
                f"backend.cce_filter_eps: requires backend.head_impl=cce, got head_impl={self.head_impl!r}; remove one of them"
            )
        update_rule(self.optimizer)
        self.precision = Precision(self.matmul_precision or self._default_matmul, self.autocast)
        if self.threads < 1 or self.micro_batch_tokens < 1:
            raise ConfigError(
                f"backend: threads and micro_batch_tokens must be at least 1, got {self.threads} and {self.micro_batch_tokens}"
            )
        if not self.shard_gb > 0:
            raise ConfigError(f"backend.shard_gb: expected a number above 0, got {self.shard_gb}")
        self._check_ranks()
        if str(self.activation_checkpointing).lower() not in ("auto", "true", "false"):
            raise ConfigError(
                f"backend.activation_checkpointing: expected auto, true or false, got {self.activation_checkpointing!r}"
            )

    @property
    def _default_matmul(self) -> str:
        """TF32 on a GPU, as is usual in training; exact products on a CPU."""
        try:
            return GPU_MATMUL if self.torch_device().type == "cuda" else EXACT
        # A device that is absent is refused later, by its key.
        except ConfigError:
            return EXACT

    def _check_ranks(self) -> None:
        if self.shard not in (AUTO, *SHARDS):
            raise ConfigError(f"backend.shard: expected one of {AUTO}, {', '.join(SHARDS)}, got {self.shard!r}")
        for name in ("gpus", "ranks"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise ConfigError(f"backend.{name}: expected at least 1, got {count}")
        if self.gpus is not None and self.ranks is not None:
            raise ConfigError(
                "backend: gpus and ranks both set the number of processes; set gpus to use GPUs, or ranks to use CPUs"
            )
        if self.gpus is not None and self.device not in (AUTO, "cuda"):
            raise ConfigError(f"backend.gpus: requires backend.device=auto or cuda, got {self.device!r}; remove backend.device")

    def preflight(self, model: ModelConfig, backend: Backend) -> None:
        """Validate the configuration. Raises ConfigError: a device or package is missing, or several ranks cannot run it."""
        self.torch_device()
        if model.dtype != AUTO:
            self.precision.refuse_half(model.dtype)
        rule = update_rule(self.optimizer)
        rule.require()
        if self.num_ranks > 1:
            start.preflight(model)
        elif self.shard not in (AUTO, NO_SHARD) and "WORLD_SIZE" not in os.environ:
            raise ConfigError(
                f"backend.shard: a single process holds the whole model, got {self.shard}; set backend.ranks or gpus too"
            )
        if self.shard_of(model) != NO_SHARD:
            rule.require_sharding()
            if self.optimizer_offload:
                raise ConfigError(
                    f"backend.optimizer_offload: needs whole weights on every rank, got backend.shard={self.shard}; set "
                    "backend.optimizer_offload=false, or backend.shard=none"
                )

    def make_trainer(self, model: ModelConfig, *, seed: int, folder: Path) -> LocalTrainer | GroupTrainer:
        """Load the model, on several ranks if so configured, and return its trainer.

        Raises:
            CookbookError: the model cannot be loaded.
        """
        if self.num_ranks == 1:
            return LocalTrainer(model, self, seed=seed, folder=folder)
        self.preflight(model, self)
        # Validate the model before the ranks start, because starting them takes long.
        start.check_model(model)
        config = self.rank_config(model, seed)
        # The ranks serve the base model; the adapter belongs to the run that the trainer creates on their server.
        config["model"]["lora_rank"] = 0
        return start.trainer_of(
            *(self.num_ranks, config, model),
            seed=seed,
            folder=folder,
            all_logprobs=self.all_logprobs,
            gpus=self.gpu_numbers(),
        )

    def clients(self, folder: Path) -> LocalClients:
        """Return the factory of a :class:`~cookbook.service.ServiceClient`. Raises ConfigError: there are several ranks."""
        if self.num_ranks > 1:
            raise ConfigError(
                f"backend.ranks: a ServiceClient without base_url computes in one process, got {self.num_ranks}; start "
                "`cookbook serve` with backend.ranks, and pass its URL to ServiceClient as base_url"
            )
        return LocalClients(self, folder)

    # ---- ranks ---------------------------------------------------------------------------------------------------

    @property
    def num_ranks(self) -> int:
        """Number of processes that train the model together, on this machine."""
        return self.gpus or self.ranks or 1

    def shard_of(self, model: ModelConfig) -> str:
        """Return how the model is sharded: ``none`` (every rank holds the whole model), ``node`` or ``all``."""
        if self.num_ranks == 1 and "WORLD_SIZE" not in os.environ:
            return NO_SHARD
        if self.shard != AUTO:
            return self.shard
        if self.torch_device().type != "cuda":
            return NO_SHARD
        model_bytes = (num_parameters(model) or 0) * (FROZEN_BYTES if is_adapter(model) else TRAINED_BYTES)
        if model_bytes < REPLICA_FRACTION * torch.cuda.get_device_properties(0).total_memory:
            return NO_SHARD
        return "all" if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE") else "node"

    def gpu_numbers(self) -> tuple[int, ...]:
        """Return the numbers of the GPUs on which the ranks compute; empty: on CPUs. Rank N has GPU N."""
        device = self.torch_device()
        if device.type != "cuda":
            return ()
        return (device.index or 0,) if self.num_ranks == 1 else tuple(range(self.num_ranks))

    def rank_config(self, model: ModelConfig, seed: int) -> JsonObject:
        """Return the configuration that every rank of a group on this machine gets."""
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        cls = type(self)
        return {
            "model": {field.name: getattr(model, field.name) for field in fields(model)},
            "backend": {**settings, "_target_": f"{cls.__module__}.{cls.__qualname__}", "gpus": None, "ranks": None},
            "server": {"graphs_gb": self.retain_gb},
            "shard": self.shard_of(model),
            "seed": seed,
        }

    # ---- engines -------------------------------------------------------------------------------------------------

    def make_engine(self, model: ModelConfig, seed: int, base: SharedBase | None = None) -> Engine:
        """Load the model, on every rank that this process leads. An adapter on ``base`` shares the weights of ``base``.

        With several ranks the engine does not share ``base``; it loads a separate copy of the weights.

        Raises:
            CookbookError: the model cannot be loaded, or the device or the optimizer's package is missing.
        """
        rule, ranks = update_rule(self.optimizer), joined()
        rule.require()
        if ranks.shards:
            rule.require_sharding()
        if ranks.size == 1:
            return self._engine(load(model, self.torch_device(), seed, base), seed)
        # Send the settings, not this object: each rank must import the user's module that `head_impl` may name.
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        return _make_engine(Placed(), type(self), settings, model, seed)

    def _engine(self, loaded: LanguageModel, seed: int) -> Engine:
        self.precision.prepare(loaded)
        options = EngineOptions(
            micro_batch_tokens=self.micro_batch_tokens,
            packing=self.packing,
            shared_prompts=self.shared_prompts,
            fused_layers=self.fused_layers,
            trim_last_layer=self.trim_last_layer,
            head_impl=self._head,
            head_options={} if self.cce_filter_eps is None else {"filter_eps": self.cce_filter_eps},
            retain_bytes=int(self.retain_gb * (1 << 30)),
            activation_checkpointing=self.recomputes,
            activation_offloading=self.activation_offloading and loaded.device.type == "cuda",
            optimizer=self.optimizer,
            optimizer_offload=self.optimizer_offload,
            token_metrics=self.token_metrics,
            precision=self.precision,
            all_logprobs=self.all_logprobs,
            seed=seed,
        )
        return Engine(loaded, options)

    def for_serving(self, *, trains: bool) -> Self:
        """Return the configuration for a server, which returns logprobs of all tokens. ``trains`` False: for sampling only."""
        checkpointing = self.activation_checkpointing if trains else "false"
        return replace(self, all_logprobs=True, activation_checkpointing=checkpointing)

    def torch_device(self) -> torch.device:
        """Return the device. Raises ConfigError: the device is unknown or missing."""
        # A rank sees only its own GPU.
        is_rank = "WORLD_SIZE" in os.environ
        if self.gpus is not None and not is_rank and (count := torch.cuda.device_count()) < self.gpus:
            raise ConfigError(
                f"backend.gpus: this machine has {count} GPUs, got {self.gpus}; lower backend.gpus, or without GPUs set "
                "backend.ranks"
            )
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError:
            raise ConfigError(f"backend.device: expected auto, cpu or cuda, got {self.device!r}") from None
        if device.type == "mps":
            raise ConfigError(
                "backend.device: the GPU of a Mac does not support float64, which sampling and gradient norms need, got mps; "
                "use backend.device=cpu"
            )
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"backend.device: expected auto, cpu or cuda, got {self.device!r}")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"backend.device: this machine has no usable GPU, got {self.device}; use backend.device=cpu")
        return device

    @property
    def recomputes(self) -> bool | None:
        """Whether the backward pass recomputes activations; None: only if memory is short."""
        choice = str(self.activation_checkpointing).lower()
        return None if choice == "auto" else choice == "true"


@led
def _make_engine(here: Placed, config: type[LocalConfig], settings: Mapping[str, Any], model: ModelConfig, seed: int) -> Engine:
    """Load this rank's part of a model, and return its engine."""
    made, ranks = config(**settings), joined()
    # If one rank alone raised an error, the others would wait for it in the first collective operation of the engine.
    loaded = ranks.together(lambda: load_on(ranks, model, ranks.device or made.torch_device(), seed))
    return made._engine(loaded, seed)
