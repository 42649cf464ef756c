"""Requests to training runs and sampling sessions, and their results."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any, TypeVar

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from starlette.requests import ClientDisconnect

from cookbook.backends.remote.connection import API
from cookbook.server.handlers import create_run, sampling, training
from cookbook.server.routes.common import (
    Body,
    CurrentService,
    DataBody,
    LoggedBody,
    PromptBody,
    acknowledge,
    json_body,
    unless_disconnected,
)
from cookbook.server.state.service import Service
from cookbook.server.wire import bodies
from cookbook.server.wire.encode import JSON, PROTOBUF
from cookbook.types import JsonObject

T = TypeVar("T")
router = APIRouter(prefix=API)

PROTOBUF_BODY = {"requestBody": {"required": True, "content": {PROTOBUF: {"schema": {"type": "string", "format": "binary"}}}}}
# Seconds for which a poll for results waits (long polling). Clients close the connection after 45 seconds.
LONG_POLL_S = 30.0


@router.post("/create_model", openapi_extra=json_body(bodies.CreateModel))
async def create_model(service: CurrentService, body: LoggedBody) -> JsonObject:
    """Create a training run; the result is a promise."""
    return await acknowledge(create_run.create(service, "create_model", bodies.parse(bodies.CreateModel, body), body))


@router.post("/get_info", openapi_extra=json_body(bodies.ModelBody))
async def get_info(service: CurrentService, body: Body) -> JsonObject:
    """Describe the model of a training run."""
    info, host = service.run(bodies.parse(bodies.ModelBody, body).model_id).info, service.host
    name = host.shown(info.base_model)
    model = {**asdict(host.info.model_data), "model_name": name, "tokenizer_id": host.public}
    return {
        "type": "get_info",
        "model_data": model,
        "model_id": info.run_id,
        "model_name": name,
        "is_lora": info.is_lora,
        "lora_rank": info.lora_rank,
    }


def _add_training_route(kind: str, openapi: dict[str, Any]) -> None:
    async def accept(service: CurrentService, body: LoggedBody) -> JsonObject:
        return await acknowledge(training.accept(service, kind, body))

    router.add_api_route(f"/{kind}", accept, methods=["POST"], name=kind, openapi_extra=openapi)


@router.post("/forward_backward", openapi_extra=PROTOBUF_BODY)
async def forward_backward(service: CurrentService, body: DataBody) -> JsonObject:
    """Accept a forward pass, or a forward and backward pass; the result is a promise."""
    parsed = await service.decoder.run(len(body), functools.partial(training.parse, "forward_backward", body))
    return await acknowledge(training.accept_parsed(service, parsed))


for _kind in ("optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external"):
    _add_training_route(_kind, json_body(training.BODY_BY_KIND[_kind][0]))


@router.post("/load_weights", openapi_extra=json_body(bodies.LoadWeights))
async def load_weights(service: CurrentService, body: LoggedBody) -> JsonObject:
    """Load a checkpoint into a training run."""
    fields = bodies.parse(bodies.LoadWeights, body)
    if fields.session_id is not None:
        return await acknowledge(create_run.create(service, "load_weights", fields, body))
    return await acknowledge(training.accept(service, "load_weights", body))


@router.post("/create_custom_loss", openapi_extra=json_body(bodies.CustomLoss))
async def create_custom_loss(service: CurrentService, body: Body) -> JsonObject:
    """Register a loss that is sent as a graph."""
    fields = await service.decoder.run(len(body), functools.partial(bodies.parse, bodies.CustomLoss, body))
    return await acknowledge(create_run.create_custom_loss(service, fields, body))


@router.post("/create_sampling_session", openapi_extra=json_body(bodies.CreateSamplingSession))
async def create_sampling_session(service: CurrentService, body: LoggedBody) -> JsonObject:
    """Create a sampler of the base model or of a checkpoint."""
    session = await sampling.create_sampling_session(service, bodies.parse(bodies.CreateSamplingSession, body))
    return {"type": "create_sampling_session", "sampling_session_id": session.sampler_id}


@router.post("/join_sampling_session", openapi_extra=json_body(bodies.SamplerBody))
async def join_sampling_session(service: CurrentService, body: Body) -> dict[str, int]:
    """Return the cursor of a sampling session."""
    return {"client_counter": await sampling.join(service, bodies.parse(bodies.SamplerBody, body).sampling_session_id)}


@router.get("/samplers/{sampler_id}")
async def sampler(service: CurrentService, sampler_id: str) -> JsonObject:
    """Describe a sampler."""
    session = service.sampler(sampler_id)
    return {
        "sampler_id": session.sampler_id,
        "base_model": service.host.shown(session.base_model),
        "model_path": session.model_path,
    }


@router.post("/asample", openapi_extra=json_body(bodies.SampleBody))
async def asample(service: CurrentService, body: PromptBody) -> JsonObject:
    """Sample completions of one prompt; the result is a promise."""
    fields = await service.decoder.run(len(body), functools.partial(bodies.parse, bodies.SampleBody, body))
    request = sampling.sample(service, fields, body)
    return await acknowledge(request, sample_sequence_ids=[f"{request.request_id}/{i}" for i in range(fields.num_samples)])


@router.post("/retrieve_future", openapi_extra=json_body(bodies.FutureBody))
async def retrieve_future(service: CurrentService, request: HttpRequest, body: Body) -> Response:
    """Return the result, or a ``try_again`` response after ``LONG_POLL_S`` seconds."""
    request_id = bodies.parse(bodies.FutureBody, body).request_id
    result = await _polled(service, request, request_id, service.fetch(request_id, LONG_POLL_S))
    if result is not None:
        body = service.without_paths(result.body.decode()).encode() if result.is_failure else result.body
        return Response(body, media_type=result.content_type)
    try_again = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
    return Response(json.dumps(try_again), media_type=JSON)


@router.post("/retrieve_futures", openapi_extra=json_body(bodies.RetrieveFutures))
async def retrieve_futures(service: CurrentService, request: HttpRequest, body: Body) -> JsonObject:
    """Return the requests of a sampling session that were settled after the client's cursor."""
    fields = bodies.parse(bodies.RetrieveFutures, body)
    sampler_id = fields.target.sampling_session_id
    # Do not refuse the client of an evicted sampler: it learns from this feed that its requests have failed.
    if not service.was_evicted(sampler_id):
        service.sampler(sampler_id)
    prefix = f"{sampler_id}/"
    service.requests.acknowledge(request_id for request_id in fields.retrieved_request_ids if request_id.startswith(prefix))
    wait_s = LONG_POLL_S if fields.timeout is None else min(fields.timeout, LONG_POLL_S)
    feed = service.requests.completions
    waiting = feed.after(sampler_id, fields.target.cloned_sampler_id, fields.prev_cursor, wait_s)
    completions, cursor = await _polled(service, request, sampler_id, waiting)
    return {"completions": completions, "cursor": cursor}


