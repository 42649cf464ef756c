"""Training runs and checkpoints as things to list, look at and delete."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response

from cookbook.errors import CheckpointError
from cookbook.server import messages
from cookbook.server.catalogue import TYPES, Address, RunFacts, Saved
from cookbook.server.errors import Refused
from cookbook.server.routes.common import Body, Here, takes
from cookbook.server.service import Service

OWNER = "cookbook"

router = APIRouter()


@router.get("/training_runs")
async def training_runs(service: Here, limit: int = 20, offset: int = 0) -> dict[str, Any]:
    found = service.catalogue.runs()
    page = [_run(service, facts) for facts in _page(found, limit, offset)]
    return {"training_runs": page, "cursor": _cursor(found, limit, offset)}


@router.get("/training_runs/{run_id}")
async def training_run(service: Here, run_id: str) -> dict[str, Any]:
    return _run(service, service.catalogue.run(run_id))


@router.get("/training_runs/{run_id}/checkpoints")
async def checkpoints_of_run(service: Here, run_id: str) -> dict[str, Any]:
    service.catalogue.run(run_id)
    return {"checkpoints": [_checkpoint(saved) for saved in service.catalogue.of_run(run_id)]}


@router.get("/checkpoints")
async def checkpoints(service: Here, limit: int = 100, offset: int = 0) -> dict[str, Any]:
    found = service.catalogue.all()
    page = [_checkpoint(saved) for saved in _page(found, limit, offset)]
    return {"checkpoints": page, "cursor": _cursor(found, limit, offset)}


@router.delete("/training_runs/{run_id}/checkpoints/{kind}/{name}", status_code=204)
async def delete(service: Here, run_id: str, kind: str, name: str) -> Response:
    service.catalogue.delete(_existing(service, run_id, kind, name))
    return Response(status_code=204)


@router.post("/training_runs/{run_id}/checkpoints/{kind}/{name}/publish", status_code=204)
async def publish(service: Here, run_id: str, kind: str, name: str) -> Response:
    service.catalogue.publish(_existing(service, run_id, kind, name), True)
    return Response(status_code=204)


@router.delete("/training_runs/{run_id}/checkpoints/{kind}/{name}/publish", status_code=204)
async def unpublish(service: Here, run_id: str, kind: str, name: str) -> Response:
    service.catalogue.publish(_existing(service, run_id, kind, name), False)
    return Response(status_code=204)


@router.put("/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl", status_code=204, openapi_extra=takes(messages.Ttl))
async def set_ttl(service: Here, run_id: str, kind: str, name: str, body: Body) -> Response:
    service.catalogue.set_ttl(_existing(service, run_id, kind, name), messages.parsed(messages.Ttl, body).ttl_seconds)
    return Response(status_code=204)


@router.get("/training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls")
async def urls(service: Here, request: Request, run_id: str, kind: str, name: str) -> dict[str, Any]:
    """An address for every file, to be fetched without a key for the next hour."""
    address = _existing(service, run_id, kind, name)
    expires = service.downloads.expiry()
    found = {
        file: str(request.url_for("download", token=service.downloads.sign(address, file, expires), file=file))
        for file in service.downloads.files(address)
    }
    return {"urls": found, "expires": _time(expires)}


@router.post("/weights_info", openapi_extra=takes(messages.OfPath))
async def weights_info(service: Here, body: Body) -> dict[str, Any]:
    path = messages.parsed(messages.OfPath, body).tinker_path
    try:
        address = Address.parse(path)
        service.catalogue.find(address)
    except CheckpointError as error:
        raise Refused(404, str(error)) from None
    facts = service.catalogue.run(address.run_id)
    return {
        "base_model": facts.base_model,
        "is_lora": facts.is_lora,
        "lora_rank": facts.lora_rank,
        "train_unembed": False if facts.is_lora else None,
        "train_mlp": None,
        "train_attn": None,
    }


def _existing(service: Service, run_id: str, kind: str, name: str) -> Address:
    """Raises Refused, 404."""
    try:
        address = Address(run_id, kind, name)
        service.catalogue.find(address)
    except CheckpointError as error:
        raise Refused(404, str(error)) from None
    return address


def _run(service: Service, facts: RunFacts) -> dict[str, Any]:
    saved = service.catalogue.of_run(facts.run_id)
    live = service.runs.get(facts.run_id)
    newest = {kind: _checkpoint(one) for one in saved for kind in TYPES if one.address.kind == kind}
    return {
        "training_run_id": facts.run_id,
        "base_model": facts.base_model,
        "model_owner": OWNER,
        "is_lora": facts.is_lora,
        "lora_rank": facts.lora_rank,
        "corrupted": False,
        "last_request_time": _time(live.last_request if live else facts.created),
        "last_checkpoint": newest.get("weights"),
        "last_sampler_checkpoint": newest.get("sampler_weights"),
        "user_metadata": facts.user_metadata,
    }


def _checkpoint(saved: Saved) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{saved.address.kind}/{saved.address.name}",
        "checkpoint_type": TYPES[saved.address.kind],
        "time": _time(saved.time),
        "tinker_path": saved.address.path,
        "size_bytes": saved.size_bytes,
        "public": saved.public,
        "user_metadata": saved.user_metadata,
        "expires_at": None if saved.expires is None else _time(saved.expires),
    }


def _page(found: list[Any], limit: int, offset: int) -> list[Any]:
    return found[max(offset, 0) : max(offset, 0) + max(limit, 0)]


def _cursor(found: list[Any], limit: int, offset: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": len(found)}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
