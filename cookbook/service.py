"""Python API for users who write their own loop: the calls of Tinker's and Fireworks' documentation, embedded.

A program written for ``tinker`` runs with ``import cookbook as tinker``, with cookbook's types or Tinker's.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from cookbook.backends.client_factory import ClientBackend, ClientTrainer, HeadBackend, ModelInfo, PromptSampler
from cookbook.backends.local import LocalConfig
from cookbook.backends.remote.config import RemoteConfig
from cookbook.engine.head.linear_logprobs import HeadImpl
from cookbook.engine.loss_gradient import LossFunction
from cookbook.engine.model import ModelConfig
from cookbook.errors import ConfigError
from cookbook.futures import Failures, Future
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
from cookbook.utils.suggest import did_you_mean
from cookbook.utils.words import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

P = ParamSpec("P")
T = TypeVar("T")

# Options of the tinker client (0.38) that have no meaning for a trainer in this process: accepted, and ignored.
OF_A_SESSION = ("user_metadata", "project_id", "display_name", "api_key", "default_headers_overrides")
OF_A_SAVE = ("ttl_seconds", "user_metadata")
OF_A_LOAD = ("weights_access_token", "user_metadata")
OF_SAMPLING = ("retry_config", "record_stability_info")
# Options of Tinker's sample calls that cookbook does not have; only their defaults are accepted.
NOT_SAMPLED = ("topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n")


class _Ready:
    """A finished object, where Tinker returns a future: ``.result()`` and ``await`` return the object itself."""

    def result(self, timeout: float | None = None) -> Self:
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        yield from ()
        return self


def _awaited(call: Callable[P, Future[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return a coroutine function that makes the call and awaits its result."""

    @functools.wraps(call)
    async def twin(*args: P.args, **kwargs: P.kwargs) -> T:
        return await call(*args, **kwargs)

    return twin


class _AsyncTwins:
    """``name_async(...)`` is a coroutine that calls ``name(...)``, for every public method."""

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        plain = name.removesuffix("_async")
        if name.startswith("_") or plain == name or not callable(getattr(type(self), plain, None)):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

        async def call(*args: object, **kwargs: object) -> object:
            return getattr(self, plain)(*args, **kwargs)

        return call


class SamplingClient(_Ready):
    """Samples from one version of the weights.

    Make all ``sample`` calls before reading the first result, or gather their ``_async`` twins: they are answered together.
    """

    def __init__(self, sampler: PromptSampler, tokenizer: PreTrainedTokenizerBase, base_model: str) -> None:
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._base_model = base_model
        self.step = sampler.step

    def __repr__(self) -> str:
        trained = f", {counted(self.step, 'step')}" if self.step else ""
        return f"<SamplingClient: {self._base_model}{trained}>"

    def sample(
        self,
        prompt: Prompt,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        **tinker_options: object,
    ) -> Future[SampleResponse]:
        """Draw ``num_samples`` completions of ``prompt``.

        With ``include_prompt_logprobs`` the result also has the prompt's logprobs, as :meth:`compute_logprobs` returns them,
        and with ``topk_prompt_logprobs`` the most likely tokens at each prompt position.

        Raises:
            ConfigError: another option of Tinker's is set.
        """
        _refuse_others(self.sample, tinker_options, NOT_SAMPLED)
        for name, value in tinker_options.items():
            if value is not None and value != 0:
                raise ConfigError(f"sample: {name} is not offered, got {value!r}; leave it out")
        return self._sampler.sample(
            prompt,
            num_samples,
            sampling_params,
            include_prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
        )

    def compute_logprobs(self, prompt: Prompt) -> Future[list[float | None]]:
        """Compute the logprob of every prompt token given the tokens before it; the first is None."""
        return self._sampler.compute_logprobs(prompt)

    sample_async = _awaited(sample)
    compute_logprobs_async = _awaited(compute_logprobs)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    def get_base_model(self) -> str:
        return self._base_model


