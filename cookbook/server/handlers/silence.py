"""Silent clients: their sessions leave memory, stay on disk, and are restored when the client returns.

The log of a session is enough to restore it, as after a restart. Without a log (``server.durability=off``) the runs are saved
as checkpoints before the session ends.
"""

from __future__ import annotations

import asyncio
import logging
import time

from cookbook.errors import CookbookError
from cookbook.server.handlers.recovery import free_partial, recover_session
from cookbook.server.metrics import log_event
from cookbook.server.state.service import RESTORED, Service, Session

log = logging.getLogger("cookbook")
# Name of the checkpoints of runs whose session ends because it is silent.
CHECKPOINT_NAME = "silent"


def unload_silent_sessions(service: Service) -> None:
    """Unload the sessions that were silent for ``server.session_timeout_s``, and delete those kept long enough."""
    timeout_s, keep_s = service.config.session_timeout_s, 3600 * service.config.keep_silent_h
    for session in list(service.sessions.values()):
        is_busy = session.session_id in service.moving or service.loads_run_of(session.session_id)
        if session.last_seen < time.monotonic() - timeout_s and not is_busy:
            service.moving.add(session.session_id)
            service.spawn(_unload(service, session) if service.durability.is_on else _save_and_end(service, session))
    for session_id, since in list(service.silent.items()):
        if since < time.monotonic() - keep_s and session_id not in service.moving:
            reason = f"its client was silent for server.keep_silent_h={service.config.keep_silent_h:g} hours"
            service.delete_silent(session_id, reason)


async def _unload(service: Service, session: Session) -> None:
    """Free the memory of a session. Its folder keeps the whole state, and its restoration recomputes unsettled requests."""
    service.silent[session.session_id] = time.monotonic()
    del service.sessions[session.session_id]
    log_event("unloaded", session=session.session_id, runs=len(session.run_ids))
    try:
        # First the samples, which may take hours. Their requests leave before their errors could become results.
        service.requests.remove_samples(session.session_id)
        session.lane.drop()
        # A snapshot in progress logs results, so it must end before the requests leave.
        for run_id in session.run_ids:
            await service.snapshots[run_id].wait()
        logs = [session.log, session.samples, *(service.runs[run_id].log for run_id in session.run_ids)]
        service.free(session)
        # Any other job of the worker runs after the current call of the session has ended.
        await asyncio.wrap_future(service.host.worker.submit(lambda: None))
        for log in logs:
            log.rotate()
    finally:
        service.moving.discard(session.session_id)


async def _save_and_end(service: Service, session: Session) -> None:
    runs = [service.runs[run_id] for run_id in session.run_ids if service.runs[run_id].trainer.step]
    try:
        paths = [path for run in runs if (path := await service.save_run(run, CHECKPOINT_NAME)) is not None]
    finally:
        service.moving.discard(session.session_id)
    # The client may have returned meanwhile, or have ended the session.
    is_silent = session.last_seen < time.monotonic() - service.config.session_timeout_s
    if is_silent and session.session_id in service.sessions:
        saved = f"; its runs are saved as {', '.join(paths)}" if paths else ""
        service.end_session(session.session_id, f"{silence(service)}{saved}")


def silence(service: Service) -> str:
    """Return why a silent session has ended."""
    return f"its client was silent for server.session_timeout_s={service.config.session_timeout_s:g} seconds"


async def restore(service: Service, session_id: str) -> None:
    """Load a silent session whose client has returned. Its replay continues as after a restart."""
    # Only this task, and those that it starts, may use the session before it is complete.
    RESTORED.set(session_id)
    try:
        await recover_session(service, service.durability.session_folder(session_id))
        log_event("restored", session=session_id)
    except Exception as error:
        # Every error ends the session. Otherwise its client would retry forever.
        log.warning("%s: cannot restore the session: %s", session_id, error, exc_info=not isinstance(error, CookbookError))
        free_partial(service, session_id)
        service.ended[session_id] = f"{silence(service)}, and it cannot be restored: {error}"
    finally:
        service.silent.pop(session_id, None)
        service.moving.discard(session_id)
