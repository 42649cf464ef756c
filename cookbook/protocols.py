"""Interfaces between the packages. A recipe touches nothing else, and a user's own classes fit wherever cookbook's do.

A small protocol that is marked ``runtime_checkable`` declares one capability. A class has the capability if it has the members;
cookbook asks ``isinstance(part, Protocol)`` and never names a class of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from cookbook.types import (
    AdamParams,
    Checkpoint,
    Datum,
    ForwardBackwardOutput,
    JsonObject,
    OptimStepOutput,
    Prompt,
    SampleResponse,
    SamplingParams,
)

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from transformers import PreTrainedTokenizerBase

    from cookbook.data import Renderer
    from cookbook.engine.engine import Engine
    from cookbook.engine.model import ModelConfig, SharedBase
    from cookbook.engine.precision import Precision
    from cookbook.engine.shape import Shape
    from cookbook.futures import Future
    from cookbook.types import Array

    LossFn = Callable[[Sequence[Datum], list[torch.Tensor]], tuple[torch.Tensor, Mapping[str, float]]]
    """``loss_fn(data, logprobs) -> (scalar, metrics)``; ``logprobs[i]`` has the shape of ``data[i]``'s targets, ``(T,)``."""


MAX_BATCH_TOKENS = 65536
"""Default of ``deployment.max_batch_tokens``: prompt and completion tokens that a trainer's samplers compute together."""


# ---- training --------------------------------------------------------------------------------------------------------


