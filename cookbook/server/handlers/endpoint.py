"""Requests of the endpoint: the choice of the weights, prompts, limits, and the computation of completions."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from cookbook.backends.local.sample_queue import LocalSampler, SampleFuture
from cookbook.data.formats import Chat
from cookbook.data.messages import parse_messages
from cookbook.engine.decoding.requests import TokenChunk
from cookbook.errors import BackendError, CheckpointError, CookbookError, DataError, SamplerUnavailableError
from cookbook.futures import call_on
from cookbook.server.handlers.sampling import exceeded_limit
from cookbook.server.keys import caller_name
from cookbook.server.state.catalog import SCHEME, Address, CheckpointRecord
from cookbook.server.state.deployed import DeployedFuture
from cookbook.server.state.endpoint import OWNER, Caller
from cookbook.server.state.samplers import SamplingSession, file_bytes
from cookbook.server.state.service import Service
from cookbook.server.wire.bodies import Refused
from cookbook.server.wire.openai import EFFORT_FIELD, ChatBody, InvalidField
from cookbook.server.wire.openai_results import Answer, TopRow
from cookbook.types import JsonObject, ModelInput, Sample, SampleResponse, SamplingParams, request_seed
from cookbook.utils.template_options import TEMPLATE_OPTIONS

T = TypeVar("T")
RUN_PREFIX = "runs/"
# Completions of one request, over all of its prompts. The same limit as for requests of sampling clients.
MAX_COMPLETIONS = 4096
# Tokens of one request that are scored, if its prompts are short: on several ranks all of them are computed without a pause.
SCORED_TOKENS = 65_536
# Prompts that are tokenized before other requests get a turn, and the most characters per token of a text.
RENDERED, TOKEN_CHARACTERS = 64, 100
# JSON has no infinity. OpenAI and vLLM use this value for tokens without a probability.
LOWEST_LOGPROB = -9999.0


# ---- weights ---------------------------------------------------------------------------------------------------------


async def weights_of(service: Service, model: str | None) -> SamplingSession:
    """Return the weights that a request names: the base model, ``tinker://...`` (a checkpoint) or ``runs/<id>``.

    Raises:
        Refused: 404, the model, checkpoint or run is unknown, or the run has no weights to sample from; 429, the run is being
            restored.
    """
    if model is None or service.host.is_name(model):
        return await service.endpoint.base(service.host)
    try:
        if model.startswith(SCHEME):
            return await _checkpoint_weights(service, service.readable_checkpoint(Address.parse(model)))
        if model.startswith(RUN_PREFIX):
            return await _newest_weights(service, model.removeprefix(RUN_PREFIX))
    except CheckpointError as error:
        raise _unknown_model(str(error)) from None
    raise _unknown_model(f"unknown model {model!r}; GET /v1/models lists the models")


def _unknown_model(message: str) -> InvalidField:
    return InvalidField("model", message, status=404, code="model_not_found")


async def _newest_weights(service: Service, run_id: str) -> SamplingSession:
    """Return the newest weights that the run's client has saved for sampling, in memory or as a checkpoint."""
    try:
        info = service.run_info(run_id)
    except Refused as error:
        raise _unknown_model(str(error)) from None
    service.wake(run_id)
    published = service.runs[run_id].published if run_id in service.runs else {}
    live = {number: sampler_id for sampler_id, number in published.items() if sampler_id in service.samplers}
    saved = {
        record.request or 0: record
        for record in service.catalog.of_run(info.run_id)
        if record.address.kind == "sampler_weights"
    }
    if live and max(live) > max(saved, default=0):
        return service.samplers.touch(live[max(live)])
    if not saved:
        message = f"run {run_id!r} has no weights to sample from; call save_weights_for_sampler first"
        raise _unknown_model(message)
    return await _checkpoint_weights(service, saved[max(saved)])


async def _checkpoint_weights(service: Service, checkpoint: CheckpointRecord) -> SamplingSession:
    """Load a checkpoint, or return the session that an earlier request has loaded."""
    address = checkpoint.address
    # With the time, because a checkpoint of the same name may be saved again.
    sampler_id = f"{OWNER}:{address.path}@{checkpoint.time}"
    async with service.sampler_lock:
        if sampler_id not in service.samplers:
            origin, folder = service.catalog.run(address.run_id), service.catalog.folder_of(address)
            sampler = await asyncio.to_thread(service.host.checkpoint_sampler, folder, origin.seed)
            session = SamplingSession(sampler_id, OWNER, origin.base_model, address.path, sampler, origin.seed)
            session.num_bytes = file_bytes(folder)
            service.samplers.add(session)
        return service.samplers.touch(sampler_id)


