"""What the rooms promise each other. Everything a recipe touches is one of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from cookbook.types import (
    AdamParams,
    Checkpoint,
    Datum,
    ForwardBackwardOutput,
    OptimStepOutput,
    SampleResponse,
    SamplingParams,
)

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from cookbook.engine.model import ModelConfig
    from cookbook.futures import Future

    TargetScores = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
    """Log-probabilities, or ``(logprobs, entropy, hit)``: see :class:`TargetLogprobs`."""

    LossFn = Callable[[Sequence[Datum], list[torch.Tensor]], tuple[torch.Tensor, Mapping[str, float]]]
    """``loss_fn(data, logprobs) -> (scalar, metrics)``; ``logprobs[i]`` has the shape of ``data[i]``'s targets, ``(T,)``."""


class TrainingClient(Protocol):
    """A model in training, here or elsewhere. Calls return at once and run in the order they are made.

    A call that fails makes an ``optim_step`` fail with the same error, and drops the accumulated gradient, unless the caller
    has read that error before asking for the step. So an unread future cannot hide an error, and an error that was read fails
    nothing else: gradients of other calls stay. A call that fails leaves no gradient of its own.
    """

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, Any] | None = None
    ) -> Future[ForwardBackwardOutput]:
        """Logprobs and the loss's value and metrics; touches no gradient."""
        ...

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, Any] | None = None
    ) -> Future[ForwardBackwardOutput]:
        """Adds the gradient of a loss known by name."""
        ...

    def forward_backward_custom(self, data: Sequence[Datum], loss_fn: LossFn) -> Future[ForwardBackwardOutput]:
        """Add the gradient of any differentiable function of the logprobs, and to its own parameters' ``grad`` theirs."""
        ...

    def optim_step(
        self, adam_params: AdamParams, grad_accumulation_normalization: str | None = None
    ) -> Future[OptimStepOutput]:
        """Divides the accumulated gradient, clips it, steps, and clears it."""
        ...

    def save_state(
        self,
        name: str,
        *,
        overwrite: bool = False,
        facts: Mapping[str, Any] | None = None,
        sampler: Sampler | None = None,
        asynchronous: bool = False,
    ) -> Future[Checkpoint]:
        """Weights, optimizer and step, to go on from.

        ``facts`` are kept beside them, as JSON; ``sampler``'s weights too: older ones, which the caller still samples from.
        ``asynchronous``: later calls wait for a copy in host memory only, and not for the disk.
        """
        ...

    def load_state(self, checkpoint: Checkpoint | str, *, optimizer: bool = True) -> Future[None]:
        """The inverse of :meth:`save_state`."""
        ...

    def save_weights_for_sampler_ext(
        self, name: str, *, checkpoint_type: str = "base", merged: bool = False
    ) -> Future[Checkpoint]:
        """Weights to sample from, as a Hugging Face folder: under LoRA the adapter, or (``merged``) its sum with the rest.

        ``checkpoint_type="delta"``: the lossless difference from the last such checkpoint.
        """
        ...

    def live_sampler(self, step: int) -> Future[Any]:
        """A sampler on the weights in training, after ``step`` steps. It refuses to answer once they have moved on."""
        ...

    def lagging_sampler(self, step: int) -> Future[Any]:
        """A sampler on a copy of those weights; :meth:`save_state` can save it while training goes on."""
        ...

    max_batch_tokens: int
    """Prompt and completion tokens that its samplers work on at once."""

    def reference(self) -> Reference:
        """The weights as they are now, frozen."""
        ...

    def digests(self) -> Mapping[str, str]:
        """What tells the model, as it was loaded, from another one of the same name, by subjects of ``identity``."""
        ...

    @property
    def tokenizer(self) -> Any:
        """A Hugging Face tokenizer."""
        ...

    @property
    def step(self) -> int:
        """Finished optimizer steps, of the calls that have had their turn."""
        ...

    @property
    def max_length(self) -> int:
        """The longest sequence the model takes, tokens."""
        ...

    def close(self) -> None:
        """Wait for calls under way, then raise the first unread error of a failed call."""
        ...


class Backend(Protocol):
    """Where a model is trained: what an entry of the group ``backend`` is."""

    def make_trainer(self, model: ModelConfig, *, seed: int, folder: Path) -> TrainingClient:
        """``folder`` is where checkpoints go.

        Raises:
            CookbookError: the model cannot be had.
        """
        ...


@runtime_checkable
class Preflight(Protocol):
    """A backend, deployment, tracker or hook that can refuse a run before anything loads.

    ``cookbook train`` and ``cookbook check config`` both call it.
    """

    def preflight(self, model: ModelConfig, backend: Backend) -> None:
        """Check what is known without weights and without the network.

        Raises:
            CookbookError: a package is missing, a device is absent, or the parts do not work together.
        """
        ...


