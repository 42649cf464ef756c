"""The embedded trainer: an engine behind the :class:`~cookbook.protocols.TrainingClient` protocol, in this process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from cookbook.backends import copies
from cookbook.backends.failures import CallFuture, Failures, PendingStep
from cookbook.backends.graphs import Graphs, KeptGraphs
from cookbook.backends.info import ModelData, ModelInfo
from cookbook.backends.sampling import LocalSampler, SampleQueue
from cookbook.backends.worker import Worker, explained
from cookbook.checkpoints import chain, store
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.linear_logprobs.implementations import CCE, HeadImpl, check_filter_eps, resolve
from cookbook.engine.model import LanguageModel, ModelConfig, load
from cookbook.engine.planning import PACKINGS
from cookbook.engine.shared import SharedBase
from cookbook.engine.update_rules import update_rule
from cookbook.errors import BackendError, ConfigError, RolloutError
from cookbook.futures import Future
from cookbook.losses import loss_of_call
from cookbook.normalization import as_normalization
from cookbook.protocols import Backend, LaggingSampler, Sampler
from cookbook.types import (
    AdamParams,
    Checkpoint,
    Datum,
    ForwardBackwardOutput,
    OptimStepOutput,
    as_adam,
    as_datum,
)

if TYPE_CHECKING:
    from cookbook.backends.homes import Home

T = TypeVar("T")


@dataclass
class LocalConfig:
    """Where and how the embedded trainer computes. ``conf/backend/local.yaml`` says what each field means."""

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
    token_metrics: bool = True
    all_logprobs: bool = False
    retain_gb: float = 4.0
    shard_gb: float = 5.0

    def __post_init__(self) -> None:
        if self.packing not in PACKINGS:
            raise ConfigError(f"backend.packing: expected one of {', '.join(PACKINGS)}, got {self.packing!r}")
        self._head = resolve(self.head_impl, "backend.head_impl")  # a mistake in a file shows before a model is loaded
        self.cce_filter_eps = check_filter_eps(self.cce_filter_eps, "backend.cce_filter_eps")
        if self.cce_filter_eps is not None and self.head_impl != CCE:
            raise ConfigError(
                f"backend.cce_filter_eps: is for backend.head_impl=cce, got head_impl={self.head_impl!r}; leave one of them out"
            )
        update_rule(self.optimizer)
        if self.threads < 1 or self.micro_batch_tokens < 1:
            raise ConfigError("backend: threads and micro_batch_tokens must be at least 1")
        if not self.shard_gb > 0:
            raise ConfigError(f"backend.shard_gb must be above 0, got {self.shard_gb}")
        if str(self.activation_checkpointing).lower() not in ("auto", "true", "false"):
            raise ConfigError(
                f"backend.activation_checkpointing: expected auto, true or false, got {self.activation_checkpointing!r}"
            )

    def preflight(self, model: ModelConfig, backend: Backend) -> None:
        """Raises ConfigError: the device is absent, or the optimizer's package is not installed."""
        self.torch_device()
        update_rule(self.optimizer).require()

    def make_trainer(self, model: ModelConfig, *, seed: int, folder: Path) -> LocalTrainer:
        """Raises CookbookError: the model cannot be loaded."""
        return LocalTrainer(model, self, seed=seed, folder=folder)

    def home(self, folder: Path) -> Home:
        """Where a :class:`~cookbook.service.ServiceClient` computes."""
        from cookbook.backends.homes import EmbeddedHome  # it imports this module

        return EmbeddedHome(self, folder)

    def torch_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError:
            raise ConfigError(f"backend.device: expected auto, cpu or cuda, got {self.device!r}") from None
        if device.type == "mps":
            raise ConfigError(
                "backend.device: the GPU of a Mac has no float64, which sampling and gradient norms need, got mps; "
                "use backend.device=cpu"
            )
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"backend.device: expected auto, cpu or cuda, got {self.device!r}")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"backend.device: this machine has no usable GPU, got {self.device}; use backend.device=cpu")
        return device

    @property
    def recomputes(self) -> bool | None:
        """Whether activations are computed again in the backward pass; None: as memory allows."""
        choice = str(self.activation_checkpointing).lower()
        return None if choice == "auto" else choice == "true"

    def engine_options(self, model: LanguageModel, seed: int) -> EngineOptions:
        return EngineOptions(
            micro_batch_tokens=self.micro_batch_tokens,
            packing=self.packing,
            shared_prompts=self.shared_prompts,
            fused_layers=self.fused_layers,
            trim_last_layer=self.trim_last_layer,
            head_impl=self._head,
            head_options={} if self.cce_filter_eps is None else {"filter_eps": self.cce_filter_eps},
            retain_bytes=int(self.retain_gb * (1 << 30)),
            activation_checkpointing=self.recomputes,
            activation_offloading=self.activation_offloading and model.device.type == "cuda",
            optimizer=self.optimizer,
            token_metrics=self.token_metrics,
            all_logprobs=self.all_logprobs,
            seed=seed,
        )


