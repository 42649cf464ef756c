"""Interfaces between :class:`~cookbook.service.ServiceClient` and the backends that it can use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from cookbook.engine.model import ModelConfig
from cookbook.futures import Failures, Future
from cookbook.protocols import Sampler, Trainer
from cookbook.types import Checkpoint, JsonObject, Prompt, SampleResponse, SamplingParams

if TYPE_CHECKING:
    from cookbook.engine.head.linear_logprobs import HeadImpl


@dataclass(frozen=True)
class ModelData:
    """Architecture of a model, as named in its Hugging Face config, and the sources of its weights and tokenizer."""

    arch: str
    model_name: str
    tokenizer_id: str


@dataclass(frozen=True)
class ModelInfo:
    """Description of a model in training, with Tinker's fields. ``num_parameters`` is 0 if a server does not state it."""

    model_data: ModelData
    model_name: str
    lora_rank: int
    is_lora: bool
    num_parameters: int
    max_context_length: int


class PromptSampler(Sampler, Protocol):
    """A sampler that also returns logprobs of the prompt."""

    def sample(
        self,
        prompt: Prompt,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
        *,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> Future[SampleResponse]:
        """Draw completions. ``topk_prompt_logprobs``: number of most likely tokens to return for each prompt position."""


class ClientTrainer(Trainer, Protocol):
    """A trainer behind a :class:`~cookbook.service.TrainingClient`."""

    def info(self) -> ModelInfo: ...

    def snapshot_sampler(self) -> Future[Any]:
        """Return a :class:`PromptSampler` on a copy of the weights at this call's turn."""


class ClientFactory(Protocol):
    """Factory for the training and sampling clients of one backend."""

    def model(self, name: str, options: JsonObject) -> ModelConfig:
        """Return the configuration of a model. Fields that are not in ``options`` default to those of the backend."""

    def saved_model(self, checkpoint: Checkpoint | str) -> ModelConfig:
        """Return the configuration of saved weights.

        Raises:
            CheckpointError: the checkpoint is missing or damaged.
        """

    def trainer(self, model: ModelConfig, seed: int, unread: set[Failures]) -> ClientTrainer:
        """Return a trainer, whose :class:`Failures` are in ``unread`` while the caller has not read an error."""

    def sampler(self, trainer: ClientTrainer, checkpoint: Checkpoint | str | None) -> PromptSampler:
        """Return a sampler on a checkpoint; None: on the initial weights of ``trainer``."""

    def capabilities(self) -> Any:
        """Return the available models, with the fields of :class:`~cookbook.types.GetServerCapabilitiesResponse`."""

    def rest_client(self) -> Any:
        """Return a client that lists and manages checkpoints: ``tinker.RestClient``, or an object with its methods."""

    def close(self) -> None: ...


@runtime_checkable
class ClientBackend(Protocol):
    """A backend that a :class:`~cookbook.service.ServiceClient` can use."""

    def clients(self, folder: Path) -> ClientFactory:
        """Return the factory of clients. Checkpoints are written to ``folder``."""


@runtime_checkable
class HeadBackend(Protocol):
    """A backend (a dataclass) with a selectable implementation of the output layer's log-probabilities."""

    head_impl: HeadImpl


def checkpoint_path(checkpoint: Checkpoint | str) -> str:
    """Return the path of a checkpoint: a folder, or ``tinker://...`` on a server."""
    return str(checkpoint.path if isinstance(checkpoint, Checkpoint) else checkpoint)
