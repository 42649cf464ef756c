"""The models of a server: one base model, any number of runs on it, one thread that computes."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

from cookbook.backends.failures import ServedFailures
from cookbook.backends.graphs import KeptGraphs
from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.backends.sampling import LocalSampler, SampleQueue
from cookbook.backends.worker import Worker
from cookbook.checkpoints import manifest
from cookbook.engine.engine import Engine
from cookbook.engine.model import ModelConfig, load, resolved
from cookbook.engine.shared import SharedBase
from cookbook.errors import ConfigError
from cookbook.server.errors import Refused
from cookbook.server.run_graphs import RunGraphs

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


class Host:
    """Makes trainers and samplers. Adapters lie on one copy of the base weights; a full run has a copy of its own.

    ``names`` are what clients may call the base model, besides its own name; ``graph_bytes`` what may be kept of forward passes
    whose loss a client computes.
    """

    def __init__(
        self, model: ModelConfig, config: LocalConfig, *, seed: int, names: tuple[str, ...] = (), graph_bytes: int = 0
    ) -> None:
        if model.lora_rank:
            raise ConfigError("model.lora_rank: clients choose the rank of each run; leave it at 0")
        self.model = model
        self.config = replace(config, all_logprobs=True)  # the protocol knows no gaps in them; clients compute with all
        self.name = resolved(model.name)
        self.names = frozenset({self.name, model.name, Path(model.name).name, *names})
        self.worker = Worker(config.threads)
        self.graphs = KeptGraphs(graph_bytes)
        self.seed = seed
        kept = replace(self.config, activation_checkpointing="false")  # it samples; runs decide for what they train
        self._base_trainer = LocalTrainer(model, kept, seed=seed, worker=self.worker)
        self._base = SharedBase(self.name, self._base_trainer.engine.model.network)
        self._kept_samples = SampleQueue(self.worker, self._base_trainer.max_batch_tokens)

    def public_name(self, base_model: str) -> str:
        """What clients are told the model is called: what they load its tokenizer by.

        A hub name stays what it was asked by, without its variant (``:full``). A short name becomes the folder; of one with
        two slashes the client would take a part for a variant, and another slash at its end keeps it whole.

        Raises:
            Refused: 400, another model than the one here.
        """
        name = base_model.partition(":")[0]
        if name not in self.names:
            shown = ", ".join(sorted(self.names, key=len))
            raise Refused(400, f"base_model: this server has {shown}, got {base_model!r}")
        if "/" in name and not name.startswith("/"):
            return name
        return f"{self.name}/" if self.name.count("/") == 2 else self.name

    @property
    def max_length(self) -> int:
        return self._base_trainer.max_length

    @property
    def vocabulary(self) -> int:
        """How many tokens the model knows."""
        return int(self._base_trainer.engine.model.network.config.get_text_config().vocab_size)

    @property
    def architecture(self) -> str:
        return str(self._base_trainer.engine.model.network.config.model_type)

    @property
    def tokenizer_name(self) -> str:
        return str(self._base_trainer.tokenizer.name_or_path)

    @property
    def num_parameters(self) -> int:
        return self._base_trainer.engine.model.num_parameters

    @functools.cached_property
    def digests(self) -> dict[str, str]:
        """What tells the base model from another one of the same name."""
        return self._base_trainer.digests()

    def new_trainer(
        self, folder: Path, *, rank: int, seed: int, modules: Any = "all-linear", graphs: RunGraphs | None = None
    ) -> LocalTrainer:
        """A run from the base model. ``rank`` 0 trains every parameter."""
        return self._trainer(replace(self.model, lora_rank=rank, lora_target_modules=modules), folder, seed, graphs)

    def saved_trainer(
        self, folder: Path, saved: Path, *, optimizer: bool, seed: int, graphs: RunGraphs | None = None
    ) -> LocalTrainer:
        """A run that starts from saved weights, with their optimizer when asked."""
        trainer = self._trainer(_saved(saved), folder, seed, graphs)
        trainer.load_state(str(saved), optimizer=optimizer).result()
        return trainer

    def base_sampler(self) -> LocalSampler:
        return self._base_trainer.live_sampler(0).result()

    def saved_sampler(self, saved: Path, seed: int) -> LocalSampler:
        """A sampler on weights of the disk."""
        return self._trainer(_saved(saved), saved.parent, seed).live_sampler(0).result()

    def kept_sampler(self, saved: Path, seed: int) -> LocalSampler:
        """As :meth:`saved_sampler`, of weights that are read when it is first asked: after a restart there may be hundreds."""

        @functools.cache
        def engine() -> Engine:
            model = load(_saved(saved), self.config.torch_device(), seed, self._base)
            return Engine(model, self.config.engine_options(model, seed))

        return LocalSampler(self._kept_samples, engine, 0, seed)

    def close(self) -> None:
        self.worker.close()

    def _trainer(self, model: ModelConfig, folder: Path, seed: int, graphs: RunGraphs | None = None) -> LocalTrainer:
        return LocalTrainer(
            model,
            self.config,
            seed=seed,
            folder=folder,
            failures=ServedFailures(),
            worker=self.worker,
            base=self._base,
            graphs=graphs or self.graphs,
        )


def target_modules(*, attention: bool, mlp: bool) -> Any:
    """The layers an adapter lies on. The output layer has none: the heads here compute without its logits."""
    if attention and mlp:
        return "all-linear"
    return [*(ATTENTION if attention else ()), *(MLP if mlp else ())]


def _saved(folder: Path) -> ModelConfig:
    """Raises CheckpointError: it is missing or damaged."""
    return ModelConfig(str(folder), dtype=manifest.verify(folder)["dtype"])
