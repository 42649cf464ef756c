"""Lists of training runs and checkpoints, and changes to single checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, Header, Request

from cookbook.backends.remote.connection import API
from cookbook.errors import ConfigError
from cookbook.server.handlers import adapters, copies
from cookbook.server.routes.common import Body, CurrentService, FileBody, json_body
from cookbook.server.state.catalog import TYPES, Address, CheckpointRecord, RunInfo
from cookbook.server.state.service import Service
from cookbook.server.wire import bodies
from cookbook.types import JsonObject

OWNER = "cookbook"
# Largest number of entries of a page.
MAX_LIMIT = 1000
T = TypeVar("T")

router = APIRouter(prefix=API)


@router.get("/training_runs")
async def training_runs(service: CurrentService, limit: int = 20, offset: int = 0) -> JsonObject:
    """List the caller's training runs."""
    runs, cursor = _page(service.own_runs(), limit, offset)
    described = []
    for info in runs:
        described.append(_run(service, info))
        # Each description reads three files. Other clients are answered between them.
        await asyncio.sleep(0)
    return {"training_runs": described, "cursor": cursor}


@router.get("/training_runs/{run_id}")
async def training_run(service: CurrentService, run_id: str) -> JsonObject:
    """Describe one training run."""
    return _run(service, service.run_info(run_id))


@router.get("/training_runs/{run_id}/checkpoints")
async def checkpoints_of_run(service: CurrentService, run_id: str) -> JsonObject:
    """List the checkpoints of a training run."""
    service.run_info(run_id)
    return {"checkpoints": await _described(service, service.catalog.of_run(run_id))}


@router.get("/checkpoints")
async def checkpoints(service: CurrentService, limit: int = 100, offset: int = 0) -> JsonObject:
    """List the caller's checkpoints."""
    page, cursor = _page(service.catalog.of_runs(service.own_runs()), limit, offset)
    return {"checkpoints": await _described(service, page), "cursor": cursor}


async def _own(service: CurrentService, run_id: str, kind: str, name: str) -> Address:
    """Return the address of a checkpoint that the caller may change. Raises CheckpointError: the checkpoint is unknown."""
    return service.own_checkpoint(Address(run_id, kind, name)).address


async def _readable(service: CurrentService, run_id: str, kind: str, name: str) -> Address:
    """Return the address of a checkpoint that the caller may read. Raises CheckpointError: the checkpoint is unknown."""
    return service.readable_checkpoint(Address(run_id, kind, name)).address


Own = Annotated[Address, Depends(_own)]
Readable = Annotated[Address, Depends(_readable)]
CHECKPOINT = "/training_runs/{run_id}/checkpoints/{kind}/{name}"


@router.delete(CHECKPOINT, status_code=204)
async def delete(service: CurrentService, address: Own) -> None:
    """Delete a checkpoint."""
    service.catalog.delete(address)


@router.post(f"{CHECKPOINT}/publish", status_code=204)
async def publish(service: CurrentService, address: Own) -> None:
    """Make a checkpoint readable by all callers."""
    service.catalog.publish(address, True)


@router.delete(f"{CHECKPOINT}/publish", status_code=204)
async def unpublish(service: CurrentService, address: Own) -> None:
    """Make a checkpoint private."""
    service.catalog.publish(address, False)


@router.put(f"{CHECKPOINT}/ttl", status_code=204, openapi_extra=json_body(bodies.TtlBody))
async def set_ttl(service: CurrentService, body: Body, address: Own) -> None:
    """Set or remove the time after which a checkpoint is deleted."""
    service.catalog.set_ttl(address, bodies.parse(bodies.TtlBody, body).ttl_seconds)


@router.get(f"{CHECKPOINT}/external_weights_urls")
async def urls(service: CurrentService, request: Request, address: Readable) -> JsonObject:
    """Return a signed URL for each file of the checkpoint. The URLs need no API key and expire after an hour."""
    expires = service.downloads.expiry()
    file_urls = {
        file: str(request.url_for("download", token=service.downloads.sign(address, file, expires), file=file))
        for file in service.downloads.files(address)
    }
    return {"urls": file_urls, "expires": _time(service.catalog.clock.wall_time(expires))}


