"""Quotas of API keys: training runs, tokens of unfinished requests, and disk. They apply to all sessions of a name together."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable
from pathlib import Path

from cookbook.checkpoints import manifest
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
    runs = [run_id for run_id in service.runs.keys() | service.loading_runs if service.tenants.owner_of(run_id) == owner]
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

    Requests of the endpoint count too, and samples of a client that has vanished, because they resume at any time. A request
    that exceeds the quota alone runs alone.
    """
    key = service.tenants.keys.named(owner)
    limit = None if key is None else key.quota.max_tokens
    if limit is None:
        return None
    own = [session for session in service.sessions.values() if service.tenants.owner_of(session.session_id) == owner]
    pending = sum(session.pending_tokens + session.training_tokens for session in own)
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
    sessions = [
        service.durability.session_folder(session_id) for session_id, name in service.tenants.owners.items() if name == owner
    ]
    gigabytes = _num_bytes([*runs, *sessions]) / 1e9
    if gigabytes >= limit:
        raise ConfigError(
            f"{where}: checkpoints and logs of {owner} take {gigabytes:.3g} GB, and its quota is max_disk_gb={limit:g}; delete "
            "some checkpoints"
        )


def _num_bytes(folders: Iterable[Path]) -> int:
    """Return the bytes of all files. A file with several hard links counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for folder in folders:
        _add_sizes(folder, sizes)
    return sum(sizes.values())


def _add_sizes(folder: Path, sizes: dict[tuple[int, int], int]) -> None:
    """Add the sizes of all files below ``folder`` to ``sizes``, by device and inode."""
    # A snapshot or a log file may be deleted at any moment.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        status = folder.stat()
        if (known := _checkpoint_sizes(folder, status.st_ino, status.st_mtime_ns)) is not None:
            sizes.update(known)
            return
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                _add_sizes(Path(entry.path), sizes)
            else:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    sizes[status.st_dev, status.st_ino] = status.st_size


@functools.lru_cache(maxsize=1 << 16)
def _checkpoint_sizes(folder: Path, inode: int, mtime_ns: int) -> dict[tuple[int, int], int] | None:
    """Return the sizes of the files of a checkpoint; None: ``folder`` is not a checkpoint.

    A checkpoint does not change once it has a manifest, so its files are counted once. The inode and the time of the folder's
    last change distinguish the folder from a later one with the same name.
    """
    if not (folder / manifest.NAME).is_file():
        return None
    statuses = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return {(status.st_dev, status.st_ino): status.st_size for status in statuses}
