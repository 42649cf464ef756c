"""The models in the memory of a server: one base model, the runs on it, and the worker thread that computes for all of them."""

from __future__ import annotations

import contextlib
import functools
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from cookbook.backends.local import LocalTrainer
from cookbook.backends.local.idle_adapters import IdleAdapters
from cookbook.backends.local.kept_graphs import KeptGraphs
from cookbook.backends.local.sample_queue import SHARDED, LocalSampler, SampleQueue
from cookbook.backends.local.shared_calls import PassSharing
from cookbook.backends.worker import Account, Lane, Worker
from cookbook.checkpoints import manifest, sampler_checkpoints
from cookbook.data import Renderer
from cookbook.engine.engine import Engine
from cookbook.engine.forward import Retained
from cookbook.engine.loss_gradient import LossFunction
from cookbook.engine.model import ModelConfig, SharedBase, resolved
from cookbook.engine.shape import is_adapter
from cookbook.errors import BackendError, ConfigError
from cookbook.futures import ServedFailures
from cookbook.protocols import EngineBackend
from cookbook.server.wire.bodies import Refused
from cookbook.types import Datum, ForwardBackwardOutput

# Bytes in Python of a sample, with its random number generator, and of a drawn token with its logprob.
SAMPLE_BYTES, TOKEN_BYTES = 4096, 72
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


class RunGraphs:
    """One run's view of the kept graphs, which all runs share.

    Whether a graph is kept depends on free memory, and changes the rounding of results. A replay must round as the earlier
    process did, so it sets ``forced`` to the decision of that process; None leaves the decision to the shared graphs.
    Everything except ``forced`` is used by the calls of the worker only, one at a time.
    """

    def __init__(self, shared: KeptGraphs) -> None:
        self.forced: bool | None = None
        self.drop = shared.drop
        self.has_graphs = shared.has_graphs
        self._shared = shared
        self._decided: bool | None = None

    def forward(self, engine: Engine, data: Sequence[Datum], loss: LossFunction) -> ForwardBackwardOutput:
        output = self._shared.forward(engine, data, loss, self.forced)
        self._decided = self._shared.holds(engine, data)
        return output

    def take(self, engine: Engine, data: Sequence[Datum]) -> Retained | None:
        graph = self._shared.take(engine, data)
        if self.forced and graph is None:
            raise BackendError(
                "replay: the graph of a forward pass was evicted to free memory for other runs; raise server.graphs_gb"
            )
        if self.forced is False:
            graph = None
        self._decided = graph is not None
        return graph

    def take_decision(self) -> bool | None:
        """Return and clear whether the last call kept or used a graph; None if it was neither a forward nor a backward pass."""
        decided, self._decided = self._decided, None
        return decided