@router.post("/copy_weights", openapi_extra=json_body(bodies.CopyWeights))
async def copy_weights(
    service: CurrentService,
    body: Body,
    x_idempotency_key: Annotated[str | None, Header()] = None,
    x_tinker_weights_access_token: Annotated[str | None, Header()] = None,
) -> JsonObject:
    """Copy a checkpoint to a new run of the caller."""
    fields = bodies.parse(bodies.CopyWeights, body)
    try:
        address = copies.copy_weights(service, fields, x_idempotency_key, x_tinker_weights_access_token)
    except ConfigError as error:
        raise bodies.Refused(400, str(error)) from None
    return {"tinker_path": address.path}


@router.post("/cookbook/upload_adapter")
async def upload_adapter(
    service: CurrentService, body: FileBody, name: str = "uploaded", x_idempotency_key: Annotated[str | None, Header()] = None
) -> JsonObject:
    """Store a PEFT adapter that was made elsewhere as a checkpoint of a new run of the caller."""
    try:
        address = await adapters.upload(service, name, body, x_idempotency_key)
    except ConfigError as error:
        raise bodies.Refused(400, str(error)) from None
    return {"tinker_path": address.path}


@router.post("/weights_info", openapi_extra=json_body(bodies.PathBody))
async def weights_info(service: CurrentService, body: Body) -> JsonObject:
    """Describe the weights of a checkpoint."""
    saved = service.readable_checkpoint(Address.parse(bodies.parse(bodies.PathBody, body).tinker_path))
    info = service.catalog.run(saved.address.run_id)
    return {
        "base_model": service.host.shown(info.base_model),
        "is_lora": info.is_lora,
        "lora_rank": info.lora_rank,
        "train_unembed": False if info.is_lora else None,
        "train_mlp": None,
        "train_attn": None,
    }


def _run(service: Service, info: RunInfo) -> JsonObject:
    live = service.runs.get(info.run_id)
    newest_records = {record.address.kind: record for record in service.catalog.of_run(info.run_id)}
    newest = {
        record.address.kind: _checkpoint(service, record) for record in service.catalog.with_metadata(newest_records.values())
    }
    is_damaged = service.catalog.is_damaged(info.run_id)
    if not is_damaged:
        try:
            info = service.catalog.run(info.run_id)
        except bodies.Refused:
            is_damaged = True
    return {
        "training_run_id": info.run_id,
        "base_model": service.host.shown(info.base_model),
        "model_owner": OWNER,
        "is_lora": info.is_lora,
        "lora_rank": info.lora_rank,
        "corrupted": is_damaged,
        "last_request_time": _time(live.last_request if live else info.created),
        "last_checkpoint": newest.get("weights"),
        "last_sampler_checkpoint": newest.get("sampler_weights"),
        "user_metadata": info.user_metadata,
    }


def _checkpoint(service: Service, saved: CheckpointRecord) -> JsonObject:
    return {
        "checkpoint_id": f"{saved.address.kind}/{saved.address.name}",
        "checkpoint_type": TYPES[saved.address.kind],
        "time": _time(saved.time),
        "tinker_path": saved.address.path,
        "size_bytes": saved.size_bytes,
        "public": saved.public,
        "user_metadata": saved.user_metadata,
        "expires_at": None if saved.expires is None else _time(service.catalog.clock.wall_time(saved.expires)),
    }


async def _described(service: Service, records: Iterable[CheckpointRecord]) -> list[JsonObject]:
    """Describe checkpoints, without those that were deleted meanwhile or whose record is damaged."""
    described = []
    for record in records:
        described += [_checkpoint(service, item) for item in service.catalog.with_metadata([record])]
        await asyncio.sleep(0)
    return described


def _page(items: Sequence[T], limit: int, offset: int) -> tuple[Sequence[T], JsonObject]:
    """Return a page of a list, and its cursor."""
    limit, offset = min(max(limit, 0), MAX_LIMIT), max(offset, 0)
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
