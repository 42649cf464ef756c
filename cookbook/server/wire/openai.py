"""Request bodies of the endpoint: OpenAI's chat completions and completions, and vLLM's generate.

A field without support is refused and named. Only fields that cannot change an answer are accepted without effect: labels of
the request, and other fields whose value is their default.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator
from starlette.responses import Response

from cookbook.server.wire.bodies import Int64, Refused, RequestBody
from cookbook.server.wire.encode import JSON
from cookbook.types import JsonObject, SamplingParams
from cookbook.utils.template_options import TEMPLATE_OPTIONS, checked_options

# Paths of the endpoint. Errors on these paths have OpenAI's format.
ENDPOINT_PATHS = ("/v1/", "/inference/v1/")
# OpenAI's limits.
MAX_CHOICES, MAX_TOP = 128, 20
# Limits on stop strings and their characters, and on stop tokens: every sampled token is compared with them.
MAX_STOPS, MAX_STOP_CHARACTERS, MAX_STOP_IDS = 16, 200, 4096
LOWEST_TEMPERATURE = 0.01
# Name of a field of chats, and of the option of the chat template that it sets.
EFFORT_FIELD = "reasoning_effort"
# Fields that only label a request, or only concern how another server stores or transfers it.
LABEL_FIELDS = frozenset(
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "cache_salt", "routed_experts_prompt_start"}
    | {"spaces_between_special_tokens", "flat_logprobs"}
)
# Fields that only concern texts. Responses with token ids have none.
OF_TEXTS = frozenset({"skip_special_tokens", "include_stop_str_in_output", "detokenize"})
# Fields without support, and the values that mean that the field is not used.
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "priority": (0,),
    "best_of": (1,),
    "suffix": ("",),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "detokenize": (True,),
    "extra_args": ({}, {"prl_compact_logprobs": True}, {"prl_compact_logprobs": False}),
}
# What fields with several types expect.
ALTERNATIVES = {
    "stop": f"expected a text of 1 to {MAX_STOP_CHARACTERS} characters, or a list of at most {MAX_STOPS} such texts",
    "prompt": "expected a text, a list of tokens, or a list of texts or of lists of tokens; none may be empty",
}
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

Token = Annotated[int, Field(ge=0, lt=1 << 31)]
# Lists end at their first error: pydantic would make an object for the error of each item.
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopTexts = Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)]
Prompts = (
    Annotated[list[Text], Field(min_length=1, fail_fast=True)] | Annotated[list[Tokens], Field(min_length=1, fail_fast=True)]
)
Objects = Annotated[list[JsonObject], Field(fail_fast=True)]


class InvalidField(Refused):
    """Error of a request whose field ``field`` is invalid or has no support. ``code``: OpenAI's code of the error."""

    def __init__(self, field: str, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(status, f"{field}: {message}")
        self.field = field
        self.code = code


class StreamOptions(RequestBody):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    # Padding of the chunks against observers of their sizes. The server adds none.
    include_obfuscation: Literal[False] = False


class DrawBody(RequestBody):
    """Fields that all requests share."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    n: int = Field(1, ge=1, le=MAX_CHOICES)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1, lt=1 << 31)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: Int64 | None = None
    stop: StopText | StopTexts = Field(default_factory=list)

    @field_validator("temperature")
    @classmethod
    def _finite(cls, temperature: float) -> float:
        """Refuse a temperature at which logits are not finite: it would fail the other requests of its batch."""
        if 0 < temperature < LOWEST_TEMPERATURE:
            raise ValueError(f"expected 0 or at least {LOWEST_TEMPERATURE}, got {temperature:g}")
        return temperature

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def params(self, max_tokens: int | None) -> SamplingParams:
        """Return the parameters of sampling. Without stop strings, completions stop at the end of the turn."""
        return SamplingParams(
            max_tokens=max_tokens,
            seed=self.seed,
            stop=self.stop_strings or None,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
        )


class StreamedBody(DrawBody):
    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Whether texts contain the stop string or token that ended them, and special tokens, as with vLLM.
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @property
    def text_options(self) -> dict[str, bool]:
        """Options of the texts of completions, as of :func:`completed_text`."""
        return {"with_special": not self.skip_special_tokens, "with_stop": self.include_stop_str_in_output}


class ChatBody(StreamedBody):
    messages: Objects = Field(min_length=1)
    tools: Objects = Field(default_factory=list)
    tool_choice: Any = "auto"
    # Option of the chat template of the same name.
    reasoning_effort: str | None = None
    # Options of the chat template for this request, as with vLLM.
    chat_template_kwargs: JsonObject = Field(default_factory=dict)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP)

    @field_validator(TEMPLATE_OPTIONS)
    @classmethod
    def _options(cls, options: JsonObject) -> JsonObject:
        return checked_options(options)

    @field_validator("tool_choice")
    @classmethod
    def _choice(cls, choice: object) -> object:
        if choice not in ("auto", "none"):
            raise ValueError(f"this server cannot force the call of a tool, got {json.dumps(choice)[:100]}; send auto or none")
        return choice

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if not self.skip_special_tokens and self.may_call:
            raise InvalidField("skip_special_tokens", "false is not supported together with tools; leave out one of them")
        if self.reasoning_effort is not None and self.template_options[EFFORT_FIELD] != self.reasoning_effort:
            raise InvalidField(
                EFFORT_FIELD, f"{TEMPLATE_OPTIONS} has another value, got {self.reasoning_effort!r}; send one of them"
            )
        return self

    @property
    def template_options(self) -> JsonObject:
        """Options of the chat template for this request."""
        effort = {} if self.reasoning_effort is None else {EFFORT_FIELD: self.reasoning_effort}
        return {**effort, **self.chat_template_kwargs}

    @property
    def continues_answer(self) -> bool:
        """Whether the last message is the start of an answer, which the completion continues."""
        return self.messages[-1].get("role") == "assistant" and not self.messages[-1].get("tool_calls")

    @property
    def may_call(self) -> bool:
        """Whether the model may call tools."""
        return bool(self.tools) and self.tool_choice == "auto"

    @property
    def callable_tools(self) -> list[JsonObject]:
        """The tools that the model may call."""
        return self.tools if self.may_call else []


class CompletionBody(StreamedBody):
    prompt: Text | Tokens | Prompts
    max_tokens: int = Field(16, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)

    @property
    def prompts(self) -> list[str] | list[list[int]] | list[str | list[int]]:
        """The prompts, of text or tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt


class GenerateParams(DrawBody):
    """vLLM's parameters of sampling."""

    max_tokens: int = Field(16, ge=1)
    stop_token_ids: Annotated[list[Token], Field(fail_fast=True)] = Field(default_factory=list, max_length=MAX_STOP_IDS)
    ignore_eos: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)

    def params(self, max_tokens: int | None) -> SamplingParams:
        params = super().params(max_tokens)
        stop = [*self.stop_strings, *self.stop_token_ids]
        if self.ignore_eos and stop:
            raise InvalidField("sampling_params.ignore_eos", "has no support together with stop or stop_token_ids; send one")
        params_stop = [] if self.ignore_eos else stop or None
        return SamplingParams(**{**vars(params), "stop": params_stop})


