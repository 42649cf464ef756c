"""The embedded trainer: an engine behind the :class:`~cookbook.protocols.TrainingClient` protocol, in this process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from cookbook.backends.sampling import LocalSampler, SampleQueue
from cookbook.backends.worker import Worker
from cookbook.checkpoints import store
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.model import LanguageModel, ModelConfig, load
from cookbook.errors import BackendError, CheckpointError, ConfigError, RolloutError
from cookbook.futures import Future
from cookbook.losses import get_loss
from cookbook.normalization import as_normalization
from cookbook.types import (
    AdamParams,
    Checkpoint,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    OptimStepOutput,
    as_adam,
    as_datum,
)

T = TypeVar("T")
CHECKPOINTING_FROM_PARAMETERS = 1_000_000_000


@dataclass
class LocalConfig:
    """Where and how the embedded trainer computes. ``conf/backend/local.yaml`` says what each field means."""

    device: str = "auto"
    threads: int = 1
    micro_batch_tokens: int = 8192
    packing: str = "auto"
    activation_checkpointing: str = "auto"
    activation_offloading: bool = False
    token_metrics: bool = True
    retain_gb: float = 4.0

    def __post_init__(self) -> None:
        if self.packing not in ("auto", "packed", "padded"):
            raise ConfigError(f"backend.packing: expected one of auto, packed, padded, got {self.packing!r}")
        if self.threads < 1 or self.micro_batch_tokens < 1:
            raise ConfigError("backend: threads and micro_batch_tokens must be at least 1")
        if str(self.activation_checkpointing).lower() not in ("auto", "true", "false"):
            raise ConfigError(
                f"backend.activation_checkpointing: expected auto, true or false, got {self.activation_checkpointing!r}"
            )

    def torch_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError:
            raise ConfigError(f"backend.device: expected auto, cpu or cuda, got {self.device!r}") from None
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"backend.device: {self.device} was asked for and this machine has no usable GPU; use backend.device=cpu")
        return device

    def engine_options(self, model: LanguageModel, seed: int) -> EngineOptions:
        choice = str(self.activation_checkpointing).lower()
        large = model.num_parameters > CHECKPOINTING_FROM_PARAMETERS
        return EngineOptions(
            micro_batch_tokens=self.micro_batch_tokens,
            packing=self.packing,
            retain_bytes=int(self.retain_gb * (1 << 30)),
            activation_checkpointing=large if choice == "auto" else choice == "true",
            activation_offloading=self.activation_offloading,
            token_metrics=self.token_metrics,
            seed=seed,
        )


class _StepFuture(Future[T]):
    """Tells the trainer when its error has been read."""

    on_read: Callable[[], None] = staticmethod(lambda: None)

    def result(self, timeout: float | None = None) -> T:
        self._note(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._note(timeout)
        return super().exception(timeout)

    def _note(self, timeout: float | None) -> None:
        if super().exception(timeout) is not None:
            self.on_read()


class LocalTrainer:
    """A :class:`TrainingClient` in this process. Calls queue up on one worker thread and return at once.

    ``folder`` is where checkpoints go.
    """

    def __init__(self, model: ModelConfig, config: LocalConfig, *, seed: int = 0, folder: str | Path = "checkpoints") -> None:
        self.config = config
        self.folder = Path(folder)
        self.seed = seed
        self._worker = Worker(config.threads)
        self._samples = SampleQueue(self._worker, max_batch_tokens=65536)
        self._failure: BaseException | None = None
        self._failure_read = False
        try:
            self.engine = self._worker.submit(lambda: _make_engine(model, config, seed)).result()
        except BaseException:
            self._worker.close()
            raise

    # ---- TrainingClient ------------------------------------------------------------------------------------------

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, Any] | None = None
    ) -> Future[ForwardBackwardOutput]:
        loss = get_loss(loss_fn, loss_fn_config)
        return self._submit(lambda: self.engine.forward(_datums(data), loss))

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, Any] | None = None
    ) -> Future[ForwardBackwardOutput]:
        return self.forward_backward_custom(data, get_loss(loss_fn, loss_fn_config))

    def forward_backward_custom(self, data: Sequence[Datum], loss_fn: Any) -> Future[ForwardBackwardOutput]:
        return self._submit(lambda: self.engine.forward_backward(_datums(data), loss_fn))

    def optim_step(
        self, adam_params: AdamParams, grad_accumulation_normalization: str | None = None
    ) -> Future[OptimStepOutput]:
        adam = as_adam(adam_params)
        normalization = as_normalization(grad_accumulation_normalization)
        future: _StepFuture[OptimStepOutput] = _StepFuture()
        future.on_read = self._forget_failure

        def step() -> OptimStepOutput:
            if self._failure is not None:
                self.engine.discard_gradient()
                raise self._failure
            return self.engine.optim_step(adam, normalization)

        return self._submit(step, future)

    def save_state(self, name: str, *, overwrite: bool = False) -> Future[Checkpoint]:
        folder = store.named(self.folder, name)
        return self._submit(lambda: store.save(self.engine, folder, state=True, overwrite=overwrite))

    def load_state(self, checkpoint: Checkpoint | str, *, optimizer: bool = True) -> Future[None]:
        path = Path(checkpoint.path if isinstance(checkpoint, Checkpoint) else checkpoint)
        return self._submit(lambda: store.load(self.engine, path, optimizer=optimizer))

    def save_weights_for_sampler_ext(self, name: str, *, checkpoint_type: str = "base") -> Future[Checkpoint]:
        if checkpoint_type != "base":
            raise CheckpointError(f"checkpoint_type: this trainer writes 'base' checkpoints, got {checkpoint_type!r}")
        folder = store.named(self.folder, name)
        return self._submit(lambda: store.save(self.engine, folder, state=False))

    def close(self) -> None:
        self._samples.flush()
        self._worker.close()
        if self._failure is not None and not self._failure_read:
            raise self._failure

    # ---- what only a trainer in this process can do --------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        return self.engine.model.tokenizer

    @property
    def max_batch_tokens(self) -> int:
        """Prompt and completion tokens sampled at once."""
        return self._samples.max_batch_tokens

    @max_batch_tokens.setter
    def max_batch_tokens(self, value: int) -> None:
        self._samples.max_batch_tokens = value

    def live_sampler(self, step: int) -> Future[LocalSampler]:
        """A sampler on the trainer's own weights, without a copy. It refuses to answer once they have moved on."""

        def model() -> LanguageModel:
            if self.engine.step != step:
                raise RolloutError(
                    f"the sampler of step {step} was asked when the weights had seen {self.engine.step} steps; sync again"
                )
            return self.engine.model

        return self._submit(lambda: LocalSampler(self._samples, model, self._at(step), self._score, self.seed))

    def snapshot_sampler(self, step: int | None = None) -> Future[LocalSampler]:
        """A sampler on a copy of the weights as they are when this call's turn comes (after ``step`` steps, if given)."""

        def snapshot() -> LocalSampler:
            if step is not None:
                self._at(step)
            frozen = self._frozen()
            return LocalSampler(self._samples, lambda: frozen.model, self.engine.step, self._scorer(frozen), self.seed)

        return self._submit(snapshot)

    def reference(self) -> LocalReference:
        """The weights as they are now, frozen: the model under the adapter, or a copy of a fully trained one."""
        if self.engine.model.is_lora:
            return LocalReference(self._submit, lambda: self.engine, adapter=False)
        frozen = self._submit(self._frozen)
        return LocalReference(self._submit, frozen.result, adapter=True)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _submit(self, job: Callable[[], T], future: Future[T] | None = None) -> Future[T]:
        """Queues ``job`` behind every sample asked for so far. Its failure is remembered until a step has reported it."""
        self._samples.flush()

        def guarded() -> T:
            try:
                return job()
            except BaseException as error:
                if self._failure is None:
                    self._failure, self._failure_read = error, False
                self.engine.discard_gradient()
                raise

        answer: _StepFuture[T] = future if isinstance(future, _StepFuture) else _StepFuture()
        if future is None:
            answer.on_read = self._note_read
        return self._worker.submit(guarded, answer)

    def _note_read(self) -> None:
        self._failure_read = True

    def _forget_failure(self) -> None:
        self._failure, self._failure_read = None, True

    def _at(self, step: int) -> int:
        if self.engine.step != step:
            raise BackendError(f"the weights have seen {self.engine.step} steps, not {step}")
        return step

    def _frozen(self) -> Engine:
        model = copy.copy(self.engine.model)
        model.network = copy.deepcopy(self.engine.model.network).requires_grad_(False)
        return Engine(model, self.engine.options)

    def _score(self, prompt: ModelInput) -> Future[list[float | None]]:
        return self._submit(lambda: _prompt_logprobs(self.engine, prompt))

    def _scorer(self, frozen: Engine) -> Callable[[ModelInput], Future[list[float | None]]]:
        return lambda prompt: self._submit(lambda: _prompt_logprobs(frozen, prompt))