def models(service: Service) -> list[JsonObject]:
    """Return the entries of ``GET /v1/models``: the base model, each run with weights to sample from, and each checkpoint."""
    entries = [_entry(service, name, service.endpoint.created) for name in base_names(service)]
    for info in service.own_runs():
        saved = [record for record in service.catalog.of_run(info.run_id) if record.address.kind != "external_weights"]
        is_published = info.run_id in service.runs and bool(service.runs[info.run_id].published)
        if is_published or any(record.address.kind == "sampler_weights" for record in saved):
            entries.append(_entry(service, f"{RUN_PREFIX}{info.run_id}", info.created))
        entries += [_entry(service, record.address.path, record.time) for record in saved]
    return entries


def base_names(service: Service) -> list[str]:
    """Return the public names of the base model, the shortest first."""
    return sorted(service.host.public_names, key=lambda name: (len(name), name))


def _entry(service: Service, model: str, created: float) -> JsonObject:
    context = service.host.info.max_context_length
    return {"id": model, "object": "model", "created": int(created), "owned_by": "cookbook", "max_model_len": context}


# ---- prompts ---------------------------------------------------------------------------------------------------------


async def chat_prompt(service: Service, fields: ChatBody) -> list[int]:
    """Return the tokens of a conversation, with the header of the answer. Raises InvalidField: it cannot be rendered."""
    tools = tuple(fields.tools) if fields.may_call else None
    options = fields.template_options
    for name in service.host.renderer.unread_options(options):
        field = EFFORT_FIELD if name == EFFORT_FIELD and fields.reasoning_effort is not None else TEMPLATE_OPTIONS
        raise InvalidField(field, f"the chat template of this model does not read {name!r}; leave it out")
    _check_size(service, len(json.dumps([fields.messages, fields.tools], ensure_ascii=False)), "messages")

    def render() -> list[int]:
        # The role developer replaces system in newer versions of OpenAI's API.
        roles = {"developer": "system"}
        renamed = [{**message, "role": roles.get(str(message.get("role")), message.get("role"))} for message in fields.messages]
        chat = Chat("messages", parse_messages(renamed, "request", "messages"), len(renamed), tools, options)
        return service.host.renderer.prompts([chat])[0][0]

    return await _rendered(service, render, "messages")


async def text_prompts(service: Service, prompts: Sequence[str | list[int]]) -> list[list[int]]:
    """Return the tokens of each prompt. Raises InvalidField: a text is too long, or a text or a token is invalid."""

    def render(part: Sequence[str | list[int]]) -> list[list[int]]:
        renderer = service.host.renderer
        return [renderer.prompt_tokens(prompt) if isinstance(prompt, str) else prompt for prompt in part]

    for prompt in prompts:
        if not isinstance(prompt, str):
            check_tokens(service, prompt, "prompt")
    tokens: list[list[int]] = []
    for start in range(0, len(prompts), RENDERED):
        part = prompts[start : start + RENDERED]
        _check_size(service, max(map(len, part)), "prompt")
        tokens += await _rendered(service, functools.partial(render, part), "prompt")
    return tokens


def check_count(num_samples: int) -> None:
    """Raise InvalidField if a request asks for too many completions, over all of its prompts."""
    if num_samples > MAX_COMPLETIONS:
        raise InvalidField("n", f"expected at most {MAX_COMPLETIONS} completions of one request, got {num_samples}")


def check_tokens(service: Service, tokens: Sequence[int], field: str) -> None:
    """Raise InvalidField if a token is not in the vocabulary. The engine would only find it after a stream has begun."""
    vocabulary = service.host.vocabulary_size
    for token in tokens:
        if not 0 <= token < vocabulary:
            message = f"holds token {token}, but the vocabulary has {vocabulary} tokens; use this model's tokenizer"
            raise InvalidField(field, message)


def _check_size(service: Service, num_characters: int, field: str) -> None:
    """Refuse a text that is too long before it is tokenized, because other requests wait for the tokenizer."""
    if num_characters > TOKEN_CHARACTERS * service.host.info.max_context_length:
        message = f"{num_characters:,} characters exceed the context of {service.host.info.max_context_length} tokens"
        raise InvalidField(field, f"{message}; shorten the text", code="context_length_exceeded")


