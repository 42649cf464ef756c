"""Sessions (creation, heartbeat, end), client configuration, and information about the server."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Header, Response
from fastapi.responses import FileResponse

from cookbook.backends.remote.connection import API, WIRE
from cookbook.checkpoints import manifest
from cookbook.losses import LOSSES
from cookbook.server.handlers import sampling
from cookbook.server.metrics import CONTENT_TYPE
from cookbook.server.routes.common import Body, CurrentService, LoggedBody, json_body
from cookbook.server.state.service import Service
from cookbook.server.wire import bodies
from cookbook.server.wire.encode import JSON
from cookbook.types import JsonObject
from cookbook.utils.version import __version__

router = APIRouter(prefix=API)
TEXT_FILES = (".json", ".md", ".jinja")
# Without the prefix /api/v1: Prometheus expects /metrics.
metrics_router = APIRouter()


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Report that the server runs; needs no key."""
    return {"status": "ok"}


@router.post("/client/config", openapi_extra=json_body(bodies.ClientConfig))
async def client_config(service: CurrentService, body: Body) -> JsonObject:
    """Configure the client to send a batch as one request, because a loss may depend on all datums of a batch.

    This is the first request of every client, so that a client that is too old learns it immediately.
    """
    if body:
        bodies.check_version("client/config", bodies.parse(bodies.ClientConfig, body).sdk_version)
    # Half the request limit: the client only estimates sizes.
    chunk_bytes = service.config.max_request_mb * (1 << 19)
    return {
        "parallel_fwdbwd_chunks": False,
        "fwdbwd_max_chunk_len": 1 << 30,
        "fwdbwd_max_chunk_bytes_count": chunk_bytes,
        "fwdbwd_dispatch_bytes_semaphore_size": chunk_bytes,
        "custom_loss_server_side": True,
        "sample_use_retrieve_futures": True,
        "proto_compress_fwdbwd": not service.config.is_local,
        # The threads of the client's other transport abort Python, below 3.14, if it ends while a request is under way.
        "use_pyqwest_transport": False,
    }


@router.post("/client/dynamic_config")
async def client_dynamic_config() -> JsonObject:
    """Return limits that the client reads while it runs."""
    return {"sample_cancel_enabled": True}


@router.get("/get_server_capabilities")
async def capabilities(service: CurrentService) -> JsonObject:
    """List the models that the server trains and samples from."""
    features = {"max_context_length": service.host.info.max_context_length, "trainable": True, "sampleable": True}
    return {"supported_models": [{"model_name": name, **features} for name in sorted(service.host.public_names)]}


@router.post("/create_session", openapi_extra=json_body(bodies.CreateSession))
async def create_session(
    service: CurrentService, body: LoggedBody, x_idempotency_key: Annotated[str | None, Header()] = None
) -> JsonObject:
    """Create a session, which all requests of one client belong to."""
    fields = bodies.parse(bodies.CreateSession, body)
    bodies.check_version("create_session", fields.sdk_version)
    session = service.create_session(fields, x_idempotency_key)
    await session.log.synced()
    return {"type": "create_session", "session_id": session.session_id}


@router.post("/session_heartbeat", openapi_extra=json_body(bodies.SessionBody))
async def heartbeat(service: CurrentService, body: Body) -> JsonObject:
    """Keep a session from expiring."""
    service.session(bodies.parse(bodies.SessionBody, body).session_id)
    return {"type": "session_heartbeat"}


@router.post("/telemetry")
async def telemetry(body: Body) -> JsonObject:
    """Discard telemetry: it contains tracebacks of users' programs."""
    return {"status": "accepted"}


@router.post("/sessions/{session_id}/finish", status_code=204)
async def finish(service: CurrentService, session_id: str) -> None:
    """End the session. An unknown session is no error, so that a retry after a lost response succeeds."""
    if service.tenants.hides(session_id):
        return
    if session_id in service.sessions:
        service.end_session(session_id)
    elif session_id in service.silent:
        service.delete_silent(session_id)


@router.get("/sessions")
async def sessions(service: CurrentService) -> JsonObject:
    """List the caller's sessions."""
    return {"sessions": [session_id for session_id in service.sessions if not service.tenants.hides(session_id)]}


