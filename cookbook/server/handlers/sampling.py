"""Requests of sampling clients: sampling sessions, announced batches and samples."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from cookbook.backends import worker
from cookbook.errors import CookbookError, RolloutError
from cookbook.server.handlers.quotas import exceeded_quota
from cookbook.server.journal.log import Record
from cookbook.server.state.catalog import Address
from cookbook.server.state.requests import SAMPLE, Request
from cookbook.server.state.samplers import AnnouncedBatch, SamplingSession, file_bytes
from cookbook.server.state.service import Service
from cookbook.server.wire.bodies import CreateSamplingSession, Refused, SampleBatch, SampleBody, TargetIds
from cookbook.server.wire.encode import PromptExtras, StoredResult, failure, sample_result
from cookbook.types import Array, ModelInput, SampleResponse, SamplingParams

# Larger results take more than about 10 ms to encode.
LARGE_RESULT_TOKENS = 100_000
UNSUPPORTED_FIELDS = ("prompt_alt_tokens_k",)
# Bytes of a token id and a logprob in a result.
SCORE_BYTES = 8


async def create_sampling_session(service: Service, fields: CreateSamplingSession) -> SamplingSession:
    """Create a sampling session; a retry returns the existing one.

    Raises:
        CheckpointError: the checkpoint does not exist.
        Refused: the session or the model is unknown; the disk is full.
    """
    owner = service.session(fields.session_id)
    sampler_id = f"{owner.session_id}:sample:{fields.sampling_session_seq_id}"
    # A retry may arrive while the first request loads the weights, so the lock is held during the load.
    async with service.sampler_lock:
        if sampler_id not in service.samplers:
            sampler = await load_sampler(service, fields, sampler_id)
            # The record must be durable before the client learns the id, so that a restart recovers the session.
            owner.log.append(Record({"what": "sampler", "asked": fields.model_dump()}))
            await owner.log.synced()
            service.add_sampler(sampler)
    return service.samplers[sampler_id]


async def load_sampler(
    service: Service, fields: CreateSamplingSession, sampler_id: str, *, lazy: bool = False
) -> SamplingSession:
    """Create a sampling session. ``lazy``: load its checkpoint at the first request.

    Raises:
        CheckpointError: the checkpoint does not exist.
        Refused: the model or the run of the checkpoint is unknown, the request names neither model nor checkpoint, or the disk
            is full.
    """
    host, path, queue = service.host, fields.model_path, service.session(fields.session_id).queue
    if path is None:
        if fields.base_model is None:
            raise Refused(422, "create_sampling_session: expected base_model or model_path, got neither; send one of them")
        base = host.public_name(fields.base_model)
        sampler = await asyncio.to_thread(host.base_sampler)
        return SamplingSession(sampler_id, fields.session_id, base, None, sampler.on(queue), host.seed)
    address = Address.parse(path)
    origin = service.catalog.run(address.run_id)
    checkpoint = service.linked_checkpoint(address, service.durability.sampler_weights(sampler_id), sampler_id)
    load = host.lazy_sampler if lazy else host.checkpoint_sampler
    sampler = await asyncio.to_thread(load, checkpoint, origin.seed)
    base, num_bytes = origin.base_model, file_bytes(checkpoint)
    return SamplingSession(sampler_id, fields.session_id, base, path, sampler.on(queue), origin.seed, num_bytes=num_bytes)


async def join(service: Service, sampler_id: str) -> int:
    """Return the number, from 1, of another client that joins a sampling session; the session's creator has number 0.

    Raises:
        Refused: 404, the session is unknown; 507, the disk is full.
    """
    session = service.session(service.sampler(sampler_id).session_id)
    number = session.num_joined[sampler_id] + 1
    session.log.append(Record({"what": "joined", "sampler": sampler_id, "count": number}))
    session.num_joined[sampler_id] = number
    # Before the client learns its number: after a restart another client must not get the same one.
    await session.log.synced()
    return number


def sample(service: Service, fields: SampleBody, body: bytes) -> Request:
    """Accept a request for samples.

    Raises:
        Refused: the sampling session is unknown, the request is invalid, too many bytes are pending, or the disk is full.
    """
    request = Request(fields.sampling_session_id, fields.seq_id, SAMPLE, body)
    if service.was_evicted(fields.sampling_session_id):
        return _refuse_evicted(service, request, body)
    session = service.sampler(fields.sampling_session_id)
    try:
        prompt = prompt_of(service, fields)
        if not service.requests.is_known(request):
            pending, num_tokens = service.sessions[session.session_id].pending_tokens, _num_tokens(service, fields, prompt)
            is_batch = session.batch is not None
            owner = service.tenants.owner_of(session.session_id)
            scores = len(prompt) * fields.topk_prompt_logprobs + num_tokens * fields.topk_sample_logprobs
            limit = exceeded_limit(
                service, owner, pending, len(prompt), fields.num_samples, num_tokens, is_batch=is_batch, num_scores=scores
            )
            if limit is not None:
                raise Refused(limit[0], f"asample: {limit[1]}")
    except Refused:
        if session.batch is not None:
            # Count the refused request as arrived, so that the rest of the batch does not wait for it.
            session.batch.add(fields.seq_id, lambda: None)
        raise
    log = service.session(session.session_id).samples
    request, is_new = service.requests.accept(log, request, body, is_due=session.batch is not None)
    if is_new:
        compute(service, session, fields, prompt, request)
    return request


def _num_tokens(service: Service, fields: SampleBody, prompt: list[int]) -> int:
    """Return the largest number of tokens that a request draws."""
    limit = fields.sampling_params.max_tokens
    return fields.num_samples * max(service.host.info.max_context_length - len(prompt) if limit is None else limit, 0)


def exceeded_limit(
    service: Service,
    owner: str | None,
    pending: int,
    prompt_tokens: int,
    num_samples: int,
    num_tokens: int,
    *,
    is_batch: bool = False,
    num_scores: int = 0,
) -> tuple[int, str] | None:
    """Return a status and a message if a request exceeds a limit on its own, or together with unfinished ones of its client.

    Args:
        owner: name of the API key.
        pending: largest number of tokens that the unfinished requests of the client draw.
        num_tokens: largest number of tokens that the request draws.
        num_scores: number of most likely tokens that the result has, over all positions.
        is_batch: the request belongs to an announced batch, which waits for it, so the client must not retry it later.

    Returns:
        400: the request is too large; 429: the client has too much unfinished work, and retries later; None: no limit is
        exceeded.
    """
    config = service.config
    if num_tokens > config.max_request_tokens:
        return 400, (
            f"the number of samples times max_tokens is {num_tokens:,}, above server.max_request_tokens="
            f"{config.max_request_tokens:,}; send several smaller requests"
        )
    num_bytes = service.host.sampling_bytes(prompt_tokens, num_samples, num_tokens) + SCORE_BYTES * num_scores
    gigabytes = num_bytes / (1 << 30)
    if gigabytes > config.max_request_gb:
        return 400, (
            f"the request would take about {gigabytes:.1f} GB, above server.max_request_gb={config.max_request_gb:g}; "
            "lower the number of samples or max_tokens"
        )
    status = 400 if is_batch else 429
    if (message := exceeded_quota(service, owner, num_tokens)) is not None:
        return status, message
    if pending + num_tokens > config.max_session_tokens and pending:
        return status, (
            f"{pending:,} tokens of this client are pending and {num_tokens:,} more exceed "
            f"server.max_session_tokens={config.max_session_tokens:,}; wait for earlier requests"
        )
    return None


def _refuse_evicted(service: Service, request: Request, body: bytes) -> Request:
    """Accept a request to an evicted sampler, and settle it with an error: clients expect this error as a result."""
    log = service.session(request.scope.partition(":")[0]).samples
    request, is_new = service.requests.accept(log, request, body)
    if is_new:
        error = RolloutError(
            f"asample: the weights of {request.scope} were evicted to free memory for newer ones; create a new sampling "
            "client, or raise server.samplers_gb"
        )
        service.requests.settle(request, failure(error))
    return request


def compute(service: Service, session: SamplingSession, fields: SampleBody, prompt: list[int], request: Request) -> None:
    """Compute an accepted request, in a batch with other requests that arrive before the worker starts it."""
    owner = service.sessions[session.session_id]
    if not request.settled.is_set():
        request.num_tokens = _num_tokens(service, fields, prompt)
        owner.pending_tokens += request.num_tokens
    # If the request asks for them: the k most likely tokens at each position of the prompt, and the logprobs of others there.
    k, topk, target_ids, targets = fields.topk_prompt_logprobs, None, fields.target_prompt_logprobs, None
    with worker.purpose(request.request_id):
        if k:
            topk = owner.lane.submit(functools.partial(_most_likely, session, request, prompt, k))
        if target_ids is not None:
            targets = owner.lane.submit(functools.partial(_target_logprobs, session, request, prompt, target_ids))
    params = fields.sampling_params.model_dump()
    if params["seed"] is None:
        params["seed"] = session.seed_of(fields.seq_id)

    def finish(samples: Future[SampleResponse]) -> None:
        session.num_pending -= 1
        # Drop the reference to the samples: the store keeps the request.
        request.stop = None
        # The lane has computed the scores before the samples.
        error = samples.exception() or (topk.exception() if topk is not None else None)
        error = error or (targets.exception() if targets is not None else None)
        if error is not None:
            service.requests.settle(request, failure(error))
            return
        response = samples.result()
        num_tokens = sum(len(sequence.tokens) for sequence in response.sequences)
        service.metrics.sampled_tokens += num_tokens
        target_logprobs = targets.result() if targets is not None else None
        extras = PromptExtras(
            fields.prompt_logprobs_last_n,
            None if topk is None else topk.result(),
            targets=None if target_ids is None or target_logprobs is None else (target_ids, target_logprobs),
        )
        encode = functools.partial(sample_result, response, extras)
        if fields.topk_sample_logprobs:
            service.spawn(_settle_with_top(service, session, fields, prompt, request, response, extras))
        elif num_tokens <= LARGE_RESULT_TOKENS:
            service.requests.settle(request, encode())
        else:
            service.spawn(_settle_large(service, request, encode))

    session.num_pending += 1

    def start() -> None:
        if request.is_cancelled:
            session.num_pending -= 1
            return
        request.start()
        try:
            samples = session.sampler.sample(
                ModelInput.from_ints(prompt),
                fields.num_samples,
                SamplingParams(**params),
                include_prompt_logprobs=bool(fields.prompt_logprobs),
            )
        except CookbookError as error:
            session.num_pending -= 1
            service.requests.settle(request, failure(error))
        else:
            request.stop = samples.stop
            owner.batcher.add(request.request_id, samples, finish)

    if session.batch is None:
        start()
    else:
        session.batch.add(fields.seq_id, start)


def _most_likely(session: SamplingSession, request: Request, prompt: list[int], k: int) -> tuple[Array, Array] | None:
    """Compute the ``k`` most likely tokens at each position of ``prompt``; None if the request is cancelled."""
    return None if request.is_cancelled else session.sampler.engine().passes.top_logprobs(prompt, k)


def _target_places(target_ids: TargetIds, prompt: list[int]) -> tuple[Array, Array]:
    """Return the position of the token before each id, ``(N,)``, and the ids, ``(N,)``. Raises Refused (400): a bad shape."""
    num_rows, width = len(prompt) - 1, target_ids.shape[1]
    ids = np.asarray(target_ids.data, dtype=np.int64)
    if target_ids.shape[0] != num_rows:
        raise Refused(
            400,
            f"asample: target_prompt_logprobs: expected {num_rows} rows, one per token but the first, "
            f"got {target_ids.shape[0]}",
        )
    if target_ids.sparse_crow_indices is None:
        counts = np.full(num_rows, width) if len(ids) == num_rows * width else None
    else:
        crows = np.asarray(target_ids.sparse_crow_indices, dtype=np.int64)
        columns = np.asarray(target_ids.sparse_col_indices or [], dtype=np.int64)
        counts = np.diff(crows)
        is_whole = len(crows) == num_rows + 1 and crows[0] == 0 and crows[-1] == len(ids) == len(columns)
        is_inside = not len(columns) or (columns.min() >= 0 and columns.max() < width)
        counts = counts if is_whole and is_inside and (counts >= 0).all() else None
    if counts is None:
        raise Refused(
            400,
            f"asample: target_prompt_logprobs: {len(ids)} ids do not fill the shape {list(target_ids.shape)}; "
            "send one per cell",
        )
    return np.repeat(np.arange(num_rows), counts), ids


def _target_logprobs(session: SamplingSession, request: Request, prompt: list[int], target_ids: TargetIds) -> Array | None:
    """Compute the logprobs of the tokens that a request names, 0 for cells without a token; None if it is cancelled."""
    if request.is_cancelled:
        return None
    rows, ids = _target_places(target_ids, prompt)
    logprobs = np.zeros(len(ids), dtype=np.float32)
    is_token = ids >= 0
    if is_token.any():
        logprobs[is_token] = session.sampler.engine().passes.target_logprobs(prompt, rows[is_token], ids[is_token])
    return logprobs


async def _settle_with_top(
    service: Service,
    session: SamplingSession,
    fields: SampleBody,
    prompt: list[int],
    request: Request,
    response: SampleResponse,
    extras: PromptExtras,
) -> None:
    """Compute the most likely tokens at each sampled position, at the temperature of the request, and settle it."""
    k, temperature, start = fields.topk_sample_logprobs, fields.sampling_params.temperature or 1.0, len(prompt) - 1

    def top(tokens: list[int]) -> tuple[Array, Array]:
        ids, logprobs = session.sampler.engine().passes.top_logprobs(tokens, k, temperature)
        return ids[start:], logprobs[start:]

    try:
        lane, sampled = service.open_session(session.session_id).lane, list[tuple[Array, Array]]()
        for sequence in response.sequences:
            with worker.purpose(request.request_id):
                job = lane.submit(functools.partial(top, [*prompt, *sequence.tokens]))
            sampled.append(await asyncio.wrap_future(job))
        result = await asyncio.to_thread(sample_result, response, replace(extras, sampled=sampled))
    except Exception as error:  # noqa: BLE001 - reported as the result of the request
        result = failure(error)
    service.requests.settle(request, result)


async def _settle_large(service: Service, request: Request, encode: Callable[[], StoredResult]) -> None:
    """Encode a result on another thread, because the event loop answers other clients meanwhile."""
    service.requests.settle(request, await asyncio.to_thread(encode))


async def announce(service: Service, fields: SampleBatch) -> None:
    """Compute the next ``count`` requests to a sampling session as one batch. An earlier incomplete batch starts immediately.

    Raises:
        Refused: the session is unknown, or the disk is full.
    """
    session = service.sampler(fields.sampling_session_id)
    record = Record({"what": "batch", "sampler": fields.sampling_session_id, "count": fields.count})
    log = service.session(session.session_id).samples
    log.append(record)
    begin_batch(service, session, fields.count)
    await log.synced()


def begin_batch(service: Service, session: SamplingSession, count: int) -> None:
    """Collect the next ``count`` requests to a sampling session in one batch."""
    if session.batch is not None:
        session.batch.start()
    session.batch = AnnouncedBatch(session, service.sessions[session.session_id].batcher, count, service.config.gap_timeout_s)


def prompt_of(service: Service, fields: SampleBody) -> list[int]:
    """Return the tokens of the prompt. Raises Refused: a field is invalid or unsupported, or the prompt has a bad length."""
    if any(chunk.type != "encoded_text" for chunk in fields.prompt.chunks):
        raise Refused(400, "asample: the prompt contains a chunk that is not text; send encoded_text chunks only")
    for name in UNSUPPORTED_FIELDS:
        if getattr(fields, name):
            raise Refused(400, f"asample: this server does not support {name}; leave it out")
    vocabulary_size = service.host.vocabulary_size
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if (k := getattr(fields, name)) > vocabulary_size:
            raise Refused(400, f"asample: {name}: expected at most {vocabulary_size}, the vocabulary size, got {k}")
    prompt = [token for chunk in fields.prompt.chunks for token in chunk.tokens]
    limit, context = fields.sampling_params.max_tokens, service.host.info.max_context_length
    if not prompt:
        raise Refused(400, "asample: the prompt is empty; send at least one token")
    if limit is not None and limit < 1:
        raise Refused(400, f"asample: max_tokens: expected at least 1, got {limit}; raise it, or leave it out")
    if len(prompt) + (limit or 1) > context:
        raise Refused(
            400,
            f"asample: {len(prompt)} prompt tokens and max_tokens={limit} exceed the context of {context} tokens; shorten the "
            "prompt or lower max_tokens",
        )
    if (target_ids := fields.target_prompt_logprobs) is not None:
        ids = _target_places(target_ids, prompt)[1]
        if len(ids) and not -1 <= ids.min() <= ids.max() < vocabulary_size:
            raise Refused(400, f"asample: target_prompt_logprobs: expected ids below {vocabulary_size}, or -1, got others")
    return prompt