async def _rendered(service: Service, render: Callable[[], T], field: str) -> T:
    async with service.endpoint.rendering:
        try:
            return await asyncio.to_thread(render)
        except DataError as error:
            raise InvalidField(field, str(error)) from None


# ---- completions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """One prompt to complete, to score, or both.

    Attributes:
        max_tokens: None fills the context; 0 only scores.
        score: whether to compute the log-probabilities of the prompt.
        top: number of most likely tokens per position; 0: none.
    """

    prompt: list[int]
    params: SamplingParams | None
    max_tokens: int | None
    num_samples: int = 1
    score: bool = False
    top: int = 0


class Completion:
    """The computation of all prompts of one HTTP request, in one batch. Used on the event loop.

    Raises:
        Refused: 400, a prompt is too long or the request too large; 429, too much work of the caller is pending; 503, the
            server shuts down.
    """

    def __init__(self, service: Service, caller: Caller, weights: SamplingSession, questions: Sequence[Question]) -> None:
        self.service, self._caller, self._weights, self._questions = service, caller, weights, questions
        self._num_tokens = _admit(service, caller, questions)
        longest = max(len(question.prompt) for question in questions)
        self._size = caller.size_class(service.host, longest * len(questions) + self._num_tokens)
        self._futures: list[SampleFuture[Any]] = []
        self._events: asyncio.Queue[tuple[int, list[TokenChunk] | None]] = asyncio.Queue()
        self._finished = asyncio.Event()
        self._num_left = len(questions)
        self._is_stopped = False
        self._sampler: LocalSampler = weights.sampler.on(self._size.queue)

    def start(self, *, stream: bool = False) -> None:
        """Queue the prompts. ``stream``: report tokens while others follow."""
        loop = asyncio.get_running_loop()
        self._started = time.monotonic()
        self.service.endpoint.begin(self._caller, self._weights, self._num_tokens)
        # The batch starts under the lock, so that it contains all prompts.
        with self._size.batcher.same_batch:
            for index, question in enumerate(self._questions):
                future = self._queued(question)
                if stream:
                    future.on_tokens = functools.partial(_report, loop, self._events, index)
                self._futures.append(future)
                finish = functools.partial(self._finish, index)
                if isinstance(future, DeployedFuture):
                    # Not through the worker, which may be busy with a long call.
                    future.add_done_callback(functools.partial(call_on, loop, finish))
                else:
                    # Without an id: a restart does not replay the request.
                    self._size.batcher.add("", future, finish)

    def stop(self) -> None:
        """Stop the computation, because the client has disconnected or has all of its results."""
        self._is_stopped = True
        for future in self._futures:
            future.stop()

    async def answers(self) -> list[Answer]:
        """Wait for the result. Raises CookbookError: a prompt is invalid, or the server stops."""
        await self._finished.wait()
        responses = [future.result() for future in self._futures]
        answers = []
        for question, response in zip(self._questions, responses, strict=True):
            if not isinstance(response, SampleResponse):
                # Only scored.
                response = SampleResponse([Sample([], [], "length")] * question.num_samples, response)
            tops = await self._tops(question, response.sequences) if question.top else None
            answers.append(Answer(question.prompt, response.sequences, response.prompt_logprobs, tops))
        return answers

    async def parts(self) -> AsyncIterator[tuple[int, TokenChunk]]:
        """Yield the tokens of all completions as they are drawn, with the index of their prompt. The last has a stop reason.

        Raises CookbookError: a prompt is invalid, or the server stops.
        """
        sent: dict[tuple[int, int], int] = {}
        for _ in range(len(self._questions)):
            while (event := await self._events.get())[1] is not None:
                for chunk in event[1]:
                    sent[event[0], chunk.number] = sent.get((event[0], chunk.number), 0) + len(chunk.tokens)
                    yield event[0], chunk
            index = event[0]
            for number, sequence in enumerate(self._futures[index].result().sequences):
                start = sent.get((index, number), 0)
                yield index, TokenChunk(number, sequence.tokens[start:], sequence.logprobs[start:], sequence.stop_reason)

    def _queued(self, question: Question) -> SampleFuture[Any]:
        if question.params is None:
            return self._sampler.compute_logprobs(ModelInput.from_ints(question.prompt))
        params = question.params
        if params.seed is None:
            self._caller.num_requests += 1
            seed = request_seed(self._weights.seed, self._sampler.step, self._caller.num_requests)
            params = replace(params, seed=seed)
        prompt = ModelInput.from_ints(question.prompt)
        if (deployed := self.service.deployed) is None:
            return self._sampler.sample(prompt, question.num_samples, params, include_prompt_logprobs=question.score)
        scores = self._sampler.compute_logprobs(prompt) if question.score else None
        return deployed.sample(self._weights.sampler, question.prompt, question.num_samples, params, scores)

    def _finish(self, index: int, future: Future[Any]) -> None:
        self._num_left -= 1
        self._events.put_nowait((index, None))
        if future.exception() is None and isinstance(response := future.result(), SampleResponse):
            self.service.metrics.sampled_tokens += sum(len(sequence.tokens) for sequence in response.sequences)
        if not self._num_left:
            self.service.endpoint.end(self._caller, self._weights, self._num_tokens)
            is_failed = any(future.exception() is not None for future in self._futures)
            self.service.metrics.count_settled("endpoint", time.monotonic() - self._started, failed=is_failed)
            self._finished.set()

    async def _tops(self, question: Question, sequences: Sequence[Sample]) -> list[list[TopRow]]:
        """Compute the most likely tokens at each position of the prompt, at temperature 1, and of each completion."""
        engine, lane = self._sampler.engine, self._size.lane
        temperature = (question.params.temperature if question.params is not None else 0.0) or 1.0

        def rows(tokens: list[int], temperature: float) -> list[TopRow]:
            if self._is_stopped:
                return []
            ids, logprobs = engine().passes.top_logprobs(tokens, question.top, temperature)
            pairs = zip(ids.tolist(), logprobs.tolist(), strict=True)
            return [None, *({token: max(value, LOWEST_LOGPROB) for token, value in zip(*pair, strict=True)} for pair in pairs)]

        tops = []
        for sequence in sequences:
            tokens = [*question.prompt, *sequence.tokens]
            top = await asyncio.wrap_future(lane.submit(functools.partial(rows, tokens, temperature)))
            if question.score and temperature != 1.0:
                top[: len(question.prompt)] = await asyncio.wrap_future(lane.submit(lambda: rows(question.prompt, 1.0)))
            tops.append(top)
        return tops


def _report(
    loop: asyncio.AbstractEventLoop,
    events: asyncio.Queue[tuple[int, list[TokenChunk] | None]],
    index: int,
    chunks: list[TokenChunk],
) -> None:
    """Report the newest tokens of prompt ``index``, from the worker's thread."""
    call_on(loop, events.put_nowait, (index, chunks))


