"""Making sampling sessions, and asking them."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

from cookbook.errors import CheckpointError, CookbookError
from cookbook.server.catalogue import Address
from cookbook.server.errors import Refused
from cookbook.server.futures import Answer
from cookbook.server.messages import CreateSamplingSession, Sample
from cookbook.server.results import failure, sampled
from cookbook.server.samplers import SamplingSession
from cookbook.server.service import Service
from cookbook.types import ModelInput, SamplingParams

NOT_OFFERED = ("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k")


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
    prompt = _prompt(service, message)
    answer, new = service.answers.claim(session.sampler_id, message.seq_id, body, "asample")
    if not new:
        return answer

    def told(done: Future[Any]) -> None:
        error = done.exception()
        result = sampled(done.result(), message.prompt_logprobs_last_n) if error is None else failure(error)
        service.answers.settle(answer, result)

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
    return answer


def _prompt(service: Service, message: Sample) -> list[int]:
    if any(chunk.type != "encoded_text" for chunk in message.prompt.chunks):
        raise Refused(400, "asample: the prompt holds something other than text; this model reads tokens only")
    for name in NOT_OFFERED:
        if getattr(message, name):
            raise Refused(400, f"asample: this server does not offer {name}; leave it out")
    prompt = [token for chunk in message.prompt.chunks for token in chunk.tokens]
    limit = message.sampling_params.max_tokens
    if len(prompt) + (limit or 1) > service.host.max_length:
        raise Refused(
            400, f"asample: {len(prompt)} prompt tokens and max_tokens={limit} exceed the context of {service.host.max_length}"
        )
    return prompt