class TargetLogprobs(Protocol):
    """The output layer of a language model as a function: from hidden states to the log-probabilities of given tokens.

    With ``N`` tokens, hidden size ``H`` and vocabulary ``V``: ``log softmax(z / temperature)`` at ``targets``, where ``z`` is
    ``scale * (hidden weight^T + bias)``, or with a soft cap ``c``, ``c * tanh(scale * (hidden weight^T + bias) / c)``.
    """

    def __call__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        scale: float,
        softcap: float | None,
        temperature: torch.Tensor | None,
    ) -> TargetScores | None:
        """Return the log-probabilities, in the shape of ``targets``, or ``(logprobs, entropy, hit)``.

        ``hidden`` ``(N, H)`` and ``weight`` ``(V, H)``, of one dtype; ``bias`` ``(V,)``; ``targets`` ``(N,)`` or ``(N, K)``
        int64, in ``[0, V)``; ``temperature`` ``(N,)`` positive, None is 1. N may be 0.

        ``logprobs``: float32, float64 if ``weight`` is; differentiable by those of ``hidden``, ``weight`` and ``bias`` that
        require a gradient. ``entropy`` ``(N,)``: nats, floating point. ``hit`` ``(N,)``: bool, whether no token is likelier
        than the (first) target. The trainer computes an entropy or a hit that is None itself, with a second pass over the
        output layer; it needs them for metrics alone.

        None: these arguments are not supported, and the trainer computes the log-probabilities itself, with one warning.
        """
        ...


@runtime_checkable
class FusedOutputLoss(Protocol):
    """An output layer that is fused with its loss. A class of this kind is constructed with the output layer alone.

    The embedded trainer calls ``target_logprobs`` only; other trainers (``transformers.Trainer``) call the object itself.
    """

    def __call__(self, hidden_states: Any, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss, a scalar with its graph; ``labels`` ``(B, T)``, not shifted, -100 at tokens to ignore."""
        ...

    def forward_logits(self, hidden_states: Any) -> torch.Tensor:
        """Return the logits ``(B, T, V)``, for inference."""
        ...

    def target_logprobs(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        scale: float,
        softcap: float | None,
        temperature: torch.Tensor | None,
    ) -> TargetScores | None:
        """Arguments and result of :class:`TargetLogprobs`."""
        ...


class Sampler(Protocol):
    """One version of the weights, to sample from. New weights, new sampler."""

    step: int

    def sample(
        self, prompt: Any, num_samples: int = 1, sampling_params: SamplingParams | None = None
    ) -> Future[SampleResponse]:
        """``num_samples`` completions of ``prompt``. Calls are batched: make them all before reading the first result."""
        ...

    def compute_logprobs(self, prompt: Any) -> Future[list[float | None]]:
        """The logprob of every token given those before it, shape ``(T,)``; the first is None."""
        ...


@runtime_checkable
class LaggingSampler(Protocol):
    """A :class:`Sampler` whose weights can be saved while training goes on."""

    def saving(self) -> Callable[[Path], object]:
        """What writes them as a checkpoint to a folder that is not there yet.

        Raises:
            RolloutError: they are gone.
        """
        ...


class DeploymentConfig(Protocol):
    """What an entry of the group ``deployment`` is."""

    def deploy(self, trainer: TrainingClient, *, live: bool) -> Deployment:
        """``live``: samplers are always of the newest weights; otherwise they may lag behind.

        Raises:
            ConfigError: the trainer is not one whose weights it can sample from.
        """
        ...


class Deployment(Protocol):
    """Where samples come from."""

    def load(self, step: int) -> Future[Sampler]:
        """Puts the trainer's weights of that step into service; the sampler answers with exactly those."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class WeightSyncer(Protocol):
    """Owns what it takes for the deployment to hold the trainer's weights."""

    def sync(self, step: int) -> Sampler: ...


class Reference(Protocol):
    """The weights the run started from, frozen."""

    def logprobs(self, data: Sequence[Datum]) -> Future[list[Any]]:
        """Per datum a float32 array of shape ``(T,)``."""
        ...


class Reward(Protocol):
    """Judges one completion.

    ``completion`` is the text without the end-of-turn token; ``row`` is the dataset's row as it was read, with its answer's
    text as ``answer`` where it has one in another form. Returns a number; higher is better. It may raise: the run then fails,
    naming the row.
    """

    def __call__(self, completion: str, row: Mapping[str, Any]) -> float: ...


class Tracker(Protocol):
    """Takes metrics somewhere people look.

    ``start`` may raise ConfigError, for example for a missing package: the run then does not start. A tracker that raises
    anything else, or later, is reported once and switched off.

    ``config`` is the resolved configuration; ``step`` the finished steps of a run that goes on, 0 of a new one; ``state`` is
    ``finished``, ``interrupted`` or ``failed``.
    """

    def start(self, config: Mapping[str, Any], out: str, name: str, step: int) -> None: ...
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def end(self, state: str) -> None: ...


@runtime_checkable
class SampleTracker(Protocol):
    """A :class:`Tracker` that also takes completions."""

    def log_sample(self, step: int, sample: Mapping[str, Any]) -> None:
        """Take a row of ``samples.jsonl``: prompt, completion, reward. The metrics of ``step`` are logged later."""
        ...