class Host:
    """Factory of trainers and samplers. LoRA runs share one copy of the base weights; a full fine-tuning run has its own copy.

    Args:
        names: additional names by which clients may refer to the base model.
        graph_bytes: limit on the kept graphs of forward passes whose loss the client computes.
        idle: moves the adapters of idle runs out of memory; None: they stay in memory.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineBackend,
        *,
        seed: int,
        names: tuple[str, ...] = (),
        graph_bytes: int = 0,
        idle: IdleAdapters | None = None,
    ) -> None:
        if model.lora_rank:
            raise ConfigError(f"model.lora_rank: clients choose the rank of each run, got {model.lora_rank}; leave it at 0")
        self.model = model
        self.config = config.for_serving(trains=True)
        self.name = resolved(model.name)
        self.names = frozenset({self.name, model.name, Path(self.name).name, *names})
        self._aliases = names
        self.worker = Worker(config.threads)
        self.graphs = KeptGraphs(graph_bytes)
        self.idle = idle
        self.seed = seed
        sampling_only = config.for_serving(trains=False)
        self._base_trainer = LocalTrainer(model, sampling_only, seed=seed, worker=self.worker.lane(Account()))
        network = self._base_trainer.engine.model.network
        self._base = SharedBase(self.name, network)
        self.info = self._base_trainer.info()
        self.vocabulary_size = int(network.config.get_text_config().vocab_size)

    @functools.cached_property
    def public(self) -> str:
        """Name under which clients know the base model, and load its tokenizer. It contains no path of this machine.

        For a folder: the first of the additional names with one slash, as names on the hub have, else ``cookbook/<folder>``.
        """
        if not Path(self.name).is_absolute():
            return self.name
        folder = re.sub(r"[^A-Za-z0-9._]+", "-", Path(self.name).name).strip("-.") or "model"
        return next((name for name in self._aliases if name.count("/") == 1 and _is_public(name)), f"cookbook/{folder}")

    @functools.cached_property
    def public_names(self) -> frozenset[str]:
        """The names of the base model that clients are told."""
        return frozenset({self.public, *filter(_is_public, self.names)})

    def is_name(self, name: str) -> bool:
        """Whether clients may call the base model by this name."""
        return name in self.names or name in self.public_names

    def public_name(self, base_model: str) -> str:
        """Return the model name that clients use to load the tokenizer: a hub name without its variant (``:full``).

        Raises:
            Refused: 400, the server does not serve this model.
        """
        name = base_model.partition(":")[0]
        if name not in self.names and name != self.public:
            choices = ", ".join(sorted(self.public_names, key=len))
            raise Refused(400, f"base_model: unknown model {base_model!r}; choose one of {choices}")
        return name if "/" in name and _is_public(name) else self.public

    def shown(self, base_model: str) -> str:
        """Return the public name of the base model of a run. Earlier versions of the server stored the path of a folder."""
        return base_model if _is_public(base_model.rstrip("/")) else self.public

    def tokenizer_file(self, file: str) -> Path | None:
        """Return the place of a file of the tokenizer; None: the model has no such file."""
        from transformers.utils import cached_file

        place = cached_file(
            self.name,
            file,
            revision=self.model.revision,
            local_files_only=True,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return None if place is None else Path(place)

    @functools.cached_property
    def digests(self) -> dict[str, str]:
        """Digests that distinguish the base model from other models of the same name."""
        return self._base_trainer.digests()

    @functools.cached_property
    def renderer(self) -> Renderer:
        """Renderer of conversations and texts to the tokens of the base model."""
        return Renderer(self._base_trainer.engine.model.tokenizer, self.info.max_context_length)

    @property
    def dtype(self) -> str:
        """Type of the weights of the base model, as checkpoints state it."""
        return self._base_trainer.engine.model.config.dtype

    def linear_sizes(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of input and output features of the linear layers by name, without the output layer."""
        network = self._base_trainer.engine.model.network
        output = network.get_output_embeddings()
        return {
            name: (module.in_features, module.out_features)
            for name, module in network.named_modules()
            if hasattr(module, "in_features") and hasattr(module, "out_features") and module is not output
        }

    def write_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer and the generation config of the base model to a checkpoint."""
        model = self._base_trainer.engine.model
        model.tokenizer.save_pretrained(folder)
        if (generation := getattr(model.network, "generation_config", None)) is not None:
            generation.save_pretrained(folder)

    def sample_queue(self, lane: Lane) -> SampleQueue:
        """Return the queue of a session's samplers."""
        return SampleQueue(lane, self._base_trainer.max_batch_tokens)

    def sampling_bytes(self, prompt_tokens: int, num_samples: int, num_tokens: int) -> int:
        """Estimate the memory of a sampling request: keys and values of the rows that are decoded together, and its result."""
        network = self._base_trainer.engine.model.network
        config = network.config.get_text_config()
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        keys: int = config.num_hidden_layers * (getattr(config, "num_key_value_heads", None) or heads) * width
        row_tokens = prompt_tokens + num_tokens // num_samples
        rows = min(num_samples, max(self._base_trainer.max_batch_tokens // row_tokens, 1))
        # On a CPU, the cache of shared prompts is float32.
        least = 4 if self._base_trainer.engine.model.device.type == "cpu" else 0
        states = rows * row_tokens * 2 * keys * max(least, int(network.dtype.itemsize))
        return states + num_samples * SAMPLE_BYTES + num_tokens * TOKEN_BYTES

    def new_trainer(
        self,
        folder: Path,
        *,
        rank: int,
        seed: int,
        modules: str | list[str] = "all-linear",
        dropout: float | None = None,
        graphs: RunGraphs | None = None,
        lane: Lane | None = None,
        sharing: PassSharing | None = None,
    ) -> LocalTrainer:
        """Create a run on the base model. ``rank`` 0 trains all parameters; ``dropout`` None is the server's."""
        model = self._with_dropout(replace(self.model, lora_rank=rank, lora_target_modules=modules), dropout)
        return self._trainer(model, folder, seed, graphs, lane, sharing, idle=self.idle)

    def trainer_from_checkpoint(
        self,
        folder: Path,
        checkpoint: Path,
        *,
        optimizer: bool,
        seed: int,
        dropout: float | None = None,
        graphs: RunGraphs | None = None,
        lane: Lane | None = None,
        sharing: PassSharing | None = None,
    ) -> LocalTrainer:
        """Create a run that starts from a checkpoint, with its optimizer state if ``optimizer``.

        An adapter is loaded onto the base model. For full weights the run is created on the base model first and then loads the
        checkpoint, as an embedded trainer does: fast paths are selected by a test on the base weights, and affect rounding.
        """
        model = self._model_of(checkpoint)
        if not is_adapter(model):
            model = replace(self.model, dtype=model.dtype)
        trainer = self._trainer(self._with_dropout(model, dropout), folder, seed, graphs, lane, sharing, idle=self.idle)
        trainer.load_state(str(checkpoint), optimizer=optimizer).result()
        return trainer

    @property
    def can_pause(self) -> bool:
        """Whether calls of a trainer may pause between two passes. Ranks compute the same call at the same time."""
        return self._base_trainer.engine.ranks.size == 1

    def base_sampler(self) -> LocalSampler:
        self._check_sampling()
        return self._base_trainer.live_sampler(0).result()

    def checkpoint_sampler(self, checkpoint: Path, seed: int) -> LocalSampler:
        """Load a checkpoint into a sampler. Raises Refused (400): the weights are sharded over ranks."""
        self._check_sampling()
        with _loadable(checkpoint) as folder:
            return self._trainer(self._model_of(folder), checkpoint.parent, seed).live_sampler(0).result()

    def lazy_sampler(self, checkpoint: Path, seed: int) -> LocalSampler:
        """Create a sampler that loads its checkpoint at its first request; a restart may need hundreds of samplers."""

        @functools.cache
        def engine() -> Engine:
            self._check_sampling()
            with _loadable(checkpoint) as folder:
                return self.config.make_engine(self._model_of(folder), seed, self._base)

        return LocalSampler(self.sample_queue(self.worker), engine, 0, seed)

    def close(self) -> None:
        """End the worker thread at the next pause of its work, and drop the other work."""
        self.worker.drop_all()
        self.worker.close()

    def _with_dropout(self, model: ModelConfig, dropout: float | None) -> ModelConfig:
        """Return ``model`` with the dropout of a run; the server's own ``model.dropout`` has precedence."""
        return model if self.model.dropout is not None or dropout is None else replace(model, dropout=dropout)

    def _check_sampling(self) -> None:
        if self._base_trainer.engine.ranks.shards:
            raise Refused(400, SHARDED)

    def _model_of(self, folder: Path) -> ModelConfig:
        """Return the configuration that loads a checkpoint. Raises CheckpointError: the checkpoint is missing or damaged."""
        dtype = manifest.verify(folder)["dtype"]
        return replace(self.model, name=str(folder), random=False, revision=None, dtype=dtype)

    def _trainer(
        self,
        model: ModelConfig,
        folder: Path,
        seed: int,
        graphs: RunGraphs | None = None,
        lane: Lane | None = None,
        sharing: PassSharing | None = None,
        *,
        idle: IdleAdapters | None = None,
    ) -> LocalTrainer:
        return LocalTrainer(
            model,
            self.config,
            seed=seed,
            folder=folder,
            failures=ServedFailures(),
            worker=lane or self.worker.lane(Account()),
            base=self._base,
            graphs=graphs or self.graphs,
            sharing=sharing,
            # Ranks compute the same call at the same time, and each would have files of its own.
            idle=idle if self.can_pause else None,
        )


@contextlib.contextmanager
def _loadable(checkpoint: Path) -> Iterator[Path]:
    """Context with a folder of whole weights: the checkpoint itself, or for a delta the weights that it results in."""
    if manifest.read(checkpoint)["kind"] != "delta":
        yield checkpoint
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(sampler_checkpoints.export(checkpoint, Path(temporary) / checkpoint.name).path)


def _is_public(name: str) -> bool:
    """Whether the name of a model is no path of this machine."""
    # The bare name of a folder is public, also if the server runs in the parent of this folder.
    return not Path(name).is_absolute() and (Path(name).name == name != ".." or not Path(name).is_dir())


def target_modules(*, attention: bool, mlp: bool) -> str | list[str]:
    """Return the layers that get an adapter. The output layer never gets one: the engine does not run it as a module."""
    if attention and mlp:
        return "all-linear"
    return [*(ATTENTION if attention else ()), *(MLP if mlp else ())]
