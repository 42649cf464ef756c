"""Results of work that was promised."""

from __future__ import annotations

import json

from fastapi import APIRouter, Response

from cookbook.server import messages
from cookbook.server.results import JSON
from cookbook.server.routes.common import Body, Here, parsed, response

HOLD_S = 30.0  # the client hangs up after 45

router = APIRouter()


@router.post("/retrieve_future")
async def retrieve_future(service: Here, body: Body) -> Response:
    """The result, or after ``HOLD_S`` the advice to ask again."""
    request_id = parsed(messages.RetrieveFuture, body).request_id
    result = await service.answers.fetch(request_id, HOLD_S)
    if result is not None:
        return response(result)
    again = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
    return Response(json.dumps(again), media_type=JSON)
