"""JSON bodies of requests, and the error of a refused request. Unknown fields are ignored: newer clients may send more."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from cookbook.errors import ConfigError, CookbookError

# A century. Without a limit, the expiry could be later than the last date that datetime supports.
MAX_TTL_S = 100 * 365 * 86400.0
# Parts of one prompt.
MAX_CHUNKS = 4096
# Earlier versions of the package tinker send JSON in place of protobuf.
OLDEST_CLIENT = (0, 25)
UPDATE_HINT = "update the client: pip install --upgrade 'tinker>=0.38'"
# Bytes of user metadata as JSON in ASCII. Metadata is kept for as long as its object.
MAX_METADATA_BYTES = 64 << 10
# Number of a run, a sampler or a loss within its session. It becomes part of addresses and folder names.
Index = Annotated[int, Field(ge=0, lt=10**9)]
# An integer that torch or numpy can hold.
Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
# Length of one dimension of an array.
Size = Annotated[int, Field(ge=0, lt=1 << 31)]
# Lists end at their first error: pydantic would make an object for the error of each item.
Ints = Annotated[list[Int64], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


def check_metadata(metadata: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return user metadata. Raises ValueError: it has too many bytes."""
    num_bytes = 0 if metadata is None else len(json.dumps(metadata))
    if num_bytes > MAX_METADATA_BYTES:
        raise ValueError(f"user_metadata: expected at most {MAX_METADATA_BYTES:,} bytes as JSON, got {num_bytes:,}; shorten it")
    return metadata


Metadata = Annotated[dict[str, Any] | None, AfterValidator(check_metadata)]
# A name of an object, a model or a checkpoint.
Name = Annotated[str, Field(max_length=4096)]


class Refused(CookbookError):  # noqa: N818 - a response, not a fault of the server
    """Error of a refused request, which gets an HTTP status and a message in place of a result."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RequestBody(BaseModel):
    model_config = ConfigDict(protected_namespaces=(), extra="ignore")


B = TypeVar("B", bound=RequestBody)


def parse(kind: type[B], body: bytes) -> B:
    """Parse and validate a body. Raises Refused (422): the body is invalid."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise Refused(422, f"{kind.__name__}: {where}: {first['msg']}") from None


def check_version(where: str, version: str | None) -> None:
    """Raise Refused (400) if the version of the package ``tinker`` is too old. Unknown versions may work."""
    match = re.match(r"(\d{1,9})\.(\d{1,9})", version or "")
    if match is not None and (int(match[1]), int(match[2])) < OLDEST_CLIENT:
        raise Refused(400, f"{where}: tinker {match.string[:40]} cannot work with this server; {UPDATE_HINT}")


def check_optimizer(where: str, kind: object) -> None:
    """Validate the optimizer of a request. Raises ConfigError: the optimizer is not adamw."""
    if kind != "adamw":
        raise ConfigError(
            f"{where}: expected adamw, got {kind!r}; to use another optimizer, start the server with backend.optimizer"
        )


class ClientConfig(RequestBody):
    sdk_version: str | None = None


class CreateSession(ClientConfig):
    user_metadata: Metadata = None
    display_name: Name | None = None


class SessionBody(RequestBody):
    session_id: str


class LoraConfig(RequestBody):
    rank: int = Field(ge=0, le=4096)
    seed: Int64 | None = None
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(RequestBody):
    type: str = "adamw"


class CreateModel(SessionBody):
    model_seq_id: Index
    base_model: str
    user_metadata: Metadata = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class ModelBody(RequestBody):
    model_id: str


class SequencedBody(ModelBody):
    """Body of a numbered request of a run. Only the fields that ordering needs are validated here.

    A request that is refused never takes its turn, and all later requests of the run would wait for it. Therefore other errors
    are raised when the request runs, and become its result.
    """

    seq_id: int = Field(ge=1, lt=1 << 31)


class OptimStep(SequencedBody):
    """Body of an optimizer step. A client that adds fields sends ``optimizer_params`` in place of ``adam_params``."""

    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None
    grad_accumulation_normalization: str | None = None