@router.get("/sessions/{session_id}")
async def session_info(service: CurrentService, session_id: str) -> JsonObject:
    """Describe a session."""
    session = service.session(session_id)
    return {
        "training_run_ids": session.run_ids,
        "sampler_ids": session.sampler_ids,
        "user_metadata": session.header["user_metadata"],
        "display_name": session.header["display_name"],
    }


@router.get("/cookbook")
async def server_info(service: CurrentService) -> JsonObject:
    """Return the losses that the server knows by name, and every setting that affects the results of a run."""
    host, info = service.host, service.host.info
    return {
        "wire": WIRE,
        "version": __version__,
        "losses": list(LOSSES),
        "model": {**asdict(host.model), "name": host.public},
        "digests": host.digests,
        "tokenizer": host.public,
        "max_length": info.max_context_length,
        "architecture": info.model_data.arch,
        "num_parameters": info.num_parameters,
    }


@router.post("/cookbook/batch", status_code=204, openapi_extra=json_body(bodies.SampleBatch))
async def announce_batch(service: CurrentService, body: Body) -> None:
    """Announce a batch of samples; see :func:`sampling.announce`."""
    await sampling.announce(service, bodies.parse(bodies.SampleBatch, body))


@router.get("/download/{token}/{file:path}", name="download")
async def download(service: CurrentService, token: str, file: str) -> Response:
    """Return a file of a checkpoint.

    If the server has keys, the public name of the base model replaces its folder in text files. A server without keys is for
    one person, whose programs find the base model of an adapter by its folder.
    """
    path = service.downloads.open(token, file)
    if path.suffix not in TEXT_FILES or not service.tenants.keys.keys:
        return FileResponse(path)
    change = service.without_paths
    if file == manifest.NAME:
        return Response(manifest.rewritten(path.parent, change, TEXT_FILES), media_type=JSON)
    return Response(change(path.read_text(encoding="utf-8")), media_type=JSON)


@metrics_router.get("/metrics")
async def metrics(service: CurrentService) -> Response:
    """Return the metrics of the server in the format of Prometheus."""
    return Response(service.metrics.exposition(_gauges(service)), media_type=CONTENT_TYPE)


def _gauges(service: Service) -> list[tuple[str, str, float]]:
    """Return the gauges for the metrics: name, help text and value."""
    logs = [log for session in service.sessions.values() for log in (session.log, session.samples)]
    log_bytes = sum(log.num_bytes for log in [*logs, *(run.log for run in service.runs.values())])
    uploads = service.uploads
    pending_bytes = service.requests.pending_bytes + uploads.num_bytes + uploads.complete_bytes.total()
    num_paused = sum(session.presence.is_paused for session in service.sessions.values())
    idle = service.host.idle
    num_drawn = service.endpoint.num_drawn + sum(session.queue.num_drawn for session in service.sessions.values())
    return [
        ("calls_pending", "Requests that are accepted and not settled.", len(service.requests.unsettled())),
        ("endpoint_pending", "Requests of the endpoint that are not answered.", service.endpoint.num_unfinished),
        ("silent_sessions", "Sessions on disk only, because their clients are silent.", len(service.silent)),
        ("sessions", "Open sessions; each client has one.", len(service.sessions)),
        ("paused_sessions", "Open sessions whose sampling is paused, because their clients have vanished.", num_paused),
        ("drawn_tokens", "Tokens of unfinished samples, in memory.", num_drawn),
        ("training_runs", "Training runs in memory.", len(service.runs)),
        ("samplers", "Sampling sessions in memory.", len(service.samplers)),
        ("samplers_let_go_total", "Sampling sessions that were evicted.", service.samplers.num_evicted),
        ("sampler_bytes", "Bytes of weights that only sampling sessions use.", service.samplers.num_bytes),
        ("answers", "Requests in memory, settled or not.", len(service.requests)),
        ("pending_bytes", "Bytes of requests that are not settled, and of incomplete uploads.", pending_bytes),
        ("log_bytes", "Bytes of logs on disk, without snapshots.", log_bytes),
        ("result_bytes", "Bytes of results kept for clients.", service.requests.kept_bytes),
        ("adapter_bytes", "Bytes of weights and optimizer state of LoRA runs in memory.", idle.num_bytes if idle else 0),
        ("stored_adapters", "LoRA runs whose weights and optimizer state are in files.", idle.num_stored if idle else 0),
        ("graph_bytes", "Bytes of forward passes kept for a backward pass.", service.host.graphs.num_bytes),
    ]