async def _polled(service: Service, request: HttpRequest, object_id: str, waiting: Coroutine[None, None, T]) -> T:
    """Return the result of ``waiting``, as long as the client of ``object_id`` is connected.

    Raises:
        ClientDisconnect: the client has disconnected; see :class:`Presence`.
        Refused: 503, the server has stopped the computation of all requests, because it ends.
    """
    session, task = service.heard(object_id), asyncio.current_task()
    assert task is not None
    if session is None:
        # The session is silent or has ended, or belongs to another key.
        return await waiting
    service.polls.add(task)
    try:
        with session.presence.poll():
            return await unless_disconnected(request, waiting)
    except ClientDisconnect:
        if session.session_id in service.sessions:
            session.presence.lost()
        raise
    except asyncio.CancelledError:
        if not service.requests.frozen:
            raise
        # Without this, the log of each shutdown would have a traceback per waiting client.
        task.uncancel()
        raise bodies.Refused(503, "the server is shutting down; retry later") from None
    finally:
        service.polls.discard(task)


@router.post("/cancel_future", status_code=204, openapi_extra=json_body(bodies.FutureBody))
async def cancel_future(service: CurrentService, body: Body) -> None:
    """Cancel a request. An unknown request is no error, because its result may have been dropped."""
    request_id = bodies.parse(bodies.FutureBody, body).request_id
    service.heard(request_id)
    if not service.tenants.hides(request_id):
        service.requests.cancel(request_id)
