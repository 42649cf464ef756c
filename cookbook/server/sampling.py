"""Making sampling sessions, and asking them."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

from cookbook.engine.likeliest import likeliest
from cookbook.errors import CheckpointError, CookbookError
from cookbook.server.catalogue import Address
from cookbook.server.errors import Refused
from cookbook.server.futures import SAMPLE, Answer
from cookbook.server.messages import Batch, CreateSamplingSession, Sample
from cookbook.server.results import Successors, failure, sampled
from cookbook.server.samplers import Gathering, SamplingSession
from cookbook.server.service import Service
from cookbook.types import ModelInput, SamplingParams

NOT_OFFERED = ("topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k")


async def create_sampling_session(service: Service, message: CreateSamplingSession) -> SamplingSession:
    """The session; the same one when the request is repeated.

    Raises:
        Refused: no such session, model or checkpoint.
    """
    owner = service.session(message.session_id)
    sampler_id = f"{owner.session_id}:sample:{message.sampling_session_seq_id}"
    async with service.making_samplers:  # a repetition may come while the first one loads
        if sampler_id not in service.samplers:
            service.add_sampler(await _make(service, message, sampler_id))
    return service.samplers[sampler_id]


async def _make(service: Service, message: CreateSamplingSession, sampler_id: str) -> SamplingSession:
    path, base = message.model_path, message.base_model
    if path is None and base is not None:
        base = service.host.public_name(base)
        sampler = await asyncio.to_thread(service.host.base_sampler)
    elif path is not None:
        try:
            address = Address.parse(path)
            service.catalogue.find(address)
            origin = service.catalogue.run(address.run_id)
            sampler = await asyncio.to_thread(service.host.saved_sampler, service.catalogue.place(address), origin.seed)
        except CheckpointError as error:
            raise Refused(404, str(error)) from None
        base = origin.base_model
    else:
        raise Refused(422, "create_sampling_session: needs a base_model or a model_path")
    return SamplingSession(sampler_id, message.session_id, base, path, sampler)


def sample(service: Service, message: Sample, body: bytes) -> Answer:
    """Raises Refused: no such session, or what no repetition can mend."""
    session = service.sampler(message.sampling_session_id)
    try:
        prompt = _prompt(service, message)
    except Refused:
        if session.gathering is not None:  # the others must not wait for it
            session.gathering.arrived(message.seq_id, lambda: None)
        raise
    answer, new = service.answers.claim(session.sampler_id, message.seq_id, body, SAMPLE)
    if not new:
        return answer

    successors = _successors(service, session, message, prompt)

    def told(done: Future[Any]) -> None:
        error = done.exception() or (successors.exception() if successors is not None else None)
        if error is not None:
            service.answers.settle(answer, failure(error))
            return
        response = done.result()
        service.metrics.sampled_tokens += sum(len(one.tokens) for one in response.sequences)
        shown = None if successors is None else Successors(*successors.result())
        service.answers.settle(answer, sampled(response, message.prompt_logprobs_last_n, shown))

    def start() -> None:
        try:
            asked = session.sampler.sample(
                ModelInput.from_ints(prompt),
                message.num_samples,
                SamplingParams(**message.sampling_params.model_dump()),
                include_prompt_logprobs=bool(message.prompt_logprobs),
            )
        except CookbookError as error:
            service.answers.settle(answer, failure(error))
        else:
            service.batcher.add(asked, told)

    if session.gathering is None:
        start()
    else:
        session.gathering.arrived(message.seq_id, start)
    return answer


def announce(service: Service, message: Batch) -> None:
    """The next ``count`` requests of a sampling session are one batch. One announced before starts with what has come.

    Raises:
        Refused: no such session.
    """
    session = service.sampler(message.sampling_session_id)
    if session.gathering is not None:
        session.gathering.end()

    def ended() -> None:
        session.gathering = None

    session.gathering = Gathering(message.count, service.config.gap_timeout_s, ended, service.batcher.together)


def _successors(service: Service, session: SamplingSession, message: Sample, prompt: list[int]) -> Future[Any] | None:
    """The likeliest successors of the prompt's tokens, when they are asked for. Computed before what is asked after it."""
    k = message.topk_prompt_logprobs
    if not k:
        return None
    return service.host.worker.submit(lambda: likeliest(session.sampler.engine(), prompt, k))


def _prompt(service: Service, message: Sample) -> list[int]:
    if any(chunk.type != "encoded_text" for chunk in message.prompt.chunks):
        raise Refused(400, "asample: the prompt holds something other than text; this model reads tokens only")
    for name in NOT_OFFERED:
        if getattr(message, name):
            raise Refused(400, f"asample: this server does not offer {name}; leave it out")
    vocabulary = service.host.vocabulary
    if message.topk_prompt_logprobs > vocabulary:
        raise Refused(400, f"asample: topk_prompt_logprobs: the vocabulary has {vocabulary} tokens; ask for fewer")
    prompt = [token for chunk in message.prompt.chunks for token in chunk.tokens]
    limit = message.sampling_params.max_tokens
    if len(prompt) + (limit or 1) > service.host.max_length:
        raise Refused(
            400, f"asample: {len(prompt)} prompt tokens and max_tokens={limit} exceed the context of {service.host.max_length}"
        )
    return prompt