class Trainer(Protocol):
    """A model in training, in this process or on a server. Calls return immediately and run in the order they are made.

    A call that fails makes an ``optim_step`` fail with the same error, and drops the accumulated gradient, unless the caller
    has read that error before asking for the step. So an unread future cannot hide an error, and an error that was read fails
    nothing else: gradients of other calls stay. A call that fails leaves no gradient of its own.
    """

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: JsonObject | None = None
    ) -> Future[ForwardBackwardOutput]:
        """Compute logprobs, the loss's value and its metrics, without a gradient."""

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: JsonObject | None = None
    ) -> Future[ForwardBackwardOutput]:
        """Add the gradient of a loss that has a name."""

    def forward_backward_custom(self, data: Sequence[Datum], loss_fn: LossFn) -> Future[ForwardBackwardOutput]:
        """Add the gradient of any differentiable function of the logprobs; its own parameters get theirs in ``grad``."""

    def optim_step(
        self, adam_params: AdamParams, grad_accumulation_normalization: str | None = None
    ) -> Future[OptimStepOutput]:
        """Divide the accumulated gradient, clip it, update the weights, and clear it."""

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
        """Save weights, optimizer and step, to resume from.

        The manifest also holds ``facts``, JSON-compatible. ``sampler``: its weights are saved too, older ones that the caller
        still samples from. ``asynchronous``: later calls wait for a copy in host memory only, and not for the disk. With
        ``optimizer`` false, the checkpoint holds the weights only, and training cannot resume from it.
        """

    def load_state(self, checkpoint: Checkpoint | str, *, optimizer: bool = True) -> Future[None]:
        """Load what :meth:`save_state` saved; with ``optimizer`` false the weights alone."""

    def save_weights_for_sampler_ext(
        self, name: str, *, checkpoint_type: str = "base", merged: bool = False
    ) -> Future[Checkpoint]:
        """Save weights to sample from, as a Hugging Face folder: of a LoRA run the adapter, or (``merged``) the full weights.

        ``checkpoint_type="delta"``: the lossless difference from the last such checkpoint.
        """

    # A Future is invariant in its type, so a trainer could not return one of its own samplers if these named Sampler.
    def live_sampler(self, step: int) -> Future[Any]:
        """Return a sampler on the weights in training, after ``step`` steps. It raises once the weights have changed."""

    def lagging_sampler(self, step: int) -> Future[Any]:
        """Return a sampler on a copy of those weights; :meth:`save_state` can save the copy while training continues."""

    max_batch_tokens: int
    """Prompt and completion tokens that its samplers compute together."""

    def reference(self) -> Reference:
        """Return the current weights, frozen."""

    def digests(self) -> Mapping[str, str]:
        """Return digests of the model as it was loaded, by subjects of ``identity``: another model of its name differs."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""

    @property
    def step(self) -> int:
        """Finished optimizer steps, of the calls that have run."""

    @property
    def max_length(self) -> int:
        """The longest sequence that the model takes, tokens."""

    def close(self) -> None:
        """Wait for calls under way, then raise the first unread error of a failed call."""


@runtime_checkable
class CheckpointWriter(Protocol):
    """A :class:`Trainer` that writes sampler checkpoints to a disk of this machine, for a deployment in other processes."""

    seed: int

    @property
    def gpus(self) -> tuple[int, ...]:
        """Numbers of the GPUs of this machine with which the trainer computes; empty: none of this machine."""

    @property
    def model_config(self) -> ModelConfig:
        """The model as it was loaded: ``dtype`` is not ``auto``."""

    @property
    def adapted_model(self) -> str | None:
        """Name of the weights under the LoRA adapter; None if every parameter is trained."""

    def set_checkpoint_dtype(self, dtype: str) -> None:
        """Write sampler checkpoints of full weights in this element type from now on."""

    def save_adapted_weights(self, name: str) -> Future[Checkpoint]:
        """Save the weights under the adapter, without it, as full weights to sample from."""

    def delta_predecessor(self) -> Future[str | None]:
        """Return the folder of the checkpoint that the next delta would apply to; None if the next must be a base."""


class CheckpointTrainer(Trainer, CheckpointWriter, Protocol):
    """A trainer whose weights a deployment in other processes can serve."""


# ---- backends --------------------------------------------------------------------------------------------------------


class Backend(Protocol):
    """Where a model is trained: an entry of the group ``backend``. The protocols below are what else a backend can do."""

    def make_trainer(self, model: ModelConfig, *, seed: int, folder: Path) -> Trainer:
        """Return a trainer that saves its checkpoints in ``folder``.

        Raises:
            CookbookError: the model cannot be loaded.
        """


@runtime_checkable
class StartedBackend(Protocol):
    """A backend that starts processes for a run, and ends them with the run."""

    def started(self, folder: Path) -> AbstractContextManager[Backend]:
        """Return a context with the backend that makes the run's trainer. ``folder``: of the run.

        Raises:
            CookbookError: the processes cannot be started.
        """


@runtime_checkable
class OptimizerBackend(Protocol):
    """A backend with a choice of optimizers, by their names in ``backend.optimizer``. Others have AdamW."""

    optimizer: str


@runtime_checkable
class PrecisionBackend(Protocol):
    """A backend with a choice of the precision of products. Others compute exactly."""

    precision: Precision

    def torch_device(self) -> torch.device:
        """Raises ConfigError: the device is absent."""


@runtime_checkable
class PlannedBackend(OptimizerBackend, Protocol):
    """A backend that reads model files and trains on this machine, so that ``check config`` and ``plan`` can look ahead."""

    micro_batch_tokens: int
    retain_gb: float

    @property
    def recomputes(self) -> bool | None:
        """Whether the backward pass recomputes activations; None: if memory is short."""

    def torch_device(self) -> torch.device:
        """Raises ConfigError: the device is absent."""


@runtime_checkable
class EngineBackend(Protocol):
    """A backend that computes with cookbook's engine in this process. ``cookbook serve`` shares one engine among clients.

    ``threads`` is the number of CPU threads; ``shard_gb`` the size of one file of a checkpoint.
    """

    threads: int
    shard_gb: float

    def make_engine(self, model: ModelConfig, seed: int, base: SharedBase | None = None) -> Engine:
        """Load the model. An adapter on ``base`` shares the weights of ``base``.

        Raises:
            CookbookError: the model cannot be loaded.
        """

    def for_serving(self, *, trains: bool) -> Self:
        """Return the backend as a server needs it: with logprobs of every token, and without ``trains`` for sampling only."""


@runtime_checkable
class RankBackend(EngineBackend, Backend, Protocol):
    """A backend that can compute on several ranks: processes that train one model together."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks on this machine."""

    def shard_of(self, model: ModelConfig) -> str:
        """Return how the ranks hold the model: ``none`` (each holds all of it), ``node`` or ``all``."""

    def gpu_numbers(self) -> tuple[int, ...]:
        """Return the numbers of the GPUs of this machine on which the ranks compute; empty: on CPUs.

        Raises:
            ConfigError: a GPU is absent.
        """

    def rank_config(self, model: ModelConfig, seed: int) -> JsonObject:
        """Return the configuration of each rank of a group on this machine."""

    def preflight(self, model: ModelConfig, backend: Backend) -> None:
        """See :class:`Preflight`."""

    def torch_device(self) -> torch.device:
        """Raises ConfigError: the device is absent."""