class TrainingClient(_Ready, _AsyncTwins):
    """A model in training. Calls return futures immediately and run in the order they are made."""

    def __init__(self, trainer: ClientTrainer, service: ServiceClient) -> None:
        self._trainer = trainer
        self._service = service

    def __repr__(self) -> str:
        info = self._trainer.info()
        trained = f"a LoRA adapter of rank {info.lora_rank}" if info.is_lora else "every parameter"
        return f"<TrainingClient: {info.model_name}, trains {trained}, {counted(self._trainer.step, 'step')}>"

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: JsonObject | None = None
    ) -> Future[ForwardBackwardOutput]:
        """Compute logprobs and the loss's value, without a gradient."""
        return self._trainer.forward(data, loss_fn, loss_fn_config)

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: JsonObject | None = None
    ) -> Future[ForwardBackwardOutput]:
        """Add the gradient of a built-in loss."""
        return self._trainer.forward_backward(data, loss_fn, loss_fn_config)

    def forward_backward_custom(
        self, data: Sequence[Datum], loss_fn: LossFunction, *, loss_type_input: str | None = None
    ) -> Future[ForwardBackwardOutput]:
        """Add the gradient of ``loss_fn(data, logprobs) -> (scalar, metrics)``, at the cost of a built-in loss.

        The gradient of the loss's own parameters, tensors with ``requires_grad`` that it closes over, is added to their
        ``grad`` when the call has succeeded. ``loss_type_input`` is Tinker's: losses read ``logprobs``.
        """
        if loss_type_input not in (None, "logprobs"):
            raise ConfigError(f"loss_type_input: losses read logprobs, got {loss_type_input!r}; leave it out")
        return self._trainer.forward_backward_custom(data, loss_fn)

    def optim_step(
        self, adam_params: AdamParams, grad_accumulation_normalization: str | None = None
    ) -> Future[OptimStepOutput]:
        """Divide the accumulated gradient by the normalization, clip it, update the weights, and clear it."""
        return self._trainer.optim_step(adam_params, grad_accumulation_normalization)

    def save_state(self, name: str, overwrite: bool = False, **tinker_options: object) -> Future[Checkpoint]:
        """Save weights, optimizer and step, to resume from. The checkpoint is never deleted."""
        _refuse_others(self.save_state, tinker_options, OF_A_SAVE)
        return self._trainer.save_state(name, overwrite=overwrite)

    def load_state(self, path: Checkpoint | str, **tinker_options: object) -> Future[None]:
        """Load the weights of a checkpoint, with a new optimizer."""
        _refuse_others(self.load_state, tinker_options, OF_A_LOAD)
        return self._trainer.load_state(path, optimizer=False)

    def load_state_with_optimizer(self, path: Checkpoint | str, **tinker_options: object) -> Future[None]:
        """Load everything that :meth:`save_state` saved."""
        _refuse_others(self.load_state_with_optimizer, tinker_options, OF_A_LOAD)
        return self._trainer.load_state(path)

    def save_weights_for_sampler(self, name: str, **tinker_options: object) -> Future[Checkpoint]:
        """Save weights to sample from, as a Hugging Face folder or under LoRA as a PEFT adapter. They are never deleted."""
        _refuse_others(self.save_weights_for_sampler, tinker_options, OF_A_SAVE)
        return self._trainer.save_weights_for_sampler_ext(name)

    def save_weights_for_sampler_ext(
        self, name: str, checkpoint_type: str = "base", *, merged: bool = False
    ) -> Future[Checkpoint]:
        """Save weights to sample from. ``delta``: their difference from the last; ``merged``: with the adapter merged."""
        return self._trainer.save_weights_for_sampler_ext(name, checkpoint_type=checkpoint_type, merged=merged)

    def save_weights_and_get_sampling_client(self, name: str | None = None, **tinker_options: object) -> SamplingClient:
        """Return a sampling client on a copy of the current weights, which are also saved to disk if ``name`` is given."""
        _refuse_others(self.save_weights_and_get_sampling_client, tinker_options, OF_SAMPLING)
        if name is not None:
            self.save_weights_for_sampler(name).result()
        sampler = self._trainer.snapshot_sampler().result()
        return SamplingClient(sampler, self.get_tokenizer(), self._trainer.info().model_name)

    def create_sampling_client(self, model_path: Checkpoint | str, **tinker_options: Any) -> SamplingClient:
        """Return a sampling client on saved weights."""
        return self._service.create_sampling_client(model_path, **tinker_options)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        return self._trainer.tokenizer

    def get_info(self) -> ModelInfo:
        return self._trainer.info()

    def close(self) -> None:
        """Wait for calls under way, then raise the first unread error of a failed call."""
        self._trainer.close()


