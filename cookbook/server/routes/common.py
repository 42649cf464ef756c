"""Dependencies and helpers that the routes share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import Depends
from fastapi import Request as HttpRequest
from starlette.requests import ClientDisconnect

from cookbook.server.metrics import CLOSED_AT_END
from cookbook.server.state.body_decoder import INLINE_BYTES
from cookbook.server.state.requests import Request
from cookbook.server.state.service import Service
from cookbook.server.wire.bodies import Refused, RequestBody
from cookbook.server.wire.decode import MIB, decompress
from cookbook.server.wire.encode import JSON
from cookbook.server.wire.limits import TooComplexError, check_forward_backward, check_json
from cookbook.types import JsonObject

T = TypeVar("T")


def _count_bytes(resources: contextlib.ExitStack, service: Service, num_bytes: int) -> None:
    """Count bytes of the caller's bodies until ``resources`` is closed. Raises Refused (429): the caller has too many."""
    sharer = service.tenants.sharer_of_caller()
    service.uploads.hold(sharer, num_bytes)
    resources.callback(service.uploads.release, sharer, num_bytes)


async def service_of(request: HttpRequest) -> Service:
    """Return the application's service. A coroutine: FastAPI would run a function in another thread."""
    service: Service = request.app.state.service
    return service


CurrentService = Annotated[Service, Depends(service_of)]


def body_of(limit_bytes: int | None, check: Callable[[bytes], None]) -> Any:
    """Return the dependency of a route that reads bodies.

    Args:
        limit_bytes: limit on the bytes of a body, compressed or decompressed; None: only ``server.max_request_mb``.
        check: raises TooComplexError if a parser would build too many objects from the body.
    """

    async def read(request: HttpRequest, service: CurrentService) -> bytes:
        """Read and decompress the body. Raises Refused: it is too large, complex or slow, damaged, or has a bad encoding."""
        configured = service.config.max_request_mb * MIB
        limit = configured if limit_bytes is None else min(limit_bytes, configured)
        body = await service.uploads.read(request.stream(), limit)
        encoding = request.headers.get("content-encoding", "identity")

        def decode() -> bytes:
            decoded = decompress(body, encoding, limit)
            try:
                check(decoded)
            except TooComplexError as error:
                raise Refused(error.status, str(error)) from None
            return decoded

        if encoding == "identity" and len(body) <= INLINE_BYTES:
            return decode()
        with contextlib.ExitStack() as resources:
            _count_bytes(resources, service, len(body))
            # A compressed body of a few bytes may become large.
            decoded = await service.decoder.run(limit if encoding != "identity" else len(body), decode)
            if decoded is not body:
                _count_bytes(resources, service, len(decoded))
            # The handler parses the body, and keeps it until the response is complete.
            request.scope.setdefault(CLOSED_AT_END, []).append(resources.pop_all())
        return decoded

    return Depends(read)


# Small JSON: everything but prompts, graphs and data.
Body = Annotated[bytes, body_of(1 * MIB, check_json)]
# JSON of which the log keeps every byte for as long as its session or run exists: 64 KiB of metadata, and the other fields.
LoggedBody = Annotated[bytes, body_of(MIB // 8, check_json)]
# Prompts. Their number of tokens is bounded too: one call of a parser holds the interpreter lock, for which all clients wait.
PromptBody = Annotated[bytes, body_of(8 * MIB, check_json)]
# Data to train on.
DataBody = Annotated[bytes, body_of(None, check_forward_backward)]
# Files, whose handler checks their structure.
FileBody = Annotated[bytes, body_of(None, lambda _: None)]


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