def _admit(service: Service, caller: Caller, questions: Sequence[Question]) -> int:
    """Return the largest number of tokens that the prompts draw.

    Raises:
        Refused: 400, a prompt is too long or the request too large; 429, too much work of the caller is pending; 503, the
            server shuts down.
    """
    if service.requests.closing:
        raise Refused(503, "the server is shutting down: it finishes accepted requests and accepts no new ones")
    context = service.host.info.max_context_length
    for question in questions:
        if len(question.prompt) + (1 if question.max_tokens is None else question.max_tokens) > context:
            tokens = f"{len(question.prompt)} prompt tokens and max_tokens={question.max_tokens}"
            message = f"{tokens} exceed the context of {context} tokens; shorten the prompt or lower max_tokens"
            raise InvalidField("max_tokens", message, code="context_length_exceeded")
        if question.top > service.host.vocabulary_size:
            raise InvalidField("logprobs", f"the vocabulary has {service.host.vocabulary_size} tokens, got {question.top}")
    num_samples = sum(question.num_samples for question in questions)
    check_count(num_samples)
    num_tokens = sum(
        question.num_samples * (context - len(question.prompt) if question.max_tokens is None else question.max_tokens)
        for question in questions
    )
    longest = max(len(question.prompt) for question in questions)
    scored = sum(len(question.prompt) for question in questions if question.score or question.params is None)
    if scored > max(SCORED_TOKENS, longest):
        raise InvalidField(
            "prompt", f"expected at most {SCORED_TOKENS:,} prompt tokens to score, got {scored:,}; send fewer prompts"
        )
    limit = exceeded_limit(service, caller_name(), caller.pending_tokens, longest, num_samples, num_tokens)
    if limit is not None:
        raise InvalidField("max_tokens", limit[1], status=limit[0])
    return num_tokens


def status_of(error: CookbookError) -> int:
    """Return the HTTP status of a failed computation: 400 if the request caused the failure, else 503: clients retry."""
    return 503 if isinstance(error, BackendError | SamplerUnavailableError) else 400
