"""Making sampling sessions, and asking them."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from cookbook.engine.likeliest import likeliest
from cookbook.errors import CheckpointError, CookbookError, RolloutError
from cookbook.server.catalogue import Address
from cookbook.server.errors import Refused
from cookbook.server.futures import SAMPLE, Answer
from cookbook.server.live import file_bytes
from cookbook.server.messages import Batch, CreateSamplingSession, Sample
from cookbook.server.records import Record
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
            made = await make(service, message, sampler_id)
            owner.log.append(Record({"what": "sampler", "asked": message.model_dump()}))
            await owner.log.synced()
            service.add_sampler(made)
    return service.samplers[sampler_id]


async def make(service: Service, message: CreateSamplingSession, sampler_id: str, *, again: bool = False) -> SamplingSession:
    """``again``: it was made before, and its weights were in order. Raises Refused: no such model or checkpoint."""
    path, base = message.model_path, message.base_model
    seed, num_bytes = service.host.seed, 0
    if path is None and base is not None:
        base = service.host.public_name(base)
        sampler = await asyncio.to_thread(service.host.base_sampler)
    elif path is not None:
        try:
            address = Address.parse(path)
            origin = service.catalogue.run(address.run_id)
            saved = _kept(service, message, address)
            load = service.host.kept_sampler if again else service.host.saved_sampler
            sampler = await asyncio.to_thread(load, saved, origin.seed)
        except CheckpointError as error:
            raise Refused(404, str(error)) from None
        num_bytes = file_bytes(saved)
        base, seed = origin.base_model, origin.seed
    else:
        raise Refused(422, "create_sampling_session: needs a base_model or a model_path")
    return SamplingSession(sampler_id, message.session_id, base, path, sampler, seed, num_bytes=num_bytes)


def _kept(service: Service, message: CreateSamplingSession, address: Address) -> Path:
    """The checkpoint's files, or where sessions are kept, links to them: it may be deleted while somebody samples from it.

    Raises:
        CheckpointError: it is not there.
    """
    place = service.durability.sampler_weights(f"{message.session_id}:sample:{message.sampling_session_seq_id}")
    if place.exists():
        return place
    service.catalogue.find(address)
    saved = service.catalogue.place(address)
    return service.durability.keep(saved, place) if service.durability.is_on else saved


def join(service: Service, sampler_id: str) -> int:
    """A number for one more client of a sampling session, from 1: the one that made it has 0. Raises Refused, 404."""
    session = service.sampler(sampler_id)
    session.joined += 1
    service.session(session.session_id).log.append(Record({"what": "joined", "sampler": sampler_id, "count": session.joined}))
    return session.joined


def sample(service: Service, message: Sample, body: bytes) -> Answer:
    """Raises Refused: no such session, what no repetition can mend, too much is pending, or the disk is full."""
    if service.samplers.was_let_go(message.sampling_session_id):
        return _too_late(service, message, body)
    session = service.sampler(message.sampling_session_id)
    try:
        prompt = prompt_of(service, message)
    except Refused:
        if session.gathering is not None:  # the others must not wait for it
            session.gathering.arrived(message.seq_id, lambda: None)
        raise
    log = service.session(session.session_id).samples
    is_due = session.gathering is not None  # the rest of the batch waits for it
    answer, new = service.answers.claim(log, session.sampler_id, message.seq_id, body, SAMPLE, is_due=is_due)
    if new:
        draw(service, session, message, prompt, answer)
    return answer


def _too_late(service: Service, message: Sample, body: bytes) -> Answer:
    """Fails a request to a sampler that was let go: through its future, as the client expects it of what depends on others."""
    sampler_id = message.sampling_session_id
    log = service.session(sampler_id.partition(":")[0]).samples
    answer, new = service.answers.claim(log, sampler_id, message.seq_id, body, SAMPLE)
    if new:
        error = RolloutError(
            f"asample: the weights of {sampler_id} were let go, newer ones needed the memory; make a new sampling client, or "
            "raise server.samplers_gb"
        )
        service.answers.settle(answer, failure(error))
    return answer


def draw(service: Service, session: SamplingSession, message: Sample, prompt: list[int], answer: Answer) -> None:
    """Answers a request, with those that are there by then."""
    successors = _successors(service, session, message, prompt)
    params = message.sampling_params.model_dump()
    if params["seed"] is None:
        params["seed"] = session.seed_of(message.seq_id)

    def told(done: Future[Any]) -> None:
        session.waiting -= 1
        error = done.exception() or (successors.exception() if successors is not None else None)
        if error is not None:
            service.answers.settle(answer, failure(error))
            return
        response = done.result()
        service.metrics.sampled_tokens += sum(len(one.tokens) for one in response.sequences)
        shown = None if successors is None else Successors(*successors.result())
        service.answers.settle(answer, sampled(response, message.prompt_logprobs_last_n, shown))

    session.waiting += 1

    def start() -> None:
        try:
            asked = session.sampler.sample(
                ModelInput.from_ints(prompt),
                message.num_samples,
                SamplingParams(**params),
                include_prompt_logprobs=bool(message.prompt_logprobs),
            )
        except CookbookError as error:
            session.waiting -= 1
            service.answers.settle(answer, failure(error))
        else:
            service.batcher.add(asked, told)

    if session.gathering is None:
        start()
    else:
        session.gathering.arrived(message.seq_id, start)


def announce(service: Service, message: Batch) -> None:
    """The next ``count`` requests of a sampling session are one batch. One announced before starts with what has come.

    Raises:
        Refused: no such session, or the disk is full.
    """
    session = service.sampler(message.sampling_session_id)
    batch = {"what": "batch", "sampler": message.sampling_session_id, "count": message.count}
    service.session(session.session_id).samples.append(Record(batch))
    gather(service, session, message.count)


def gather(service: Service, session: SamplingSession, count: int) -> None:
    """The next ``count`` requests are answered together."""
    if session.gathering is not None:
        session.gathering.end()

    def ended() -> None:
        session.gathering = None

    session.gathering = Gathering(count, service.config.gap_timeout_s, ended, service.batcher.together)


def _successors(service: Service, session: SamplingSession, message: Sample, prompt: list[int]) -> Future[Any] | None:
    """The likeliest successors of the prompt's tokens, when they are asked for. Computed before what is asked after it."""
    k = message.topk_prompt_logprobs
    if not k:
        return None
    return service.host.worker.submit(lambda: likeliest(session.sampler.engine(), prompt, k))


def prompt_of(service: Service, message: Sample) -> list[int]:
    """Raises Refused: it is longer than the model takes, or the request asks for what there is not."""
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