class ServiceClient(_AsyncTwins):
    """Makes training and sampling clients. When a client is garbage-collected, its model is freed and its thread ends.

    Args:
        base_url: of a server (``cookbook serve``, hosted Tinker); None trains in this process.
        checkpoint_dir: where ``save_state`` and ``save_weights_for_sampler`` write; of a server's checkpoints, where they are.
        backend: how the embedded trainer computes; the default suits a laptop. Or a server in more detail than ``base_url``.
        head_impl: how the embedded trainer computes log-probabilities: a name of ``backend.head_impl``, ``file.py:name``, or a
            :class:`~cookbook.TargetLogprobs` or :class:`~cookbook.FusedOutputLoss` of your own.
        tinker_options: further options of Tinker's client (``user_metadata``, ...), which are ignored; the API key of a server
            comes from the environment.

    Raises:
        ConfigError: an option is unknown, or ``base_url`` and ``backend`` are both given.
        BackendError: the server does not answer, or refuses the key.
    """

    def __init__(
        self,
        *,
        base_url: str | None = None,
        checkpoint_dir: str | Path = "checkpoints",
        backend: ClientBackend | None = None,
        head_impl: HeadImpl | None = None,
        **tinker_options: object,
    ) -> None:
        _refuse_others(ServiceClient, tinker_options, OF_A_SESSION)
        if base_url is not None and backend is not None:
            raise ConfigError(f"base_url: got a backend as well; leave base_url={base_url!r} out, or backend")
        chosen = RemoteConfig(base_url, all_logprobs=True) if base_url is not None else backend
        config: ClientBackend = chosen or LocalConfig(all_logprobs=True)
        if not isinstance(config, ClientBackend):
            raise ConfigError(f"backend: {type(config).__name__} has no method `clients`; use LocalConfig()")
        if head_impl is not None:
            if not isinstance(config, HeadBackend):
                raise ConfigError("head_impl: is for the embedded trainer; set backend.head_impl where the server is started")
            config = replace(config, head_impl=head_impl)  # type: ignore[type-var]
        self._where = f"the server at {config.base_url}" if isinstance(config, RemoteConfig) else "this process"
        self._clients = config.clients(Path(checkpoint_dir))
        self._trainers: weakref.WeakValueDictionary[int, ClientTrainer] = weakref.WeakValueDictionary()
        # Numbers of the trainers, in the order of their creation.
        self._numbers = itertools.count()
        self._unread: set[Failures] = set()

    def __repr__(self) -> str:
        return f"<ServiceClient: trains in {self._where}, {counted(len(self._trainers), 'model')} in use>"

    def create_training_client(
        self, base_model: str, lora_rank: int = 0, *, seed: int = 0, **model_options: Any
    ) -> TrainingClient:
        """Return a client that trains a model: every parameter with ``lora_rank`` 0, else a LoRA adapter of that rank.

        ``base_model`` is a hub id, a local folder, or ``tiny``, the model that ships with cookbook. ``model_options`` are
        fields of :class:`cookbook.engine.model.ModelConfig`, such as ``dtype``. ``lora_target_modules`` lists the layers that
        get an adapter; by default every linear layer but the output one.
        """
        of_the_model = {field.name for field in fields(ModelConfig)} - {"name"}
        _refuse_others(self.create_training_client, model_options, sorted(of_the_model))
        config = self._clients.model(base_model, {"lora_rank": lora_rank, **model_options})
        return TrainingClient(self._trainer(config, seed), self)

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = False,
        **tinker_options: object,
    ) -> TrainingClient:
        """Return a client that trains a LoRA adapter of ``rank`` on every linear layer of attention and MLP.

        Rank 0 trains every parameter. The output layer (unembedding) gets no adapter, unlike Tinker's: many models tie that
        layer to the input embedding.
        Embeddings, norms and experts that are not linear layers stay unchanged. ``seed`` None is 0.

        Raises:
            ConfigError: the choice of layers differs; ``create_training_client`` takes layers by name.
        """
        _refuse_others(self.create_lora_training_client, tinker_options, ("user_metadata", "optimizer"))
        chosen = {"train_mlp": (train_mlp, True), "train_attn": (train_attn, True), "train_unembed": (train_unembed, False)}
        for name, (value, offered) in chosen.items():
            if value != offered:
                raise ConfigError(
                    f"{name}: adapters lie on attention and MLP together and not on the output layer, got {value}; name the "
                    f"layers instead: create_training_client({base_model!r}, {rank}, lora_target_modules=['q_proj', ...])"
                )
        return self.create_training_client(base_model, rank, seed=seed or 0)

    def create_training_client_from_state(self, path: Checkpoint | str, **tinker_options: object) -> TrainingClient:
        """Return a client that starts from saved weights, with a new optimizer."""
        _refuse_others(self.create_training_client_from_state, tinker_options, (*OF_A_LOAD, "optimizer"))
        return self._from_state(path, optimizer=False)

    def create_training_client_from_state_with_optimizer(
        self, path: Checkpoint | str, **tinker_options: object
    ) -> TrainingClient:
        """Return a client that resumes from a checkpoint of :meth:`TrainingClient.save_state`."""
        _refuse_others(self.create_training_client_from_state_with_optimizer, tinker_options, OF_A_LOAD)
        return self._from_state(path, optimizer=True)

    def create_sampling_client(
        self, model_path: Checkpoint | str | None = None, base_model: str | None = None, **tinker_options: object
    ) -> SamplingClient:
        """Return a sampling client on saved weights, or on a base model."""
        _refuse_others(self.create_sampling_client, tinker_options, OF_SAMPLING)
        if (model_path is None) == (base_model is None):
            raise ConfigError("create_sampling_client: pass either model_path or base_model")
        model = self._clients.model(str(base_model), {}) if model_path is None else self._clients.saved_model(model_path)
        trainer = self._trainer(model)
        return SamplingClient(self._clients.sampler(trainer, model_path), trainer.tokenizer, model.name)

    def get_server_capabilities(self) -> Any:
        """Return the models that can be trained: those of the server, or in this process the shipped model and those in use."""
        return self._clients.capabilities()

    def create_rest_client(self) -> Any:
        """Return Tinker's client for checkpoints, runs and sessions of a server; in this process for checkpoints only."""
        return self._clients.rest_client()

    def close(self) -> None:
        """Close every client, then raise the first unread error of a failed call, also of a client that has been freed."""
        # An error of one client does not keep the others open.
        with contextlib.ExitStack() as stack:
            stack.callback(self._raise_unread)
            stack.callback(self._clients.close)
            for trainer in self._trainers.values():
                stack.callback(trainer.close)

    def _raise_unread(self) -> None:
        for failures in list(self._unread):
            failures.raise_unread()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _from_state(self, path: Checkpoint | str, *, optimizer: bool) -> TrainingClient:
        trainer = self._trainer(self._clients.saved_model(path), 0)
        trainer.load_state(path, optimizer=optimizer).result()
        return TrainingClient(trainer, self)

    def _trainer(self, model: ModelConfig, seed: int | None = None) -> ClientTrainer:
        """``seed`` None: a new seed for each trainer, so that two samplers of the same weights draw differently."""
        number = next(self._numbers)
        seed = number if seed is None else seed
        trainer = self._clients.trainer(model, seed, self._unread)
        self._trainers[number] = trainer
        return trainer


def _refuse_others(call: Callable[..., object], options: Mapping[str, object], taken: Sequence[str]) -> None:
    """Raise ConfigError if ``call`` neither has nor ignores an option, or if the option ``optimizer`` is not AdamW.

    A typo must not select a default.
    """
    for name in options:
        if name not in taken:
            known = [*(own for own in inspect.signature(call).parameters if not own.endswith("_options")), *taken]
            hint = did_you_mean(name, known)
            raise ConfigError(f"{call.__name__}: unknown option {name!r}.{hint} (there are {', '.join(known)})")
    optimizer = options.get("optimizer")
    if optimizer is not None and getattr(optimizer, "type", None) != "adamw":
        raise ConfigError(f"optimizer: this trainer has AdamW only, got {optimizer!r}; leave optimizer out")
