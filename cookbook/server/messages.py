"""The JSON half of the wire: what clients send. Unknown fields are ignored: newer clients have more."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cookbook.server.catalogue import MAX_TTL_S
from cookbook.server.errors import Refused

Metadata = dict[str, Any] | None
Place = Annotated[int, Field(ge=0, lt=10**9)]
"""The number of a run, a sampler or a loss in its session: a part of addresses, and of names of folders."""
Word = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
"""A whole number that something computes with."""


class Message(BaseModel):
    model_config = ConfigDict(protected_namespaces=(), extra="ignore")


M = TypeVar("M", bound=Message)


def parsed(kind: type[M], body: bytes) -> M:
    """Raises Refused, 422: the body is not such a message."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise Refused(422, f"{kind.__name__}: {where}: {first['msg']}") from None


class CreateSession(Message):
    tags: list[str] = []
    user_metadata: Metadata = None
    sdk_version: str = ""
    display_name: str | None = None
    project_id: str | None = None


class Heartbeat(Message):
    session_id: str


class Finish(Message):
    reason: Any = None
    detail: str | None = None


class LoraConfig(Message):
    rank: int = Field(ge=0, le=4096)
    seed: Word | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Message):
    type: str = "adamw"


class CreateModel(Message):
    session_id: str
    model_seq_id: Place
    base_model: str
    user_metadata: Metadata = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class OfModel(Message):
    model_id: str


class Sequenced(OfModel):
    """What is checked here costs the client its number, and so its run: only what no number can do without. The rest fails the
    call, in its turn.
    """

    seq_id: int = Field(ge=1, lt=1 << 31)


class OptimStep(Sequenced):
    """``adam_params`` from plain clients, ``optimizer_params`` from those that add fields of their own."""

    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None
    grad_accumulation_normalization: str | None = None


class SaveWeights(Sequenced):
    path: str | None = None
    ttl_seconds: float | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveWeightsForSampler(Sequenced):
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: float | None = None
    user_metadata: dict[str, str] | None = None


class SaveWeightsExternal(Sequenced):
    path: str
    ttl_seconds: float | None = None
    age_encryption_recipients: list[str] | None = None


class LoadWeights(Message):
    """Into a model (``model_id``, ``seq_id``), or as a new one (``session_id``, ``model_seq_id``)."""

    model_id: str | None = None
    seq_id: int | None = Field(None, ge=1, lt=1 << 31)
    session_id: str | None = None
    model_seq_id: Place | None = None
    base_model: str | None = None
    user_metadata: Metadata = None
    path: str
    optimizer: bool = False
    optimizer_config: OptimizerConfig | None = None


class CreateSamplingSession(Message):
    session_id: str
    sampling_session_seq_id: Place
    base_model: str | None = None
    model_path: str | None = None


class OfSampler(Message):
    sampling_session_id: str


class Chunk(Message):
    type: str = "encoded_text"
    tokens: list[Word] = []


class Prompt(Message):
    chunks: list[Chunk]


class Sampling(Message):
    max_tokens: Word | None = None
    seed: Word | None = None
    stop: str | list[str | Word] | None = None
    temperature: float = 1.0
    top_k: Word = -1
    top_p: float = 1.0
    min_p: float = 0.0  # ours: Tinker's own client has no such field


class Sample(OfSampler):
    seq_id: int = Field(ge=0, lt=1 << 63)
    num_samples: int = Field(1, ge=1, le=4096)
    prompt: Prompt
    sampling_params: Sampling
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    topk_prompt_logprobs: int = Field(0, ge=0)
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = Field(0, ge=0)


class LossInput(Message):
    name: str
    rank: int = Field(ge=0, le=2)


class LossNode(Message):
    """One step of a traced loss. Arguments are as :mod:`~cookbook.server.graph_loss` decodes them."""

    op: str
    name: str
    target: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class LossGraph(Message):
    nodes: list[LossNode]


class CustomLoss(Message):
    session_id: str
    custom_loss_seq_id: Place
    name: str
    inputs: list[LossInput]
    graph: LossGraph


class Batch(OfSampler):
    """The next ``count`` samples are to be computed together."""

    count: int = Field(ge=1, le=4096)


class RetrieveFuture(Message):
    request_id: str
    allow_metadata_only: bool = False


class SamplerFeed(Message):
    sampling_session_id: str
    cloned_sampler_id: int = Field(0, ge=0)


class RetrieveFutures(Message):
    target: SamplerFeed
    prev_cursor: int = Field(0, ge=0)
    timeout: float | None = Field(None, ge=0)
    retrieved_request_ids: list[str] = []


class CancelFuture(Message):
    request_id: str


class OfPath(Message):
    tinker_path: str


class Ttl(Message):
    ttl_seconds: float | None = Field(None, gt=0, le=MAX_TTL_S)
