"""What Prometheus reads, where it looks for it."""

from __future__ import annotations

from fastapi import APIRouter, Response

from cookbook.server.metrics import CONTENT_TYPE
from cookbook.server.routes.common import Here

router = APIRouter()


@router.get("/metrics")
async def metrics(service: Here) -> Response:
    return Response(service.metrics.exposition(service), media_type=CONTENT_TYPE)
