"""Quotas of API keys: training runs, tokens of unfinished requests, and disk. They apply to all sessions of a name together."""

from __future__ import annotations

from pathlib import Path

from cookbook.errors import ConfigError
from cookbook.server.keys import Quota
from cookbook.server.state.service import Service, Session
from cookbook.server.wire.bodies import Refused


def quota_of(service: Service, session_id: str) -> Quota:
    key = service.tenants.keys.named(service.tenants.owner_of(session_id))
    return Quota() if key is None else key.quota


def check_runs(service: Service, session: Session) -> None:
    """Raise ConfigError if the owner of the session has as many training runs in memory as its quota allows."""
    owner, limit = service.tenants.owner_of(session.session_id), quota_of(service, session.session_id).max_runs
    if limit is None:
        return
    runs = [one for one in service.runs.keys() | service.loading_runs if service.tenants.owner_of(one) == owner]
    if len(runs) >= limit:
        raise ConfigError(
            f"create_model: {len(runs)} training runs of {owner} are in memory, and its quota is max_runs={limit:g}; close "
            "some of their clients"
        )


def check_tokens(service: Service, session: Session, kind: str, num_tokens: int) -> None:
    """Raise Refused (429, clients retry later): a request exceeds the quota of tokens; see :func:`exceeded_quota`."""
    if (message := exceeded_quota(service, service.tenants.owner_of(session.session_id), num_tokens)) is not None:
        raise Refused(429, f"{kind}: {message}")


def exceeded_quota(service: Service, owner: str | None, num_tokens: int) -> str | None:
    """Return a message if unfinished requests of ``owner`` and a request of ``num_tokens`` exceed the quota of tokens.

    Requests of the endpoint count too. A request that exceeds the quota alone runs alone.
    """
    key = service.tenants.keys.named(owner)
    limit = None if key is None else key.quota.max_tokens
    if limit is None:
        return None
    own = [one for one in service.sessions.values() if service.tenants.owner_of(one.session_id) == owner]
    pending = sum(one.pending_tokens + one.training_tokens for one in own)
    pending += service.endpoint.callers[owner or ""].pending_tokens
    if not pending or pending + num_tokens <= limit:
        return None
    return (
        f"{pending:,} tokens of {owner} are pending, and {num_tokens:,} more exceed its quota of max_tokens={limit:,.0f}; "
        "wait for earlier requests"
    )


def check_disk(service: Service, session_id: str, where: str) -> None:
    """Raise ConfigError if the checkpoints and logs of the session's owner take as much disk as its quota allows."""
    owner, limit = service.tenants.owner_of(session_id), quota_of(service, session_id).max_disk_gb
    if limit is None:
        return
    runs = [service.catalog.run_folder(info.run_id) for info in service.catalog.runs() if info.owner == owner]
    sessions = [service.durability.session_folder(one) for one, name in service.tenants.owners.items() if name == owner]
    gigabytes = _num_bytes([*runs, *sessions]) / 1e9
    if gigabytes >= limit:
        raise ConfigError(
            f"{where}: checkpoints and logs of {owner} take {gigabytes:.3g} GB, and its quota is max_disk_gb={limit:g}; delete "
            "some checkpoints"
        )


def _num_bytes(folders: list[Path]) -> int:
    """Return the bytes of all files. A file with several hard links counts once."""
    sizes = {}
    for folder in folders:
        for path in folder.rglob("*"):
            try:
                status = path.stat()
            except FileNotFoundError:
                # A snapshot or a log file that was just replaced.
                continue
            if path.is_file():
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())