@runtime_checkable
class CheckpointBackend(Protocol):
    """A backend that says whether its trainers are a :class:`CheckpointTrainer`."""

    writes_checkpoints: bool


@runtime_checkable
class Preflight(Protocol):
    """A backend, deployment, reward, tracker or hook that can refuse a run before anything loads.

    ``cookbook train`` and ``cookbook check config`` both call it.
    """

    def preflight(self, model: ModelConfig, backend: Backend) -> None:
        """Check what can be checked without weights and without the network.

        Raises:
            CookbookError: a package is missing, a device is absent, or the parts do not work together.
        """


@runtime_checkable
class LimitedDeployment(Protocol):
    """A deployment that may take shorter sequences than the model. ``max_length``: in tokens; None: the model's own."""

    max_length: int | None


@runtime_checkable
class SizedDeployment(Protocol):
    """A deployment in other processes, whose longest sequence and memory follow from the model and the data."""

    def sized(
        self,
        model: ModelConfig,
        shape: Shape | None,
        longest: int | None,
        trainer_gpus: tuple[int, ...],
        *,
        loaded: bool,
        trainer_share: float = 1.0,
    ) -> Self:
        """Return the deployment with its size.

        Args:
            shape: of the model; None if its configuration is not on this machine.
            longest: tokens of the longest sequence that is sampled; None if only the model limits it.
            trainer_gpus: numbers of the GPUs with which the trainer computes.
            loaded: whether the trainer's weights are in memory already.
            trainer_share: the trainer's weights, gradients and moments on one device, relative to those of the model.

        Raises:
            ConfigError: the deployment does not fit into the memory, or takes no sequence of that length.
        """

    @property
    def longest(self) -> int | None:
        """Tokens of the longest sequence that it takes; None before :meth:`sized`, and if it is not known here."""

    @property
    def size_text(self) -> str:
        """One line about the size, for ``check config`` and ``plan``."""


# ---- sampling --------------------------------------------------------------------------------------------------------


class Sampler(Protocol):
    """One version of the weights, to sample from. New weights need a new sampler."""

    step: int

    def sample(
        self, prompt: Prompt, num_samples: int = 1, sampling_params: SamplingParams | None = None
    ) -> Future[SampleResponse]:
        """Draw ``num_samples`` completions of ``prompt``. Calls are batched: make them all before reading the first result."""

    def compute_logprobs(self, prompt: Prompt) -> Future[list[float | None]]:
        """Compute the logprob of every token given the tokens before it, shape ``(T,)``; the first is None."""


@runtime_checkable
class LaggingSampler(Protocol):
    """A :class:`Sampler` whose weights can be saved while training continues."""

    def saving(self) -> Callable[[Path], object]:
        """Return a function that writes the weights as a checkpoint, to a folder that does not exist yet.

        Raises:
            RolloutError: the weights are gone.
        """


