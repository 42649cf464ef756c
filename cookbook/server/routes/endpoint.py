"""The endpoint for agents: OpenAI's chat completions, completions and models, and vLLM's generate."""

from __future__ import annotations

import asyncio
import functools
import json
import secrets
from collections.abc import AsyncIterator, Callable, Sequence

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from cookbook.errors import CookbookError
from cookbook.server.handlers import endpoint
from cookbook.server.handlers.endpoint import Completion, Question
from cookbook.server.keys import caller_name
from cookbook.server.routes.common import CurrentService, PromptBody, json_body, unless_disconnected
from cookbook.server.state.endpoint import Caller
from cookbook.server.state.service import Service
from cookbook.server.wire import openai, openai_results
from cookbook.server.wire.bodies import Refused
from cookbook.server.wire.encode import JSON
from cookbook.server.wire.openai import ChatBody, CompletionBody, GenerateBody, InvalidField, StreamedBody
from cookbook.server.wire.openai_results import Answer, ChatParts, CompletionParts, Head
from cookbook.types import JsonObject

END_OF_STREAM = "data: [DONE]\n\n"
# Responses with more tokens are encoded on another thread, because the event loop answers other clients meanwhile.
LARGE_TOKENS = 2000

router = APIRouter()


@router.get("/v1/models")
async def models(service: CurrentService) -> JsonObject:
    """List the weights that a request can name."""
    return {"object": "list", "data": endpoint.models(service)}


@router.get("/v1/models/{model:path}")
async def model(service: CurrentService, model: str) -> JsonObject:
    """Describe one model."""
    for entry in endpoint.models(service):
        if entry["id"] == model:
            return entry
    raise InvalidField("model", f"unknown model {model!r}; GET /v1/models lists the models", 404, "model_not_found")


@router.post("/v1/chat/completions", openapi_extra=json_body(ChatBody))
async def chat_completions(service: CurrentService, request: HttpRequest, body: PromptBody) -> Response:
    """Answer a conversation, as OpenAI's chat completions."""
    fields = await service.decoder.run(len(body), functools.partial(openai.parse, ChatBody, body))
    if fields.top_logprobs and not fields.logprobs:
        raise InvalidField("top_logprobs", f"needs logprobs=true, got {fields.top_logprobs} without it; send both")
    max_tokens = fields.max_completion_tokens or fields.max_tokens
    _check_stream(fields, "top_logprobs", fields.top_logprobs)
    weights = await endpoint.weights_of(service, fields.model)
    prompt = await endpoint.chat_prompt(service, fields)
    question = Question(prompt, fields.params(max_tokens), max_tokens, fields.n, top=fields.top_logprobs)
    completion = Completion(service, _caller(service), weights, [question])
    completion.start(stream=fields.stream)
    kind = "chat.completion.chunk" if fields.stream else "chat.completion"
    head, renderer = Head("chatcmpl", kind, fields.model, weights.sampler_id), service.host.renderer
    if fields.stream:
        return EventStream(completion, _events(completion, fields, head, [prompt], ChatParts(renderer, fields, prompt)))
    answers = await _answers(request, completion)
    return await _encoded(answers, lambda: openai_results.chat(renderer, fields, head, answers[0]))


@router.post("/v1/completions", openapi_extra=json_body(CompletionBody))
async def completions(service: CurrentService, request: HttpRequest, body: PromptBody) -> Response:
    """Complete texts or tokens, as OpenAI's completions."""
    fields = await service.decoder.run(len(body), functools.partial(openai.parse, CompletionBody, body))
    if not fields.max_tokens and not fields.echo:
        raise InvalidField("max_tokens", "0 needs echo=true, which returns the prompt; send at least 1")
    _check_stream(fields, "logprobs", fields.logprobs)
    _check_stream(fields, "echo", fields.echo)
    # Before the prompts are rendered, which takes a while for many.
    endpoint.check_count(len(fields.prompts) * fields.n)
    weights = await endpoint.weights_of(service, fields.model)
    prompts = await endpoint.text_prompts(service, fields.prompts)
    score = fields.echo and fields.logprobs is not None
    # Without parameters the prompt is only scored.
    params = fields.params(fields.max_tokens) if fields.max_tokens else None
    questions = [Question(prompt, params, fields.max_tokens, fields.n, score, fields.logprobs or 0) for prompt in prompts]
    completion = Completion(service, _caller(service), weights, questions)
    completion.start(stream=fields.stream)
    head, renderer = Head("cmpl", "text_completion", fields.model, weights.sampler_id), service.host.renderer
    if fields.stream:
        parts = CompletionParts(renderer, fields, len(prompts))
        return EventStream(completion, _events(completion, fields, head, prompts, parts))
    answers = await _answers(request, completion)
    return await _encoded(answers, lambda: openai_results.completions(renderer, fields, head, answers))


