"""What the routes share."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request, Response
from pydantic import ValidationError

from cookbook.server.bodies import MIB, read_body
from cookbook.server.errors import Refused
from cookbook.server.futures import Answer
from cookbook.server.messages import Message
from cookbook.server.results import Result
from cookbook.server.service import Service

M = TypeVar("M", bound=Message)


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Here = Annotated[Service, Depends(service_of)]


async def body_of(request: Request, service: Here) -> bytes:
    return await read_body(request, service.config.max_request_mb * MIB)


Body = Annotated[bytes, Depends(body_of)]


def parsed(kind: type[M], body: bytes) -> M:
    """Raises Refused, 422: the body is not such a message."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise Refused(422, f"{kind.__name__}: {where}: {first['msg']}") from None


def promise(answer: Answer, **more: Any) -> dict[str, Any]:
    """What a client gets at once for work that takes its time."""
    return {"request_id": answer.request_id, **more}


def response(result: Result) -> Response:
    return Response(result.body, media_type=result.content_type)