class DeploymentConfig(Protocol):
    """An entry of the group ``deployment``."""

    def deploy(self, trainer: Trainer, *, live: bool) -> Deployment:
        """Start the deployment. ``live``: samplers always have the newest weights; otherwise they may lag behind.

        Raises:
            ConfigError: the deployment cannot sample from the weights of this trainer.
        """


@runtime_checkable
class SeparateDeployment(Protocol):
    """A :class:`DeploymentConfig` whose deployment samples from its own copy of the weights.

    So the weights in training may be sharded over ranks.
    """

    has_own_weights: bool


class Deployment(Protocol):
    """Where samples come from."""

    def load(self, step: int) -> Future[Sampler]:
        """Serve the trainer's weights of that step, and return a sampler that answers with exactly those."""

    def close(self) -> None: ...


@runtime_checkable
class WeightSyncer(Protocol):
    """Brings the trainer's weights to the deployment."""

    def sync(self, step: int) -> Sampler: ...


class Reference(Protocol):
    """Frozen weights: those the run started from, or a teacher's."""

    def logprobs(self, data: Sequence[Datum]) -> Future[list[Array]]:
        """Compute a float32 array of shape ``(T,)`` per datum."""


class Reward(Protocol):
    """Score of one completion; higher is better. A mapping names the parts of the score, which is their sum.

    ``completion`` is the text without the end-of-turn token; ``row`` is the dataset's row as it was read, with the text of its
    answer as ``answer`` if the row has the answer in another form. If the reward raises, the run fails with an error that names
    the row.

    A reward may have other parameters: their names decide what it gets (:mod:`cookbook.sampling.rewards.signature`).
    """

    def __call__(self, completion: str, row: JsonObject) -> float | Mapping[str, float]: ...


@runtime_checkable
class ServiceReward(Protocol):
    """A reward whose calls wait for a service. They run in this process, concurrently, as the reward itself limits them."""

    def start(self, *, completion: str, row: JsonObject, trajectory: Sequence[JsonObject]) -> Callable[[], object]:
        """Start a call. The result waits for the call and returns what ``__call__`` would."""

    def close(self) -> None:
        """Cancel the calls that still run."""


@runtime_checkable
class ModelReward(Protocol):
    """A reward that a second, frozen model computes. The run loads ``model``, here or on the server at ``url``.

    It judges a group in one call. ``start`` of all groups of a step comes before the first result.
    """

    model: str
    url: str | None

    def start(
        self, *, group: Sequence[str], prompt: object, row: JsonObject, trajectory: Sequence[Sequence[JsonObject]]
    ) -> Callable[[], list[float]]:
        """Start a call. The result waits for the call and returns one number per completion."""

    def connect(self, sampler: Sampler, renderer: Renderer, *, chat: bool) -> None:
        """Use the weights of ``sampler`` for all later calls. ``chat``: the model has learned from conversations."""

    def check_held_out(self, row: JsonObject) -> None:
        """Raise ConfigError if the reward cannot score a completion of this held-out row."""


class Tracker(Protocol):
    """Destination of metrics: a file, the terminal, a service.

    ``start`` may raise ConfigError, for example if a package is missing: the run then does not start. A tracker that raises
    anything else, or later, is reported once and switched off.

    ``config`` is the resolved configuration; ``step`` the finished steps of a resumed run, 0 of a new one; ``state`` is
    ``finished``, ``interrupted`` or ``failed``.
    """

    def start(self, config: JsonObject, out: str, name: str, step: int) -> None: ...
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def end(self, state: str) -> None: ...


@runtime_checkable
class SampleTracker(Protocol):
    """A :class:`Tracker` that also takes completions."""

    def log_sample(self, step: int, sample: JsonObject) -> None:
        """Take a row of ``samples.jsonl``: prompt, completion, reward. The metrics of ``step`` are logged later."""
