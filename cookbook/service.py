"""The Python API for people who write their own loop: the calls of Tinker's and Fireworks' documentation, embedded.

A program written for ``tinker`` runs with ``import cookbook as tinker``, with our types or Tinker's.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import weakref
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cookbook.backends.failures import Failures
from cookbook.backends.homes import AnySampler, Trainer
from cookbook.backends.info import ModelInfo
from cookbook.backends.local import LocalConfig
from cookbook.backends.remote.config import RemoteConfig
from cookbook.engine.linear_logprobs import HeadImpl
from cookbook.engine.model import ModelConfig
from cookbook.errors import ConfigError
from cookbook.futures import Future
from cookbook.suggest import did_you_mean
from cookbook.types import (
    AdamParams,
    Checkpoint,
    Datum,
    ForwardBackwardOutput,
    OptimStepOutput,
    SampleResponse,
    SamplingParams,
)

# Options of the tinker client (0.38) that mean nothing to a trainer in this process: taken, and not used.
OF_A_SESSION = ("user_metadata", "project_id", "display_name", "api_key", "default_headers_overrides")
OF_A_SAVE = ("ttl_seconds", "user_metadata")
OF_A_LOAD = ("weights_access_token", "user_metadata")
OF_SAMPLING = ("retry_config", "record_stability_info")
# Options of its sample calls that no trainer of ours has; their defaults are taken.
NOT_SAMPLED = ("topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n")


class _Ready:
    """Something that is already there, where Tinker hands out a future: ``.result()`` and ``await`` give it back."""

    def result(self, timeout: float | None = None) -> Self:
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        yield from ()
        return self


class _AsyncTwins:
    """``name_async(...)`` is a coroutine that calls ``name(...)``, for every public method."""

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        plain = name.removesuffix("_async")
        if name.startswith("_") or plain == name or not callable(getattr(type(self), plain, None)):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

        async def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(self, plain)(*args, **kwargs)

        return call


class SamplingClient(_Ready):
    """Samples from one version of the weights.

    Make all ``sample`` calls before reading the first result, or gather their ``_async`` twins: they are answered together.
    """

    def __init__(self, sampler: AnySampler, tokenizer: Any, base_model: str) -> None:
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._base_model = base_model
        self.step = sampler.step

    def sample(
        self,
        prompt: Any,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        **tinker_options: Any,
    ) -> Future[SampleResponse]:
        """``num_samples`` completions of ``prompt``. On request also the prompt's logprobs, as :meth:`compute_logprobs` returns
        them, and the ``topk_prompt_logprobs`` likeliest tokens at each of its places.

        Raises:
            ConfigError: another option of Tinker's that asks for more.
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

    async def sample_async(
        self,
        prompt: Any,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        **tinker_options: Any,
    ) -> SampleResponse:
        return await self.sample(
            prompt, num_samples, sampling_params, include_prompt_logprobs, topk_prompt_logprobs, **tinker_options
        )

    def compute_logprobs(self, prompt: Any) -> Future[list[float | None]]:
        """The logprob of every prompt token given those before it; the first is None."""
        return self._sampler.compute_logprobs(prompt)

    async def compute_logprobs_async(self, prompt: Any) -> list[float | None]:
        return await self.compute_logprobs(prompt)

    def get_tokenizer(self) -> Any:
        return self._tokenizer

    def get_base_model(self) -> str:
        return self._base_model


