"""Results of work that was promised."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Response

from cookbook.server import messages
from cookbook.server.results import JSON
from cookbook.server.routes.common import Body, Here, response, takes

HOLD_S = 30.0  # the client hangs up after 45

router = APIRouter()


@router.post("/retrieve_future", openapi_extra=takes(messages.RetrieveFuture))
async def retrieve_future(service: Here, body: Body) -> Response:
    """The result, or after ``HOLD_S`` the advice to ask again."""
    request_id = messages.parsed(messages.RetrieveFuture, body).request_id
    result = await service.answers.fetch(request_id, HOLD_S)
    if result is not None:
        return response(result)
    again = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
    return Response(json.dumps(again), media_type=JSON)


@router.post("/retrieve_futures", openapi_extra=takes(messages.RetrieveFutures))
async def retrieve_futures(service: Here, body: Body) -> dict[str, Any]:
    """Which requests of a sampling session were answered since the client last asked."""
    message = messages.parsed(messages.RetrieveFutures, body)
    sampler_id = message.target.sampling_session_id
    if not service.samplers.was_let_go(sampler_id):  # of one that was, it is told what its requests failed with
        service.sampler(sampler_id)
    of_session = f"{sampler_id}/"
    service.answers.acknowledge(one for one in message.retrieved_request_ids if one.startswith(of_session))
    wait_s = HOLD_S if message.timeout is None else min(message.timeout, HOLD_S)
    feed = service.answers.completions
    completions, cursor = await feed.after(sampler_id, message.target.cloned_sampler_id, message.prev_cursor, wait_s)
    return {"completions": completions, "cursor": cursor}


@router.post("/cancel_future", status_code=204, openapi_extra=takes(messages.CancelFuture))
async def cancel_future(service: Here, body: Body) -> Response:
    service.answers.cancel(messages.parsed(messages.CancelFuture, body).request_id)
    return Response(status_code=204)
