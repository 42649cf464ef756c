"""Dependencies and helpers that the routes share."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Annotated, TypeVar

from fastapi import Depends
from fastapi import Request as HttpRequest
from starlette.requests import ClientDisconnect

from cookbook.server.state.requests import Request
from cookbook.server.state.service import Service
from cookbook.server.wire.bodies import RequestBody
from cookbook.server.wire.decode import MIB, decompress
from cookbook.server.wire.encode import JSON
from cookbook.types import JsonObject

T = TypeVar("T")


async def service_of(request: HttpRequest) -> Service:
    """Return the application's service. A coroutine: FastAPI would run a function in another thread."""
    service: Service = request.app.state.service
    return service


CurrentService = Annotated[Service, Depends(service_of)]


async def body_of(request: HttpRequest, service: CurrentService) -> bytes:
    """Read and decompress the body. Raises Refused: it is too large, too slow, damaged, or has an unknown encoding."""
    limit = service.config.max_request_mb * MIB
    body = await service.uploads.read(request.stream(), limit)
    return decompress(body, request.headers.get("content-encoding", "identity"), limit)


Body = Annotated[bytes, Depends(body_of)]


def json_body(kind: type[RequestBody]) -> dict[str, object]:
    """Return the OpenAPI entry of a JSON body that the route reads as raw bytes.

    Routes read bytes, not models, because requests are logged as received and compared with their retries.
    """
    model = kind.model_json_schema()
    schema = _inline_definitions(model, model.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {JSON: {"schema": schema}}}}


def _inline_definitions(schema: object, definitions: JsonObject) -> object:
    """Replace references by their definitions, because the OpenAPI entry of a route cannot contain definitions."""
    if isinstance(schema, list):
        return [_inline_definitions(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline_definitions(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _inline_definitions(value, definitions) for key, value in schema.items()}


async def acknowledge(request: Request, **more: object) -> JsonObject:
    """Wait until the request is durable, and return its id, with which the client fetches the result.

    The order matters: a client never repeats an acknowledged request, so an acknowledged request must not be lost.
    """
    await request.log.synced()
    return {"request_id": request.request_id, **more}


async def unless_disconnected(request: HttpRequest, work: Coroutine[None, None, T]) -> T:
    """Return the result of ``work``. Raises ClientDisconnect: the client has disconnected, and ``work`` is cancelled."""
    working, gone = asyncio.create_task(work), asyncio.create_task(_disconnect(request))
    # An unread error would be logged.
    working.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        gone.cancel()
        working.cancel()


async def _disconnect(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