@router.post("/inference/v1/generate", openapi_extra=json_body(GenerateBody))
async def generate(service: CurrentService, request: HttpRequest, body: PromptBody) -> Response:
    """Generate from token ids, in vLLM's format."""
    fields = await service.decoder.run(len(body), functools.partial(openai.parse, GenerateBody, body))
    endpoint.check_tokens(service, fields.token_ids, "token_ids")
    params = fields.sampling_params
    weights = await endpoint.weights_of(service, fields.model)
    score, top = params.prompt_logprobs is not None, max(params.logprobs or 0, params.prompt_logprobs or 0)
    question = Question(fields.token_ids, params.params(params.max_tokens), params.max_tokens, params.n, score, top)
    completion = Completion(service, _caller(service), weights, [question])
    completion.start()
    answers = await _answers(request, completion)
    head = {
        "request_id": fields.request_id or f"gen-{secrets.token_hex(12)}",
        "model": fields.model or endpoint.base_names(service)[0],
    }
    return await _encoded(answers, lambda: openai_results.generated(head, answers[0], params.logprobs, params.prompt_logprobs))


@router.post("/v1/responses")
async def responses() -> Response:
    """Refuse OpenAI's newer interface by its name: some clients use it unless they are told otherwise."""
    raise InvalidField("responses", "this server does not support the Responses API; use /v1/chat/completions")


def _caller(service: Service) -> Caller:
    return service.endpoint.callers[caller_name() or ""]


# ---- whole responses -------------------------------------------------------------------------------------------------


async def _encoded(answers: Sequence[Answer], encode: Callable[[], JsonObject]) -> Response:
    num_tokens = sum(len(answer.prompt) + sum(len(sequence.tokens) for sequence in answer.sequences) for answer in answers)

    def body() -> str:
        return json.dumps(encode())

    return Response(await asyncio.to_thread(body) if num_tokens > LARGE_TOKENS else body(), media_type=JSON)


async def _answers(request: HttpRequest, completion: Completion) -> list[Answer]:
    """Return the completions.

    Raises:
        ClientDisconnect: the client has disconnected, and the computation is stopped.
        Refused: the request is invalid, or the server stops.
    """
    try:
        return await unless_disconnected(request, completion.answers())
    except CookbookError as error:
        if isinstance(error, Refused):
            raise
        raise Refused(endpoint.status_of(error), str(error)) from None
    finally:
        completion.stop()


# ---- streams ---------------------------------------------------------------------------------------------------------


class EventStream(StreamingResponse):
    """Server-sent events of a completion, which is stopped when the client disconnects."""

    def __init__(self, completion: Completion, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._completion = completion

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The events may never be read, so the computation is not stopped by them.
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._completion.stop()


def _event(value: JsonObject) -> str:
    return f"data: {json.dumps(value)}\n\n"


async def _events(
    completion: Completion, fields: StreamedBody, head: Head, prompts: Sequence[list[int]], parts: ChatParts | CompletionParts
) -> AsyncIterator[str]:
    """Yield the chunks of a response: the choices, then the usage if it was requested."""
    sampled = 0
    try:
        for opening in parts.opening():
            yield _event(head.response([opening]))
        async for index, chunk in completion.parts():
            sampled += len(chunk.tokens)
            if (choice := parts.next(index * fields.n + chunk.number, chunk)) is not None:
                yield _event(head.response([choice]))
    except CookbookError as error:
        message = completion.service.without_paths(str(error))
        yield _event({"error": openai.error_object(message, endpoint.status_of(error))})
        return
    if fields.stream_options is not None and fields.stream_options.include_usage:
        num_prompt_tokens = sum(map(len, prompts))
        usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": sampled, "total_tokens": num_prompt_tokens + sampled}
        yield _event(head.response([], usage))
    yield END_OF_STREAM


def _check_stream(fields: StreamedBody, name: str, value: object) -> None:
    """Raise InvalidField: a field has no support in a stream."""
    if fields.stream and value:
        raise InvalidField(name, f"has no support with stream=true, got {json.dumps(value)}; set stream=false")
    if fields.stream_options is not None and not fields.stream:
        raise InvalidField("stream_options", "needs stream=true; send both")