class GenerateBody(RequestBody):
    """Body of ``POST /inference/v1/generate``. ``model`` None: the base model."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str | None = None
    request_id: str | None = None
    token_ids: Tokens
    sampling_params: GenerateParams = Field(default_factory=lambda: GenerateParams.model_validate({}))
    stream: Literal[False] = False


B = TypeVar("B", ChatBody, CompletionBody, GenerateBody)


def parse(kind: type[B], body: bytes) -> B:
    """Parse and validate a body. Raises InvalidField: a field is invalid, unknown or has no support."""
    try:
        # Decoded here, because json would also accept UTF-16, in which the limits on the structure do not see brackets.
        fields = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidField("body", f"expected JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidField("body", f"expected a JSON object, got {type(fields).__name__}")
    fields = _used(fields)
    if isinstance(params := fields.get("sampling_params"), dict):
        fields = {**fields, "sampling_params": _used(params, "sampling_params.")}
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        names, message = list(map(str, first["loc"])), first["msg"]
        # After such a field, the place names the alternative that was tried first. Its message does not fit the others.
        if (several := next((name for name in names[:-1] if name in ALTERNATIVES), None)) is not None:
            names, message = names[: names.index(several) + 1], ALTERNATIVES[several]
        field = ".".join(names) or "body"
        if first["type"] == "extra_forbidden":
            message = "this server does not support the field; leave it out"
        raise InvalidField(field, message) from None


def _used(fields: JsonObject, where: str = "") -> JsonObject:
    """Return the fields that may change the answer. Clients send null for fields that are not used."""
    labels = LABEL_FIELDS | OF_TEXTS if where else LABEL_FIELDS
    used = {name: value for name, value in fields.items() if value is not None and name not in labels}
    for name in used.keys() & NEUTRAL_VALUES.keys():
        if used[name] not in NEUTRAL_VALUES[name]:
            only = " or ".join(map(json.dumps, NEUTRAL_VALUES[name]))
            got = json.dumps(used[name])
            got = got if len(got) <= 100 else f"{got[:100]}..."
            raise InvalidField(f"{where}{name}", f"this server supports only {only}, got {got}; leave it out")
        del used[name]
    return used


def openai_error(error: Exception, status: int, message: str) -> Response:
    """Return an error in OpenAI's format, in which ``param`` names the field of the request."""
    field = error.field if isinstance(error, InvalidField) else None
    code = error.code if isinstance(error, InvalidField) else None
    return Response(json.dumps({"error": error_object(message, status, field, code)}), status, media_type=JSON)


def error_object(message: str, status: int, field: str | None = None, code: str | None = None) -> JsonObject:
    kind = ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"message": message, "type": kind, "param": field, "code": code}
