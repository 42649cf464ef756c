"""What this server is and does beyond the protocol, for clients that are cookbook themselves."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Response

from cookbook import __version__
from cookbook.backends.remote.facts import WIRE
from cookbook.losses import LOSSES
from cookbook.server import messages, sampling
from cookbook.server.routes.common import Body, Here, takes

router = APIRouter()


@router.get("/cookbook")
async def about(service: Here) -> dict[str, Any]:
    """The losses it computes by name, and everything that decides the numbers of a run on it."""
    host = service.host
    return {
        "wire": WIRE,
        "version": __version__,
        "losses": list(LOSSES),
        "model": asdict(host.model),
        "digests": host.digests,
        "tokenizer": host.tokenizer_name,
        "max_length": host.max_length,
        "architecture": host.architecture,
        "num_parameters": host.num_parameters,
    }


@router.post("/cookbook/batch", status_code=204, openapi_extra=takes(messages.Batch))
async def batch(service: Here, body: Body) -> Response:
    """Announces samples that are to be computed together."""
    sampling.announce(service, messages.parsed(messages.Batch, body))
    return Response(status_code=204)
