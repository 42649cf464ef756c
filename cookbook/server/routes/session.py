"""Before and around the work: configuration of the client, sessions, their heartbeat and end."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Response

from cookbook.server import messages
from cookbook.server.routes.common import Body, Here, takes

router = APIRouter()


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.post("/client/config")
async def client_config(service: Here) -> dict[str, Any]:
    """One request a call: the whole batch is here at once, however large, so a loss may couple all of it."""
    chunk_bytes = service.config.max_request_mb * (
        1 << 19
    )  # half of what a request may hold: the client's count is an estimate
    return {
        "parallel_fwdbwd_chunks": False,
        "fwdbwd_max_chunk_len": 1 << 30,
        "fwdbwd_max_chunk_bytes_count": chunk_bytes,
        "fwdbwd_dispatch_bytes_semaphore_size": chunk_bytes,
        "custom_loss_server_side": True,
        "sample_use_retrieve_futures": True,
        "proto_compress_fwdbwd": not service.config.is_local,
    }


@router.post("/client/dynamic_config")
async def client_dynamic_config() -> dict[str, Any]:
    return {"sample_cancel_enabled": True}


@router.get("/get_server_capabilities")
async def capabilities(service: Here) -> dict[str, Any]:
    facts = {"max_context_length": service.host.max_length, "trainable": True, "sampleable": True}
    return {"supported_models": [{"model_name": name, **facts} for name in sorted(service.host.names)]}


@router.post("/create_session", openapi_extra=takes(messages.CreateSession))
async def create_session(
    service: Here, body: Body, x_idempotency_key: Annotated[str | None, Header()] = None
) -> dict[str, Any]:
    session = service.create_session(messages.parsed(messages.CreateSession, body), x_idempotency_key)
    await session.log.synced()
    return {"type": "create_session", "session_id": session.session_id}


@router.post("/session_heartbeat", openapi_extra=takes(messages.Heartbeat))
async def heartbeat(service: Here, body: Body) -> dict[str, Any]:
    service.session(messages.parsed(messages.Heartbeat, body).session_id)
    return {"type": "session_heartbeat"}


@router.post("/telemetry")
async def telemetry(body: Body) -> dict[str, Any]:
    """Read and not kept: it holds traces of other people's programs."""
    return {"status": "accepted"}


@router.post("/sessions/{session_id}/finish", status_code=204)
async def finish(service: Here, session_id: str) -> Response:
    """A repetition, whose first answer was lost, finds it ended: that is what it asks for."""
    if session_id in service.sessions:
        service.end_session(session_id)
    return Response(status_code=204)


@router.get("/sessions")
async def sessions(service: Here) -> dict[str, Any]:
    return {"sessions": list(service.sessions)}


@router.get("/sessions/{session_id}")
async def session(service: Here, session_id: str) -> dict[str, Any]:
    found = service.session(session_id)
    return {
        "training_run_ids": found.run_ids,
        "sampler_ids": found.sampler_ids,
        "user_metadata": found.user_metadata,
        "display_name": found.display_name,
    }