class LocalReference:
    """Logprobs under frozen weights, computed by the trainer's worker."""

    def __init__(self, submit: Callable[..., Future[Any]], engine: Callable[[], Engine], *, adapter: bool) -> None:
        self._submit = submit
        self._engine = engine
        self._adapter = adapter

    def logprobs(self, data: Sequence[Datum]) -> Future[list[Any]]:
        def job() -> list[Any]:
            output = self._engine().forward(_datums(data), adapter=self._adapter)
            return [row["logprobs"].to_numpy() for row in output.loss_fn_outputs]

        return self._submit(job)


def _make_engine(model: ModelConfig, config: LocalConfig, seed: int) -> Engine:
    loaded = load(model, config.torch_device(), seed)
    return Engine(loaded, config.engine_options(loaded, seed))


def _datums(data: Sequence[Any]) -> list[Datum]:
    return [as_datum(datum, index) for index, datum in enumerate(data)]


def _prompt_logprobs(engine: Engine, prompt: ModelInput) -> list[float | None]:
    """The logprob of every token given those before it; the first has none."""
    tokens = prompt.to_ints()
    if len(tokens) < 2:
        return [None] * len(tokens)
    datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
    logprobs = engine.forward([datum]).loss_fn_outputs[0]["logprobs"]
    return [None, *logprobs.tolist()]
