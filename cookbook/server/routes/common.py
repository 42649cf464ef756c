"""What the routes share."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request, Response

from cookbook.server.bodies import MIB, read_body
from cookbook.server.futures import Answer
from cookbook.server.messages import Message
from cookbook.server.results import JSON, Result
from cookbook.server.service import Service


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Here = Annotated[Service, Depends(service_of)]


async def body_of(request: Request, service: Here) -> bytes:
    return await read_body(request, service.config.max_request_mb * MIB)


Body = Annotated[bytes, Depends(body_of)]


def takes(kind: type[Message]) -> dict[str, Any]:
    """What the OpenAPI page says of a body that is read here, as bytes: they are logged, and compared with a repetition's."""
    whole = kind.model_json_schema()
    schema = _inlined(whole, whole.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {JSON: {"schema": schema}}}}


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """``schema`` with what it refers to in its place: a page has no room for definitions of a part."""
    if isinstance(schema, list):
        return [_inlined(one, definitions) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _inlined(value, definitions) for key, value in schema.items()}


async def promise(answer: Answer, **more: Any) -> dict[str, Any]:
    """What a client gets for work that takes its time, as soon as the request is safe."""
    await answer.log.synced()
    return {"request_id": answer.request_id, **more}


def response(result: Result) -> Response:
    return Response(result.body, media_type=result.content_type)