class TrainingClient(_Ready, _AsyncTwins):
    """A model in training. Calls return futures at once and run in the order they are made."""

    def __init__(self, trainer: Trainer, service: ServiceClient) -> None:
        self._trainer = trainer
        self._service = service

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, Any] | None = None
    ) -> Future[ForwardBackwardOutput]:
        """Logprobs and the loss's value; touches no gradient."""
        return self._trainer.forward(data, loss_fn, loss_fn_config)

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, Any] | None = None
    ) -> Future[ForwardBackwardOutput]:
        """Adds the gradient of a built-in loss."""
        return self._trainer.forward_backward(data, loss_fn, loss_fn_config)

    def forward_backward_custom(
        self, data: Sequence[Datum], loss_fn: Any, *, loss_type_input: str | None = None
    ) -> Future[ForwardBackwardOutput]:
        """Adds the gradient of ``loss_fn(data, logprobs) -> (scalar, metrics)``, at the price of a built-in loss.

        The gradient of the loss's own parameters, tensors with ``requires_grad`` that it closes over, is added to their
        ``grad`` when the call has succeeded. ``loss_type_input`` is Tinker's: losses read ``logprobs``.
        """
        if loss_type_input not in (None, "logprobs"):
            raise ConfigError(f"loss_type_input: losses read logprobs, got {loss_type_input!r}; leave it out")
        return self._trainer.forward_backward_custom(data, loss_fn)

    def optim_step(
        self, adam_params: AdamParams, grad_accumulation_normalization: str | None = None
    ) -> Future[OptimStepOutput]:
        """Divides the accumulated gradient as asked, clips it, steps, and clears it."""
        return self._trainer.optim_step(adam_params, grad_accumulation_normalization)

    def save_state(self, name: str, overwrite: bool = False, **tinker_options: Any) -> Future[Checkpoint]:
        """Weights, optimizer and step, to go on from. It stays until somebody deletes it."""
        _refuse_others(self.save_state, tinker_options, OF_A_SAVE)
        return self._trainer.save_state(name, overwrite=overwrite)

    def load_state(self, path: Checkpoint | str, **tinker_options: Any) -> Future[None]:
        """The weights of a checkpoint; the optimizer starts anew."""
        _refuse_others(self.load_state, tinker_options, OF_A_LOAD)
        return self._trainer.load_state(path, optimizer=False)

    def load_state_with_optimizer(self, path: Checkpoint | str, **tinker_options: Any) -> Future[None]:
        """Everything :meth:`save_state` saved."""
        _refuse_others(self.load_state_with_optimizer, tinker_options, OF_A_LOAD)
        return self._trainer.load_state(path)

    def save_weights_for_sampler(self, name: str, **tinker_options: Any) -> Future[Checkpoint]:
        """A Hugging Face folder (a PEFT adapter under LoRA) to sample from. It stays until somebody deletes it."""
        _refuse_others(self.save_weights_for_sampler, tinker_options, OF_A_SAVE)
        return self._trainer.save_weights_for_sampler_ext(name)

    def save_weights_for_sampler_ext(
        self, name: str, checkpoint_type: str = "base", *, merged: bool = False
    ) -> Future[Checkpoint]:
        """As :meth:`save_weights_for_sampler`; ``merged`` adds the adapter to its model, ``delta`` saves the difference."""
        return self._trainer.save_weights_for_sampler_ext(name, checkpoint_type=checkpoint_type, merged=merged)

    def save_weights_and_get_sampling_client(self, name: str | None = None, **tinker_options: Any) -> SamplingClient:
        """A sampling client on a copy of the current weights; also saved to disk when ``name`` is given."""
        _refuse_others(self.save_weights_and_get_sampling_client, tinker_options, OF_SAMPLING)
        if name is not None:
            self.save_weights_for_sampler(name).result()
        sampler = self._trainer.snapshot_sampler().result()
        return SamplingClient(sampler, self.get_tokenizer(), self._trainer.info().model_name)

    def create_sampling_client(self, model_path: Checkpoint | str, **tinker_options: Any) -> SamplingClient:
        """A sampling client on saved weights."""
        return self._service.create_sampling_client(model_path, **tinker_options)

    def get_tokenizer(self) -> Any:
        return self._trainer.tokenizer

    def get_info(self) -> ModelInfo:
        return self._trainer.info()

    def close(self) -> None:
        """Wait for calls under way, then raise the first unread error of a failed call."""
        self._trainer.close()