class LocalTrainer:
    """A :class:`TrainingClient` in this process. Calls queue up on one worker thread and return at once.

    ``folder`` is where checkpoints go; ``failures`` holds the errors that the caller has not read. Trainers that share a
    ``worker`` take turns on its thread, and those on one ``base`` hold its weights once. With ``graphs``, a forward that is
    followed by a backward on the same tokens is not computed twice.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: LocalConfig,
        *,
        seed: int = 0,
        folder: str | Path = "checkpoints",
        failures: Failures | None = None,
        worker: Worker | None = None,
        base: SharedBase | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        self.config = config
        self.folder = Path(folder)
        self.seed = seed
        self._owns_worker = worker is None
        self._worker = worker or Worker(config.threads)
        self._samples = SampleQueue(self._worker, max_batch_tokens=65536)
        self._failures = Failures() if failures is None else failures
        self._graphs: Graphs = graphs or KeptGraphs(0)
        self.sampler_checkpoints = chain.SamplerCheckpoints()
        try:
            self.engine = self._worker.submit(lambda: _make_engine(model, config, seed, base)).result()
        except BaseException:
            self._end_worker()
            raise

    # ---- TrainingClient ------------------------------------------------------------------------------------------

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, Any] | None = None
    ) -> Future[ForwardBackwardOutput]:
        loss = loss_of_call(loss_fn, loss_fn_config)
        rows = _own(data)
        return self._submit(lambda: self._graphs.forward(self.engine, rows, loss))

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, Any] | None = None,
        *,
        all_logprobs: bool | None = None,
    ) -> Future[ForwardBackwardOutput]:
        """``all_logprobs``: also of tokens that the loss ignores; None: as the configuration says."""
        return self._add_gradient(data, loss_of_call(loss_fn, loss_fn_config), all_logprobs)

    def forward_backward_custom(self, data: Sequence[Datum], loss_fn: Any) -> Future[ForwardBackwardOutput]:
        return self._add_gradient(data, loss_fn, None)

    def optim_step(
        self, adam_params: AdamParams, grad_accumulation_normalization: str | None = None
    ) -> Future[OptimStepOutput]:
        adam = as_adam(adam_params)
        normalization = as_normalization(grad_accumulation_normalization)
        pending = self._failures.step()

        def step() -> OptimStepOutput:
            try:
                if (error := pending.error()) is not None:
                    raise error
                output = self.engine.optim_step(adam, normalization)
            except BaseException:
                self.engine.discard_gradient()
                raise
            self._graphs.drop(self.engine)
            return output

        return self._submit(step, pending)

    def forgive(self) -> None:
        """The caller has read the errors of all calls so far, in whatever way: they fail nothing from now on."""
        self._worker.submit(self._failures.read_all)

    def save_state(
        self,
        name: str,
        *,
        overwrite: bool = False,
        facts: Mapping[str, Any] | None = None,
        sampler: Sampler | None = None,
        asynchronous: bool = False,
    ) -> Future[Checkpoint]:
        folder = store.named(self.folder, name)
        older = sampler.saving() if isinstance(sampler, LaggingSampler) else None

        def save(engine: store.Trained) -> Checkpoint:
            size = int(self.config.shard_gb * (1 << 30))
            return store.save(engine, folder, state=True, overwrite=overwrite, facts=facts, sampler=older, shard_bytes=size)

        if not asynchronous:
            return self._submit(lambda: save(self.engine))
        copied = self._submit(lambda: copies.on_host(self.engine, self._tokenizer_to_save))

        def save_copy() -> Checkpoint:
            try:
                return save(copied.wait())
            except BaseException as error:
                self._failures.note(error)
                raise

        return self._saver.submit(save_copy, CallFuture(self._failures.read))

    def load_state(self, checkpoint: Checkpoint | str, *, optimizer: bool = True) -> Future[None]:
        path = Path(checkpoint.path if isinstance(checkpoint, Checkpoint) else checkpoint)

        def load() -> None:
            chain.load(self.engine, path, optimizer=optimizer)
            self.sampler_checkpoints.forget()
            self._graphs.drop(self.engine)

        return self._submit(load)

    def save_weights_for_sampler_ext(
        self, name: str, *, checkpoint_type: str = "base", merged: bool = False
    ) -> Future[Checkpoint]:
        chain.check_kind(checkpoint_type)
        folder = store.named(self.folder, name)
        return self._submit(lambda: self.sampler_checkpoints.save(self.engine, folder, checkpoint_type, merged=merged))

    def save_adapted_weights(self, name: str) -> Future[Checkpoint]:
        """What the adapter lies on, without it, as full weights to sample from."""
        folder = store.named(self.folder, name)
        return self._submit(lambda: self.sampler_checkpoints.save_adapted(self.engine, folder))

    def delta_predecessor(self) -> Future[str | None]:
        """The folder of the checkpoint that the next delta would differ from; None: the next must be a base."""
        return self._submit(lambda: self.sampler_checkpoints.predecessor)

    def refuse(self, error: BaseException, *, step: bool = False) -> Future[Any]:
        """A call that could not even be made fails in its turn, as any other that fails; ``step``: as an optimizer step does,
        which tells of an earlier failure, and ends it.
        """

        pending = self._failures.step() if step else None

        def fail() -> None:
            if pending is None:
                raise error
            self.engine.discard_gradient()
            raise pending.error() or error

        return self._submit(fail, pending)

    def close(self) -> None:
        self._samples.flush()
        self._end_worker()
        if "_saver" in self.__dict__:
            self._saver.close()
        self._failures.raise_unread()

    # ---- what only a trainer in this process can do --------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether weights, optimizer and step are all there is: no gradient has accumulated, and every error has been read."""
        engine = self.engine
        return not (engine.accumulated or engine.seeds or engine.lost_gradient or self._failures.errors)

    def digests(self) -> dict[str, str]:
        """What tells the model, as it was loaded, from another one of the same name."""
        return copies.digests(self.engine.model)

    def info(self) -> ModelInfo:
        model = self.engine.model
        name = model.config.name
        data = ModelData(model.network.config.model_type, name, model.tokenizer.name_or_path)
        return ModelInfo(data, name, model.config.lora_rank, model.is_lora, model.num_parameters, model.max_length)

    @property
    def tokenizer(self) -> Any:
        return self.engine.model.tokenizer

    @property
    def step(self) -> int:
        """Finished optimizer steps, of the calls that have had their turn."""
        return self.engine.step

    @property
    def max_length(self) -> int:
        """The longest sequence the model takes, tokens."""
        return self.engine.model.max_length

    @property
    def max_batch_tokens(self) -> int:
        """Prompt and completion tokens sampled at once."""
        return self._samples.max_batch_tokens

    @max_batch_tokens.setter
    def max_batch_tokens(self, value: int) -> None:
        self._samples.max_batch_tokens = value

    def live_sampler(self, step: int) -> Future[LocalSampler]:
        """A sampler on the trainer's own weights, without a copy. It refuses to answer once they have moved on."""

        def live() -> LocalSampler:
            self._at(step)
            version = self.engine.version

            def engine() -> Engine:
                if self.engine.version != version:
                    raise RolloutError(f"the weights have moved on since the sampler of step {step} was made; sync again")
                return self.engine

            return LocalSampler(self._samples, engine, step, self.seed)

        return self._submit(live)

    def lagging_sampler(self, step: int) -> Future[LocalSampler]:
        """A sampler on a copy of the weights after ``step`` steps."""
        return self.snapshot_sampler(step)

    def snapshot_sampler(self, step: int | None = None) -> Future[LocalSampler]:
        """A sampler on a copy of the weights as they are when this call's turn comes (after ``step`` steps, if given)."""

        def snapshot() -> LocalSampler:
            if step is not None:
                self._at(step)
            frozen = copies.frozen(self.engine)
            return LocalSampler(self._samples, lambda: frozen, self.engine.step, self.seed)

        return self._submit(snapshot)

    def reference(self) -> LocalReference:
        """The weights as they are now, frozen: the model under an adapter that has not learnt yet, else a copy."""
        idle = self._submit(lambda: self.engine.model.adapter_is_idle).result()
        if idle:
            return LocalReference(self._submit, self.engine, adapter=False)
        frozen = self._submit(lambda: copies.frozen(self.engine)).result()
        return LocalReference(self._submit, frozen, adapter=True)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _add_gradient(self, data: Sequence[Datum], loss: Any, all_logprobs: bool | None) -> Future[ForwardBackwardOutput]:
        rows = _own(data)

        def add() -> ForwardBackwardOutput:
            retained = self._graphs.take(self.engine, rows)
            return self.engine.forward_backward(rows, loss, retained, all_logprobs=all_logprobs)

        return self._submit(add)

    def _end_worker(self) -> None:
        """Waits for what is under way; ends the thread unless others use it."""
        if self._owns_worker:
            self._worker.close()
        else:
            self._worker.submit(lambda: None).result()

    def _submit(self, job: Callable[[], T], step: PendingStep | None = None) -> CallFuture[T]:
        """Queues ``job`` behind every sample asked for so far. Its failure is remembered until the caller has read it."""
        self._samples.flush()
        failures = step or self._failures

        def guarded() -> T:
            try:
                return job()
            except BaseException as caught:
                error = explained(caught)
                failures.note(error)
                if error is caught:
                    raise
                raise error from None

        future: CallFuture[T] = CallFuture(failures.read)
        self._worker.submit(guarded, future)
        return future

    def _at(self, step: int) -> int:
        if self.engine.step != step:
            raise BackendError(f"the weights have seen {self.engine.step} steps, not {step}")
        return step

    @functools.cached_property
    def _saver(self) -> Worker:
        """Writes checkpoints while the worker trains on; one at a time."""
        return Worker(threads=1)

    @functools.cached_property
    def _tokenizer_to_save(self) -> Any:
        return copy.deepcopy(self.tokenizer)


class LocalReference:
    """Logprobs under frozen weights, computed by the trainer's worker."""

    def __init__(self, submit: Callable[..., Future[Any]], engine: Engine, *, adapter: bool) -> None:
        self._submit = submit
        self._engine = engine
        self._adapter = adapter

    def logprobs(self, data: Sequence[Datum]) -> Future[list[Any]]:
        rows = _own(data)

        def job() -> list[Any]:
            output = self._engine.forward(rows, adapter=self._adapter)
            return [row["logprobs"].to_numpy() for row in output.loss_fn_outputs]

        return self._submit(job)


def _make_engine(model: ModelConfig, config: LocalConfig, seed: int, base: SharedBase | None) -> Engine:
    update_rule(config.optimizer).require()
    loaded = load(model, config.torch_device(), seed, base)
    return Engine(loaded, config.engine_options(loaded, seed))


def _own(data: Sequence[Any]) -> list[Datum]:
    """``data`` as our datums, with arrays nobody else holds: the caller may go on with its own before the call's turn comes."""
    return [as_datum(datum, index).detached() for index, datum in enumerate(data)]
