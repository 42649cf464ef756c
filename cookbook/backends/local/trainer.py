"""Embedded trainer: an engine in this process behind the :class:`~cookbook.protocols.Trainer` protocol."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cookbook.backends.client_factory import ModelData, ModelInfo, checkpoint_path
from cookbook.backends.local.idle_adapters import IdleAdapters
from cookbook.backends.local.kept_graphs import Graphs
from cookbook.backends.local.sample_queue import SHARDED, LocalSampler, SampleQueue
from cookbook.backends.local.shared_calls import PassSharing
from cookbook.backends.model_source import sampling_target
from cookbook.backends.worker import Account, Lane, SharedWork, Worker
from cookbook.checkpoints import sampler_checkpoints, snapshots, store
from cookbook.engine import quantized
from cookbook.engine.engine import Engine
from cookbook.engine.loss_gradient import LossFunction
from cookbook.engine.model import ModelConfig, SharedBase
from cookbook.engine.shared_passes import AdapterCall
from cookbook.errors import BackendError, ConfigError, RolloutError
from cookbook.futures import CallFuture, Failures, Future, PendingStep
from cookbook.losses.base import loss_of_call
from cookbook.losses.normalization import as_normalization
from cookbook.protocols import MAX_BATCH_TOKENS, EngineBackend, LaggingSampler, Sampler
from cookbook.types import (
    AdamParams,
    Array,
    Checkpoint,
    Datum,
    ForwardBackwardOutput,
    JsonObject,
    OptimStepOutput,
    as_adam,
    as_datum,
)
from cookbook.utils import paths

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


class LocalTrainer:
    """A :class:`~cookbook.protocols.Trainer` in this process. Calls are queued on a worker thread and return immediately.

    Args:
        folder: destination of checkpoints.
        failures: the errors that the caller has not read.
        worker: lane of a worker thread that several trainers share; None: a new thread.
        base: base weights that an adapter shares with other adapters; None: load them.
        graphs: keeps the graphs of forward passes for a later backward pass on the same tokens; None: keep none.
        idle: moves the adapter out of memory while the trainer is idle; None: it stays in memory.
        sharing: lets gradient calls share passes with those of other trainers on the worker; None: they have their own passes.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineBackend,
        *,
        seed: int = 0,
        folder: str | Path = "checkpoints",
        failures: Failures | None = None,
        worker: Lane | None = None,
        base: SharedBase | None = None,
        graphs: Graphs | None = None,
        sharing: PassSharing | None = None,
        idle: IdleAdapters | None = None,
    ) -> None:
        self.config = config
        self.folder = Path(folder)
        self.seed = seed
        self._worker = worker or Worker(config.threads)
        # Lane of the calls, and queue of the samplers on copies of the weights; see `sample_between_passes`.
        self._calls: Lane = self._worker
        self._samples = self._copy_samples = SampleQueue(self._worker, MAX_BATCH_TOKENS)
        self._failures = Failures() if failures is None else failures
        self._graphs = graphs
        self._sharing = sharing
        self._idle = idle
        self._sampler_checkpoints = sampler_checkpoints.SamplerCheckpoints()
        try:
            self.engine = self._worker.submit(lambda: config.make_engine(model, seed, base)).result()
        except BaseException:
            self._worker.close()
            raise
        if idle is not None:
            # Count the adapter even if no call follows.
            self._worker.submit(lambda: self._with_engine(lambda: None)).result()

    # ---- training ------------------------------------------------------------------------------------------------

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: JsonObject | None = None
    ) -> Future[ForwardBackwardOutput]:
        loss = loss_of_call(loss_fn, loss_fn_config)
        rows = _detached(data)
        if (graphs := self._graphs) is None:
            return self._submit(lambda: self.engine.forward(rows, loss))
        return self._submit(lambda: graphs.forward(self.engine, rows, loss))

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: JsonObject | None = None,
        *,
        all_logprobs: bool | None = None,
    ) -> Future[ForwardBackwardOutput]:
        """Add the gradient of a loss.

        Args:
            all_logprobs: return logprobs also of tokens that the loss ignores; None: as configured.
        """
        return self._add_gradient(data, loss_of_call(loss_fn, loss_fn_config), all_logprobs)

    def forward_backward_custom(self, data: Sequence[Datum], loss_fn: LossFunction) -> Future[ForwardBackwardOutput]:
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
            self._drop_graphs()
            return output

        return self._submit(step, pending)

    def mark_errors_read(self) -> None:
        """Mark the errors of all calls so far as read, so that they do not fail a later optimizer step."""
        self._calls.submit(self._failures.mark_all_read)

    def forget_errors(self, errors: Sequence[BaseException]) -> None:
        """Remove the errors that ``errors`` holds once all calls so far have run, so that no optimizer step reports them."""
        self._calls.submit(lambda: self._failures.forget(errors))

    def save_state(
        self,
        name: str,
        *,
        overwrite: bool = False,
        facts: JsonObject | None = None,
        sampler: Sampler | None = None,
        asynchronous: bool = False,
        optimizer: bool = True,
    ) -> Future[Checkpoint]:
        folder = store.named(self.folder, name)
        save_lagging = sampler.saving() if isinstance(sampler, LaggingSampler) else None

        def save(engine: Engine | snapshots.Snapshot) -> Checkpoint:
            shard_bytes = int(self.config.shard_gb * (1 << 30))
            return store.save(
                engine,
                folder,
                state=optimizer,
                overwrite=overwrite,
                facts=facts,
                sampler=save_lagging,
                shard_bytes=shard_bytes,
                kind=store.WEIGHTS_ONLY,
            )

        if not asynchronous:
            return self._submit(lambda: save(self.engine))
        copied = self._submit(lambda: snapshots.on_host(self.engine, self._tokenizer_to_save))
        return self._submit(lambda: save(copied.wait()), worker=self._saver)

    def load_state(self, checkpoint: Checkpoint | str, *, optimizer: bool = True) -> Future[None]:
        path = Path(checkpoint_path(checkpoint))
        if paths.is_run(path) or not path.exists():
            path = Path(sampling_target(str(path)))

        def load() -> None:
            sampler_checkpoints.load(self.engine, path, optimizer=optimizer)
            self._sampler_checkpoints.forget()
            self._drop_graphs()

        return self._submit(load)

    def save_weights_for_sampler_ext(
        self, name: str, *, checkpoint_type: str = "base", merged: bool = False, predecessor: str | None = None
    ) -> Future[Checkpoint]:
        """Save weights to sample from.

        Args:
            predecessor: name of the checkpoint that a delta must apply to; if the last one has another name, save a base.
        """
        sampler_checkpoints.check_kind(checkpoint_type)
        folder = store.named(self.folder, name)

        def save() -> Checkpoint:
            return self._sampler_checkpoints.save(self.engine, folder, checkpoint_type, merged=merged, predecessor=predecessor)

        return self._submit(save)

    def save_adapted_weights(self, name: str) -> Future[Checkpoint]:
        """Save the base model's weights, without the adapter, as full weights to sample from."""
        folder = store.named(self.folder, name)
        return self._submit(lambda: self._sampler_checkpoints.save_adapted(self.engine, folder))

    def set_checkpoint_dtype(self, dtype: str) -> None:
        """Set the element type of later sampler checkpoints of full weights. After a change the next one must be a base."""
        if self._sampler_checkpoints.dtype != dtype:
            self._sampler_checkpoints = sampler_checkpoints.SamplerCheckpoints(dtype)

    @property
    def gpus(self) -> tuple[int, ...]:
        """Number of the GPU on which the model is; empty: the model is on a CPU."""
        device = self.engine.model.device
        return (device.index or 0,) if device.type == "cuda" else ()

    def delta_predecessor(self) -> Future[str | None]:
        """Return the folder of the checkpoint to which the next delta would apply; None if a base must be saved next."""
        return self._submit(lambda: self._sampler_checkpoints.predecessor)

    def queue_failure(self, error: BaseException, *, step: bool = False) -> Future[None]:
        """Queue a call that fails with ``error``, in place of a call that could not be made.

        Args:
            step: fail like an optimizer step, which drops the gradient and reports an earlier unread error in place of
                ``error``.
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
        self._copy_samples.flush()
        self._worker.close()
        if "_saver" in self.__dict__:
            self._saver.close()
        self._failures.raise_unread()

    # ---- facts and samplers --------------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether a checkpoint would store the whole state: there is no accumulated gradient and no unread error."""
        engine = self.engine
        return not (engine.accumulated or engine.seeds or engine.lost_gradient or self._failures.errors)

    def digests(self) -> dict[str, str]:
        """Return digests of the model as it was loaded, which distinguish it from other models of the same name."""
        return snapshots.digests_of(self.engine)

    def info(self) -> ModelInfo:
        model = self.engine.model
        name = model.config.name
        data = ModelData(model.network.config.model_type, name, model.tokenizer.name_or_path)
        num_parameters = model.network.num_parameters() + quantized.num_weights(model.network)
        return ModelInfo(data, name, model.config.lora_rank, model.is_lora, num_parameters, model.max_length)

    @property
    def model_config(self) -> ModelConfig:
        """The model as it was loaded: ``dtype`` is not ``auto``."""
        return self.engine.model.config

    @property
    def adapted_model(self) -> str | None:
        """Name of the base model of the LoRA adapter; None if all parameters are trained."""
        model = self.engine.model
        return model.network.active_peft_config.base_model_name_or_path if model.is_lora else None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer: PreTrainedTokenizerBase = self.engine.model.tokenizer
        return tokenizer

    @property
    def step(self) -> int:
        """Number of optimizer steps that have run."""
        return self.engine.step

    @property
    def max_length(self) -> int:
        """The longest sequence that the model supports, in tokens."""
        return self.engine.model.max_length

    @property
    def max_batch_tokens(self) -> int:
        """Limit on the prompt and completion tokens that samplers compute together."""
        return self._samples.max_batch_tokens

    @max_batch_tokens.setter
    def max_batch_tokens(self, value: int) -> None:
        self._samples.max_batch_tokens = self._copy_samples.max_batch_tokens = value

    def sample_between_passes(self) -> None:
        """Let samplers on copies of the weights compute between two passes of a training call, and not only between calls.

        Calls and samplers take turns on the trainer's thread. They share no state, so a turn changes no number. Two threads
        would: torch's precision of products is a setting of the process.
        """
        assert isinstance(self._worker, Worker)
        # Ranks compute the same call at the same time.
        pauses = self.engine.ranks.size == 1
        self._calls = self._worker.lane(Account(), pauses=pauses)
        self._copy_samples = SampleQueue(self._worker.lane(Account(), pauses=pauses), self.max_batch_tokens)

    def live_sampler(self, step: int) -> Future[LocalSampler]:
        """Return a sampler on the weights in training, without a copy. The sampler raises once the weights have changed."""

        def live() -> LocalSampler:
            self._refuse_shards()
            self._require_step(step)
            version = self.engine.version

            def engine() -> Engine:
                if self.engine.version != version:
                    raise RolloutError(
                        f"sample: the weights have changed since the sampler of step {step} was created; sync again"
                    )
                return self.engine

            return LocalSampler(self._samples, engine, step, self.seed)

        return self._submit(live)

    def snapshot_sampler(self, step: int | None = None) -> Future[LocalSampler]:
        """Return a sampler on a copy of the weights at this call's turn. Raises unless they are at ``step``, if it is given."""

        def snapshot() -> LocalSampler:
            self._refuse_shards()
            if step is not None:
                self._require_step(step)
            frozen = snapshots.frozen(self.engine)
            return LocalSampler(self._copy_samples, lambda: frozen, self.engine.step, self.seed)

        return self._submit(snapshot)

    lagging_sampler = snapshot_sampler

    def reference(self) -> LocalReference:
        """Return the current weights, frozen: the base weights if there is an untrained adapter, else a copy."""
        if self._submit(self.engine.adapter_is_idle).result():
            return LocalReference(self._submit, self.engine, adapter=False)
        frozen = self._submit(lambda: snapshots.frozen(self.engine)).result()
        return LocalReference(self._submit, frozen, adapter=True)

    def in_memory(self) -> contextlib.AbstractContextManager[None]:
        """Context of a job on the worker in which the engine's tensors are in memory."""
        if self._idle is None or not self.engine.model.is_lora:
            return contextlib.nullcontext()
        return self._idle.using(self.engine, self._has_graphs)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _add_gradient(
        self, data: Sequence[Datum], loss: LossFunction, all_logprobs: bool | None
    ) -> Future[ForwardBackwardOutput]:
        rows = _detached(data)
        if self._sharing is not None:
            call = AdapterCall(self.engine, rows, loss, all_logprobs)
            work = self._sharing.work(call, self._graphs, self.in_memory)
            return self._submit(work.compute, work=work)

        def add() -> ForwardBackwardOutput:
            retained = None if self._graphs is None else self._graphs.take(self.engine, rows)
            return self.engine.forward_backward(rows, loss, retained, all_logprobs=all_logprobs)

        return self._submit(add)

    def _with_engine(self, job: Callable[[], T]) -> T:
        with self.in_memory():
            return job()

    def _has_graphs(self) -> bool:
        return self._graphs is not None and self._graphs.has_graphs(self.engine)

    def _drop_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.drop(self.engine)

    def _refuse_shards(self) -> None:
        if self.engine.ranks.shards:
            raise ConfigError(SHARDED)

    def _submit(
        self,
        job: Callable[[], T],
        step: PendingStep | None = None,
        worker: Worker | None = None,
        work: SharedWork | None = None,
    ) -> CallFuture[T]:
        """Queue ``job`` behind all samples that were requested so far. Its error is recorded until the caller has read it.

        Args:
            step: the optimizer step that the job runs, if any.
            worker: worker that runs the job; None: the trainer's worker.
            work: what the job computes, if it may be computed together with jobs of other trainers.
        """
        if self._samples.waiting:
            self._samples.flush()
        future: CallFuture[T] = CallFuture(step or self._failures)

        # The second worker writes from a copy.
        call = job if worker else functools.partial(self._with_engine, job)
        (worker or self._calls).submit(call, future, work)
        return future

    def _require_step(self, step: int) -> None:
        if self.engine.step != step:
            raise BackendError(f"the weights are at step {self.engine.step}, expected step {step}; sync after the step is done")

    @functools.cached_property
    def _saver(self) -> Worker:
        """Second worker, which writes checkpoints one at a time while the first continues to train."""
        return Worker(threads=1)

    @functools.cached_property
    def _tokenizer_to_save(self) -> PreTrainedTokenizerBase:
        # The saver needs a copy: a tokenizer cannot be saved while another thread uses it.
        return copy.deepcopy(self.tokenizer)


@dataclass(frozen=True)
class LocalReference:
    """A :class:`~cookbook.protocols.Reference` that computes on the trainer's worker. ``submit`` queues a job there."""

    submit: Callable[[Callable[[], list[Array]]], Future[list[Array]]]
    engine: Engine
    adapter: bool

    def logprobs(self, data: Sequence[Datum]) -> Future[list[Array]]:
        rows = _detached(data)

        def job() -> list[Array]:
            output = self.engine.forward(rows, adapter=self.adapter)
            return [row["logprobs"].to_numpy() for row in output.loss_fn_outputs]

        return self.submit(job)


def _detached(data: Sequence[Any]) -> list[Datum]:
    """Convert ``data`` to datums with copied arrays, because the caller may change its arrays before the call runs."""
    return [as_datum(datum, index).detached() for index, datum in enumerate(data)]