class ServiceClient(_AsyncTwins):
    """Makes training and sampling clients. A client that nobody holds any more frees its model and ends its thread.

    Args:
        base_url: of a server (``cookbook serve``, hosted Tinker); None trains in this process.
        checkpoint_dir: where ``save_state`` and ``save_weights_for_sampler`` write; of a server's checkpoints, where they are.
        backend: how the embedded trainer computes; the default suits a laptop. Or a server in more detail than ``base_url``.
        head_impl: how the embedded trainer computes log-probabilities: a name of ``backend.head_impl``, ``file.py:name``, or a
            :class:`~cookbook.protocols.TargetLogprobs` or :class:`~cookbook.protocols.FusedOutputLoss` of your own.
        tinker_options: what Tinker's client takes beside these (``user_metadata``, ...) is not used; the API key of a server
            comes from the environment.

    Raises:
        ConfigError: an option nobody knows, or ``base_url`` beside a ``backend``.
        BackendError: the server does not answer, or refuses the key.
    """

    def __init__(
        self,
        *,
        base_url: str | None = None,
        checkpoint_dir: str | Path = "checkpoints",
        backend: LocalConfig | RemoteConfig | None = None,
        head_impl: HeadImpl | None = None,
        **tinker_options: Any,
    ) -> None:
        _refuse_others(ServiceClient, tinker_options, OF_A_SESSION)
        if base_url is not None and backend is not None:
            raise ConfigError(f"base_url: give it or a backend, got both; leave base_url={base_url!r} out, or backend")
        config = (
            RemoteConfig(base_url, all_logprobs=True) if base_url is not None else backend or LocalConfig(all_logprobs=True)
        )
        if head_impl is not None:
            if isinstance(config, RemoteConfig):
                raise ConfigError("head_impl: is for the embedded trainer; set backend.head_impl where the server is started")
            config = replace(config, head_impl=head_impl)
        self._home = config.home(Path(checkpoint_dir))
        self._trainers: weakref.WeakValueDictionary[int, Trainer] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()  # the trainers', in the order of making
        self._unread: set[Failures] = set()

    def create_training_client(
        self, base_model: str, lora_rank: int = 0, *, seed: int = 0, **model_options: Any
    ) -> TrainingClient:
        """A model to train: every parameter with ``lora_rank`` 0, else a LoRA adapter of that rank.

        ``base_model`` is a hub id, a local folder, or ``tiny``, the model that ships with cookbook. ``model_options`` are
        fields of :class:`cookbook.engine.model.ModelConfig`, such as ``dtype``. ``lora_target_modules`` lists the layers that
        get an adapter; by default every linear layer but the output one.
        """
        of_the_model = {field.name for field in fields(ModelConfig)} - {"name"}
        _refuse_others(self.create_training_client, model_options, sorted(of_the_model))
        config = self._home.model(base_model, {"lora_rank": lora_rank, **model_options})
        return TrainingClient(self._trainer(config, seed), self)

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = False,
        **tinker_options: Any,
    ) -> TrainingClient:
        """A LoRA adapter of ``rank`` on every linear layer of attention and MLP; rank 0 trains every parameter.

        The output layer (unembedding) gets none, where Tinker trains it too: many models tie it to the input embedding.
        Embeddings, norms and experts that are no linear layers stay as they are. ``seed`` None is 0.

        Raises:
            ConfigError: another choice of layers: ``create_training_client`` takes them by name.
        """
        _refuse_others(self.create_lora_training_client, tinker_options, ("user_metadata", "optimizer"))
        _check_optimizer(tinker_options)
        chosen = {"train_mlp": (train_mlp, True), "train_attn": (train_attn, True), "train_unembed": (train_unembed, False)}
        for name, (value, offered) in chosen.items():
            if value != offered:
                raise ConfigError(
                    f"{name}: adapters lie on attention and MLP together and not on the output layer, got {value}; name the "
                    f"layers instead: create_training_client({base_model!r}, {rank}, lora_target_modules=['q_proj', ...])"
                )
        return self.create_training_client(base_model, rank, seed=seed or 0)

    def create_training_client_from_state(self, path: Checkpoint | str, **tinker_options: Any) -> TrainingClient:
        """A client that starts from saved weights, with a fresh optimizer."""
        _refuse_others(self.create_training_client_from_state, tinker_options, (*OF_A_LOAD, "optimizer"))
        _check_optimizer(tinker_options)
        return self._from_state(path, optimizer=False)

    def create_training_client_from_state_with_optimizer(self, path: Checkpoint | str, **tinker_options: Any) -> TrainingClient:
        """A client that goes on where :meth:`TrainingClient.save_state` stood."""
        _refuse_others(self.create_training_client_from_state_with_optimizer, tinker_options, OF_A_LOAD)
        return self._from_state(path, optimizer=True)

    def create_sampling_client(
        self, model_path: Checkpoint | str | None = None, base_model: str | None = None, **tinker_options: Any
    ) -> SamplingClient:
        """A sampling client on saved weights, or on a model as it is."""
        _refuse_others(self.create_sampling_client, tinker_options, OF_SAMPLING)
        if (model_path is None) == (base_model is None):
            raise ConfigError("create_sampling_client: pass either model_path or base_model")
        model = self._home.model(str(base_model), {}) if model_path is None else self._home.saved_model(model_path)
        trainer = self._trainer(model)
        return SamplingClient(self._home.sampler(trainer, model_path), trainer.tokenizer, model.name)

    def get_server_capabilities(self) -> Any:
        """The models that can be trained: those of the server; in this process the shipped one and those in use."""
        return self._home.capabilities()

    def create_rest_client(self) -> Any:
        """Tinker's client for checkpoints, runs and sessions of a server; in this process it knows checkpoints only."""
        return self._home.rest_client()

    def close(self) -> None:
        """Closes every client. Raises the error of a failed call that nobody has read, also of a client that is gone."""
        with contextlib.ExitStack() as stack:  # one client's error does not keep the others open
            stack.callback(self._tell_unread)
            stack.callback(self._home.close)
            for trainer in self._trainers.values():
                stack.callback(trainer.close)

    def _tell_unread(self) -> None:
        for failures in list(self._unread):
            failures.raise_unread()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _from_state(self, path: Checkpoint | str, *, optimizer: bool) -> TrainingClient:
        trainer = self._trainer(self._home.saved_model(path), 0)
        trainer.load_state(path, optimizer=optimizer).result()
        return TrainingClient(trainer, self)

    def _trainer(self, model: ModelConfig, seed: int | None = None) -> Trainer:
        """``seed`` None is one of its own: two samplers of the same weights are to draw differently."""
        number = next(self._numbers)
        seed = number if seed is None else seed
        trainer = self._home.trainer(model, seed, self._unread)
        self._trainers[number] = trainer
        return trainer


def _refuse_others(call: Callable[..., Any], options: Mapping[str, Any], taken: Sequence[str]) -> None:
    """Refuses the options that ``call`` neither has nor takes for Tinker's sake: a typo must not leave a default in force."""
    for name in options:
        if name not in taken:
            known = [*(own for own in inspect.signature(call).parameters if not own.endswith("_options")), *taken]
            hint = did_you_mean(name, known)
            raise ConfigError(f"{call.__name__}: unknown option {name!r}.{hint} (there are {', '.join(known)})")


def _check_optimizer(tinker_options: Mapping[str, Any]) -> None:
    """Raises ConfigError for an optimizer that is not AdamW, the only one here."""
    optimizer = tinker_options.get("optimizer")
    if optimizer is not None and getattr(optimizer, "type", None) != "adamw":
        raise ConfigError(f"optimizer: this trainer has AdamW only, got {optimizer!r}; leave optimizer out")
