"""What the routes share."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request, Response

from cookbook.server.bodies import MIB, read_body
from cookbook.server.futures import Answer
from cookbook.server.results import Result
from cookbook.server.service import Service


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Here = Annotated[Service, Depends(service_of)]


async def body_of(request: Request, service: Here) -> bytes:
    return await read_body(request, service.config.max_request_mb * MIB)


Body = Annotated[bytes, Depends(body_of)]


async def promise(answer: Answer, **more: Any) -> dict[str, Any]:
    """What a client gets for work that takes its time, as soon as the request is safe."""
    await answer.log.synced()
    return {"request_id": answer.request_id, **more}


def response(result: Result) -> Response:
    return Response(result.body, media_type=result.content_type)