class SaveBody(SequencedBody):
    ttl_seconds: float | None = None


class SaveWeights(SaveBody):
    path: str | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveWeightsForSampler(SaveBody):
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    user_metadata: dict[str, str] | None = None


class SaveWeightsExternal(SaveBody):
    path: str
    age_encryption_recipients: Texts | None = None


class LoadWeights(RequestBody):
    """Load into a run (``model_id``, ``seq_id``), or create a run (``session_id``, ``model_seq_id``)."""

    model_id: str | None = None
    seq_id: int | None = Field(None, ge=1, lt=1 << 31)
    session_id: str | None = None
    model_seq_id: Index | None = None
    base_model: str | None = None
    user_metadata: Metadata = None
    path: str
    optimizer: bool = False
    optimizer_config: OptimizerConfig | None = None


class CreateSamplingSession(SessionBody):
    sampling_session_seq_id: Index
    base_model: Name | None = None
    model_path: Name | None = None


class SamplerBody(RequestBody):
    sampling_session_id: str


class Chunk(RequestBody):
    type: str = "encoded_text"
    tokens: Ints = []


class Prompt(RequestBody):
    chunks: Annotated[list[Chunk], Field(fail_fast=True)] = Field(max_length=MAX_CHUNKS)


class Sampling(RequestBody):
    max_tokens: Int64 | None = None
    seed: Int64 | None = None
    stop: str | Annotated[list[str | Int64], Field(fail_fast=True)] | None = None
    temperature: float = 1.0
    top_k: Int64 = -1
    top_p: float = 1.0
    # Not in Tinker's protocol.
    min_p: float = 0.0


class TargetIds(RequestBody):
    """Token ids by position of the prompt, of shape ``(T - 1, K)``, dense or as compressed sparse rows; -1: no token."""

    data: Ints
    dtype: Literal["int64"]
    shape: tuple[Size, Size]
    sparse_crow_indices: Ints | None = None
    sparse_col_indices: Ints | None = None


class SampleBody(SamplerBody):
    seq_id: int = Field(ge=0, lt=1 << 63)
    num_samples: int = Field(1, ge=1, le=4096)
    prompt: Prompt
    sampling_params: Sampling
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    topk_prompt_logprobs: int = Field(0, ge=0)
    topk_sample_logprobs: int = Field(0, ge=0)
    target_prompt_logprobs: TargetIds | None = None
    prompt_alt_tokens_k: int = Field(0, ge=0)


class LossInput(RequestBody):
    name: str
    rank: int = Field(ge=0, le=2)


class LossNode(RequestBody):
    """One operation of a traced loss; :mod:`~cookbook.server.wire.loss_graph` decodes its arguments."""

    op: str
    name: str
    target: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class LossGraph(RequestBody):
    nodes: Annotated[list[LossNode], Field(fail_fast=True)]


class CustomLoss(SessionBody):
    custom_loss_seq_id: Index
    name: str
    inputs: Annotated[list[LossInput], Field(fail_fast=True)]
    graph: LossGraph


class SampleBatch(SamplerBody):
    """Announcement that the next ``count`` requests to a sampling session form one batch."""

    count: int = Field(ge=1, le=4096)


class FutureBody(RequestBody):
    request_id: str


class SamplerFeed(RequestBody):
    sampling_session_id: str
    cloned_sampler_id: int = Field(0, ge=0)


class RetrieveFutures(RequestBody):
    target: SamplerFeed
    prev_cursor: int = Field(0, ge=0)
    timeout: float | None = Field(None, ge=0)
    retrieved_request_ids: Texts = []


class CopyWeights(RequestBody):
    source_path: str
    session_id: str | None = None
    model_seq_id: Index | None = None
    destination_project_id: str | None = Field(None, max_length=200)
    ttl_seconds: float | None = Field(None, gt=0, le=MAX_TTL_S)
    weights_access_token: str | None = None


class PathBody(RequestBody):
    tinker_path: str


class TtlBody(RequestBody):
    ttl_seconds: float | None = Field(None, gt=0, le=MAX_TTL_S)
