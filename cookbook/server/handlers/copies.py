"""Copies of checkpoints: hard links in the folder of a new run, which cannot be trained."""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import replace
from pathlib import Path

from cookbook.checkpoints import manifest, sampler_checkpoints
from cookbook.errors import CheckpointError
from cookbook.server.handlers.quotas import check_disk
from cookbook.server.keys import caller_name
from cookbook.server.state.catalog import Address
from cookbook.server.state.service import Service
from cookbook.server.wire.bodies import CopyWeights, Refused

# Metadata of the run of a copy: the project that the client has chosen. The server itself has no projects.
PROJECT_FIELD = "destination_project_id"


def copy_weights(service: Service, fields: CopyWeights, key: str | None, token: str | None) -> Address:
    """Copy a checkpoint that the caller may read, and return the address of the copy. A retry returns the same address.

    Args:
        key: idempotency key of the request; None: the client has sent none.
        token: access token of the client, which the server does not support.

    Raises:
        CheckpointError: the checkpoint is unknown.
        ConfigError: the quota of the disk is used up.
        Refused: 400, the destination is missing or taken, or an access token is given; 404, the session is unknown; 507, the
            disk is full.
    """
    if fields.weights_access_token is not None or token is not None:
        raise Refused(400, "copy_weights: weights_access_token is not supported; let its owner publish the checkpoint")
    source = service.readable_checkpoint(Address.parse(fields.source_path)).address
    run_id = _destination(service, fields, key)
    address = replace(source, run_id=run_id)
    folder = service.catalog.folder_of(source)
    # A delta is loaded with the checkpoints before it, which are expected in the same folder.
    is_delta = manifest.read(folder)["kind"] == "delta"
    places = {
        part: service.catalog.run_folder(run_id) / part.name
        for part in (sampler_checkpoints.lineage(folder) if is_delta else [folder])
    }
    if any(place.exists() and not _are_equal(part, place) for part, place in places.items()):
        raise Refused(400, f"copy_weights: {run_id} has other weights of this name; choose another model_seq_id")
    try:
        service.catalog.find(address)
    except CheckpointError:
        pass
    else:
        return address
    if run_id in service.runs or run_id in service.loading_runs:
        raise Refused(400, f"copy_weights: {run_id} is a training run; choose another model_seq_id")
    service.tenants.owners.setdefault(run_id.partition(":")[0], caller_name())
    check_disk(service, run_id, "copy_weights")
    origin = service.catalog.run(source.run_id)
    metadata = None if fields.destination_project_id is None else {PROJECT_FIELD: fields.destination_project_id}
    service.catalog.add_run(
        replace(origin, run_id=run_id, created=time.time(), owner=service.tenants.owner_of(run_id), user_metadata=metadata)
    )
    for part, place in places.items():
        if not place.exists():
            service.durability.link(part, place)
    service.catalog.add(address, fields.ttl_seconds, service.catalog.find(source).user_metadata)
    return address


def _are_equal(first: Path, second: Path) -> bool:
    """Whether two checkpoints are equal. A manifest has the digests of all files."""
    manifests = [folder / manifest.NAME for folder in (first, second)]
    return all(path.is_file() for path in manifests) and manifests[0].read_bytes() == manifests[1].read_bytes()


def _destination(service: Service, fields: CopyWeights, key: str | None) -> str:
    """Return the id of the run that gets the copy."""
    if fields.session_id is not None:
        if fields.model_seq_id is None:
            raise Refused(400, "copy_weights: model_seq_id is missing; send it with session_id")
        return f"{service.session(fields.session_id).session_id}:train:{fields.model_seq_id}"
    if fields.destination_project_id is None:
        raise Refused(
            400, "copy_weights: the destination is missing; send session_id and model_seq_id, or destination_project_id"
        )
    name = secrets.token_hex(8) if key is None else hashlib.sha256(f"{caller_name()} {key}".encode()).hexdigest()[:16]
    return f"s{name}:train:0"
