"""State of the server: sessions, their training runs and sampling sessions, requests, checkpoints.

Only the event loop changes it; models compute on the host's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import shutil
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from cookbook.backends.local.sample_queue import SampleQueue
from cookbook.backends.worker import Account, Lane
from cookbook.checkpoints import manifest, sampler_checkpoints
from cookbook.errors import CookbookError
from cookbook.server.config import ServerConfig
from cookbook.server.journal.attempts import Attempts
from cookbook.server.journal.durability import Durability
from cookbook.server.journal.log import Log, Record
from cookbook.server.keys import caller_name
from cookbook.server.metrics import Metrics, log_event
from cookbook.server.state.body_decoder import BodyDecoder
from cookbook.server.state.catalog import Address, Catalog, CheckpointRecord, Downloads, RunInfo, not_found, unknown_run
from cookbook.server.state.deployed import Deployed
from cookbook.server.state.endpoint import Endpoint
from cookbook.server.state.host import Host
from cookbook.server.state.presence import Presence
from cookbook.server.state.requests import SAMPLE, Request, RequestStore, unknown_request
from cookbook.server.state.run import TrainingRun
from cookbook.server.state.samplers import Batcher, SamplerCache, SamplingSession
from cookbook.server.state.snapshots import RETRY_S, StateSnapshots, prune_samples
from cookbook.server.state.tenants import Tenants, session_of
from cookbook.server.state.uploads import Uploads
from cookbook.server.wire.bodies import CreateSession, Refused
from cookbook.server.wire.encode import StoredResult
from cookbook.server.wire.loss_graph import GraphLoss
from cookbook.types import JsonObject

log = logging.getLogger("cookbook")
# The silent session that the current task restores. Other tasks must not use it before it is complete.
RESTORED: ContextVar[str | None] = ContextVar("RESTORED", default=None)
# Ended sessions whose reason is remembered.
MAX_ENDED = 10_000


@dataclass
class Session:
    """Session of one client. Its runs and samplers are freed when the session ends or expires.

    Attributes:
        header: header of the first record of ``log``: metadata, name, owner, and the idempotency key of the request that
            created the session.
        log: log of the session, its samplers and its custom losses.
        samples: log of the requests to its samplers.
        losses: custom losses by id.
        account: its use of the worker thread, which all sessions share.
        lane: the part of its work that is sampling.
        queue: requests to its samplers, which ``batcher`` groups into batches.
        presence: pauses ``lane`` while its client has vanished.
        pending_tokens: tokens that its unsettled requests may sample.
        training_tokens: tokens of its unsettled training requests.
        num_joined: number of clients in other processes that share a sampler, by id of the sampler.
        refused: ids of refused requests that are not in a log, oldest first.
    """

    session_id: str
    header: JsonObject
    log: Log
    samples: Log
    account: Account
    lane: Lane
    queue: SampleQueue
    batcher: Batcher
    pending_tokens: int = 0
    training_tokens: int = 0
    last_seen: float = field(default_factory=time.monotonic)
    presence: Presence = field(init=False)
    run_ids: list[str] = field(default_factory=list)
    sampler_ids: list[str] = field(default_factory=list)
    losses: dict[str, GraphLoss] = field(default_factory=dict)
    num_joined: Counter[str] = field(default_factory=Counter)
    refused: deque[str] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.presence = Presence(self.session_id, self.lane, lambda: self.pending_tokens > 0)

    def heard(self) -> None:
        """Note that the client has sent a request."""
        self.last_seen = time.monotonic()
        self.presence.heard()


class Service:
    """All state of the server, which the routes and handlers read and change.

    Objects of other API keys are answered like unknown ones; see :class:`Tenants`.
    """

    def __init__(self, host: Host, catalog: Catalog, config: ServerConfig, deployed: Deployed | None = None) -> None:
        self.host = host
        # Where the endpoint samples; None: in this process.
        self.deployed = deployed
        self.catalog = catalog
        self.config = config
        self.tenants = Tenants(config.key_ring())
        self.requests = RequestStore(config.max_results_mb << 20, config.max_pending_mb << 20, self.tenants.sharer_of)
        self.uploads = Uploads(self.requests, config.upload_timeout_s)
        self.decoder = BodyDecoder()
        self.metrics = Metrics()
        # time.monotonic() of the last request of a client.
        self.last_request = time.monotonic()
        self.requests.watchers.append(self._observe_settled)
        self.downloads = Downloads(catalog, self.tenants.keys)
        self.durability = Durability(catalog.folder, config.durability)
        self.attempts = Attempts(catalog.folder if self.durability.is_on else None)
        host.worker.on_slice(self.attempts.computing, self.attempts.is_suspect)
        self.sessions: dict[str, Session] = {}
        self.runs: dict[str, TrainingRun] = {}
        # Ids of runs that are being created. They count towards server.max_runs.
        self.loading_runs: set[str] = set()
        self.samplers = SamplerCache(
            int(config.samplers_gb * (1 << 30)), self._on_evict, self.requests.completions.remove, self.tenants.sharer_of
        )
        # By run id. Empty if durability is off.
        self.snapshots: dict[str, StateSnapshots] = {}
        # Ids of samplers of an earlier process that the running replay will publish again.
        self.replayed_samplers: set[str] = set()
        # By run id, why a run of an earlier process could not be recovered.
        self.unrecovered_runs: dict[str, str] = {}
        # By id of a sampler of an earlier process, functions that compute its unsettled batches once the sampler is recovered.
        # With None they fail the unsettled requests.
        self.unfinished_batches: defaultdict[str, list[Callable[[SamplingSession | None], None]]] = defaultdict(list)
        # By id of a session that is on disk only, because its client is silent: when it was unloaded, by time.monotonic().
        self.silent: dict[str, float] = {}
        # Sessions that are being unloaded or restored.
        self.moving: set[str] = set()
        # Why sessions have ended, for clients that return.
        self.ended: dict[str, str] = {}
        # Restores a silent session. Set by the handlers.
        self.restore: Callable[[str], Coroutine[None, None, None]]
        self.sampler_lock = asyncio.Lock()
        # By name of an API key: the use of the worker thread by all of its clients.
        self._key_accounts: defaultdict[str, Account] = defaultdict(Account)
        self.endpoint = Endpoint(self._new_account)
        # The event loop keeps only weak references to tasks, so a task without another reference could be collected.
        self._tasks: set[asyncio.Task[None]] = set()
        # The HTTP requests of clients that wait for results.
        self.polls: set[asyncio.Task[object]] = set()

    # ---- sessions ------------------------------------------------------------------------------------------------

    def note_request(self) -> None:
        """Note that a client has sent a request, which postpones the end of an idle server."""
        self.last_request = time.monotonic()

    def create_session(self, fields: CreateSession, key: str | None) -> Session:
        """Create a session, or return the one that an earlier request with the idempotency key ``key`` created.

        Raises:
            Refused: 429, there are too many sessions; 507, the disk is full.
        """
        owner = caller_name()
        for known in self.sessions.values():
            if key is not None and (known.header["key"], known.header.get("owner")) == (key, owner):
                return known
        if len(self.sessions) >= self.config.max_sessions:
            raise Refused(
                429, f"create_session: {len(self.sessions)} sessions are open; close some, or raise server.max_sessions"
            )
        num_own = sum(known.header.get("owner") == owner for known in self.sessions.values())
        # Like a key's pending bytes: each key leaves as many sessions free as it has, so that no key is kept out by others.
        if self.tenants.has_several and num_own >= self.config.max_sessions - len(self.sessions):
            raise Refused(
                429,
                f"create_session: {num_own} sessions of {owner} are open, as many as are free for all keys; close some, or "
                "raise server.max_sessions",
            )
        session_id = f"s{secrets.token_hex(8)}"
        facts = {"user_metadata": fields.user_metadata, "display_name": fields.display_name, "key": key, "owner": owner}
        facts |= {"model": self.host.digests["weights"], "precision": self.host.digests["precision"]}
        session = self.new_session(session_id, {"what": "session", **facts})
        session.log.begin()
        return session

    def new_session(self, session_id: str, header: JsonObject) -> Session:
        """Add a session. ``header`` is the header of the first record of its log."""
        self.tenants.owners[session_id] = header.get("owner")
        log = self.durability.log(session_id, "log", Record(header))
        samples = self.durability.log(session_id, "samples", Record({"what": "samples"}))
        account = self._new_account(header.get("owner"))
        lane = self.host.worker.lane(account, pauses=self.host.can_pause)
        queue, batcher = self.host.sample_queue(lane), Batcher(lane)
        self.sessions[session_id] = Session(session_id, header, log, samples, account, lane, queue, batcher)
        return self.sessions[session_id]

    def _new_account(self, owner: str | None) -> Account:
        """Return the account of a new client. Clients of one API key share the turns of the key: more clients get no more."""
        return Account(parent=self._key_accounts[owner] if owner else None)

    def session(self, session_id: str) -> Session:
        """Return the session that a request of its client names. Raises Refused: as :meth:`open_session`."""
        session = self.open_session(session_id)
        session.heard()
        return session

    def open_session(self, session_id: str) -> Session:
        """Return a session for work of the server itself, which is no sign of the client.

        Raises:
            Refused: 404, the session is unknown; 429, it was silent and is being restored.
        """
        self.wake(session_id)
        if session_id not in self.sessions or self.tenants.hides(session_id):
            reason = self._why_ended(session_id) or ": it has ended"
            raise Refused(404, f"unknown session {session_id!r}{reason}")
        return self.sessions[session_id]

    def wake(self, owner_id: str) -> None:
        """Restore the session if it is silent. ``owner_id``: id of a session, run, sampler or request.

        Raises:
            Refused: 429, the session is being restored.
        """
        session_id = session_of(owner_id)
        if session_id not in self.silent or session_id == RESTORED.get() or self.tenants.hides(session_id):
            return
        if session_id not in self.moving:
            self.moving.add(session_id)
            self.spawn(self.restore(session_id))
        raise Refused(429, f"session {session_id!r} was silent and is being restored; retry later")

    def loads_run_of(self, session_id: str) -> bool:
        """Whether a run of the session is being created."""
        return any(run_id.startswith(f"{session_id}:") for run_id in self.loading_runs)

    def excuse_silence(self) -> None:
        """Give all clients their full time again, because the server itself was stopped and could not hear them."""
        for session in self.sessions.values():
            session.last_seen = time.monotonic()

    def end_session(self, session_id: str, reason: str = "it has ended") -> None:
        """Free the session, its runs and its samplers, and delete its logs. Checkpoints stay."""
        self.free(self.sessions.pop(session_id))
        self._delete(session_id, reason)

    def delete_silent(self, session_id: str, reason: str = "it has ended") -> None:
        """Delete a session that is on disk only. Checkpoints stay. Raises Refused (429): it is being restored."""
        if session_id in self.moving:
            self.wake(session_id)
        del self.silent[session_id]
        self._delete(session_id, reason)

    def _delete(self, session_id: str, reason: str) -> None:
        self.ended[session_id] = reason
        if len(self.ended) > MAX_ENDED:
            oldest = next(iter(self.ended))
            del self.ended[oldest]
            self.tenants.owners.pop(oldest, None)
        self.durability.delete_session(session_id)

    def free(self, session: Session) -> None:
        """Free the memory of a session that was removed from ``sessions``, and stop its work."""
        session_id = session.session_id
        session.presence.end()
        session.lane.drop()
        for sampler_id in [known for known in self.unfinished_batches if known.startswith(f"{session_id}:")]:
            del self.unfinished_batches[sampler_id]
        for sampler_id in session.sampler_ids:
            if (sampler := self.samplers.pop(sampler_id, None)) is not None and sampler.batch is not None:
                sampler.batch.cancel()
        self.samplers.forget_evicted(session_id)
        for run_id in session.run_ids:
            self.free_run(run_id)
        self.requests.remove_session(session_id)

    def free_run(self, run_id: str) -> None:
        """Free the memory of a run, and stop its work."""
        if (run := self.runs.pop(run_id, None)) is not None:
            run.end()
        self.snapshots.pop(run_id, None)

    async def save_run(self, run: TrainingRun, name: str) -> str | None:
        """Save a checkpoint that no client has requested. Returns its path, or None after a failure, which is logged."""
        address = Address(run.info.run_id, "weights", name)
        try:
            await asyncio.wrap_future(run.trainer.save_state(address.folder_name, overwrite=True))
            self.catalog.add(address, None, None)
        except (CookbookError, OSError) as error:
            log_event("not saved", path=address.path, error=str(error))
            return None
        log_event("saved", path=address.path, step=run.trainer.step)
        return address.path

    def prune_logs(self) -> None:
        """Delete log files, results and checkpoints that neither a restart nor a client needs, and store the clock."""
        self.catalog.clock.store()
        self.catalog.delete_expired()
        for snapshots in self.snapshots.values():
            snapshots.prune()
        for session in self.sessions.values():
            prune_samples(session.samples, self.requests, self.config.log_mb << 20)
        if not self.durability.is_on:
            self.requests.remove_old(RETRY_S)

    def without_paths(self, text: str) -> str:
        """Return a message for clients: the folders of the server are replaced by ``out`` and the name of the model."""
        out, model = self.catalog.folder, self.host.name
        for folder, name in ((str(out.resolve()), "out"), (str(out), "out"), (model, self.host.public)):
            text = re.sub(rf"(?<![\w./-]){re.escape(folder)}(?![\w.-])", name, text)
        return text

    def _observe_settled(self, request: Request) -> None:
        assert request.result is not None
        self.attempts.forget(request.request_id)
        if request.num_tokens and (session := self.sessions.get(session_of(request.scope))) is not None:
            if request.kind == SAMPLE:
                session.pending_tokens -= request.num_tokens
            else:
                session.training_tokens -= request.num_tokens
        seconds = time.monotonic() - request.accepted_at
        self.metrics.count_settled(request.kind, seconds, failed=request.result.is_failure)
        error = {"error": request.result.error} if request.result.is_failure else {}
        log_event("call", call=request.request_id, kind=request.kind, ms=round(1000 * seconds, 1), **error)

    # ---- runs and samplers ---------------------------------------------------------------------------------------

    def run(self, run_id: str) -> TrainingRun:
        """Return a run in memory. Raises Refused: 404, the run or its session is unknown; 429, it is being restored."""
        self.wake(run_id)
        is_hidden = self.tenants.hides(run_id)
        if run_id not in self.runs or is_hidden:
            reason = f"training run {run_id!r} is not in memory{self._why_ended(run_id)}"
            if not is_hidden:
                reason = self.unrecovered_runs.get(run_id, reason)
            raise Refused(404, f"{reason}; create a new run from a checkpoint")
        run = self.runs[run_id]
        self.session(run.session_id)
        return run

    def _why_ended(self, owner_id: str) -> str:
        reason = None if self.tenants.hides(owner_id) else self.ended.get(session_of(owner_id))
        return "" if reason is None else f": {reason}"

    def add_run(self, run: TrainingRun) -> None:
        """Add a run to its session. Raises Refused (404): the session ended while the run was created."""
        session = self.open_session(run.session_id)
        self.runs[run.info.run_id] = run
        if self.durability.is_on:
            snapshots = StateSnapshots(run, self.host, self.samplers, self.config)
            self.snapshots[run.info.run_id] = snapshots
            run.on_begin = snapshots.on_begin
        session.run_ids.append(run.info.run_id)

    def sampler(self, sampler_id: str) -> SamplingSession:
        """Return a sampling session. Raises Refused: 404, it is unknown; 429, it is being restored."""
        self.wake(sampler_id)
        is_hidden = self.tenants.hides(sampler_id)
        if sampler_id in self.replayed_samplers and not is_hidden:
            # Clients retry after status 429 indefinitely.
            raise Refused(429, f"sampling session {sampler_id!r} is being restored after a restart; retry later")
        if sampler_id not in self.samplers or is_hidden:
            reason = self._why_ended(sampler_id)
            raise Refused(404, f"unknown sampling session {sampler_id!r}{reason}; create a new sampling client")
        sampler = self.samplers.touch(sampler_id)
        self.session(sampler.session_id)
        return sampler

    def add_sampler(self, sampler: SamplingSession) -> None:
        """Add a sampling session. Raises Refused (404): the session ended while the sampler was created."""
        sampler_ids = self.open_session(sampler.session_id).sampler_ids
        self.samplers.add(sampler)
        if sampler.sampler_id not in sampler_ids:
            sampler_ids.append(sampler.sampler_id)
        self.replayed_samplers.discard(sampler.sampler_id)
        for compute in self.unfinished_batches.pop(sampler.sampler_id, []):
            compute(sampler)

    def was_evicted(self, sampler_id: str) -> bool:
        """Whether a sampling session of the caller was evicted."""
        return self.samplers.was_evicted(sampler_id) and not self.tenants.hides(sampler_id)

    def heard(self, object_id: str) -> Session | None:
        """Note that a client has sent a request about an object. Returns its session if it is in memory."""
        session = None if self.tenants.hides(object_id) else self.sessions.get(session_of(object_id))
        if session is not None:
            session.heard()
        return session

    def is_paused(self, request: Request) -> bool:
        """Whether an unsettled request is a sample whose client has vanished."""
        session = self.sessions.get(session_of(request.scope))
        return request.kind == SAMPLE and session is not None and session.presence.is_paused

    async def fetch(self, request_id: str, wait_s: float) -> StoredResult | None:
        """Return a result, as ``RequestStore.fetch``.

        Raises:
            Refused: as ``RequestStore.fetch``; 429, the session was silent: it is being restored, or left memory meanwhile.
        """
        self.wake(request_id)
        if self.tenants.hides(request_id):
            raise unknown_request(request_id)
        try:
            return await self.requests.fetch(request_id, wait_s)
        except Refused:
            # The retry of the client restores the session. Without a retry the session stays on disk.
            if session_of(request_id) not in self.silent:
                raise
            raise Refused(429, f"retrieve_future: the session of {request_id!r} is silent; retry later") from None

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def own_runs(self) -> list[RunInfo]:
        """Return the runs of the caller on disk, newest first and without user metadata."""
        return [info for info in self.catalog.runs() if self.tenants.may_use(self._owner_of_run(info))]

    def _owner_of_run(self, info: RunInfo) -> str | None:
        """Return the owner of a run: of its session, if its own description is damaged."""
        return self.tenants.owner_of(info.run_id) if self.catalog.is_damaged(info.run_id) else info.owner

    def run_info(self, run_id: str) -> RunInfo:
        """Return the description of a run of the caller.

        Raises:
            Refused: 404, the run is unknown; 410, its description is damaged.
        """
        try:
            info = self.catalog.run(run_id)
        except Refused:
            # Other keys do not learn that the run exists.
            if not self.tenants.may_use(self.tenants.owner_of(run_id)):
                raise unknown_run(run_id) from None
            raise
        if not self.tenants.may_use(info.owner):
            raise unknown_run(run_id)
        return info

    def own_checkpoint(self, address: Address) -> CheckpointRecord:
        """Return a checkpoint that the caller may change. Raises CheckpointError: the checkpoint is unknown or has expired."""
        if not self.tenants.may_use(self.catalog.owner_of(address)):
            raise not_found(address)
        return self.catalog.find(address)

    def readable_checkpoint(self, address: Address) -> CheckpointRecord:
        """Return a checkpoint of the caller or a published one. Raises CheckpointError: it is unknown or has expired."""
        if not self.tenants.may_use(self.catalog.owner_of(address)) and not self.catalog.is_public(address):
            raise not_found(address)
        return self.catalog.find(address)

    def fail_unfinished_batches(self, sampler_ids: Iterable[str]) -> None:
        """Fail the unsettled requests of samplers of an earlier process that could not be recovered."""
        for sampler_id in sampler_ids:
            for fail in self.unfinished_batches.pop(sampler_id, []):
                fail(None)

    def _on_evict(self, sampler: SamplingSession) -> None:
        """Remove an evicted sampler from its session and its run, and log the eviction.

        A restart creates the sampler again only if a run published it and the run's newest snapshot or a later request names
        it.
        """
        log_event("sampler let go", sampler=sampler.sampler_id, bytes=sampler.num_bytes)
        session = self.sessions.get(sampler.session_id)
        if session is None:
            # The session could not be recovered after a restart. Keep the files: a later restart may recover it.
            return
        session.sampler_ids.remove(sampler.sampler_id)
        for run in map(self.runs.__getitem__, session.run_ids):
            run.published.pop(sampler.sampler_id, None)
            if sampler in run.inflight:
                run.inflight.remove(sampler)
        # If the disk is full, the eviction is not logged; a restart then creates the sampler and evicts it again.
        with contextlib.suppress(Refused):
            session.log.append(Record({"what": "let go", "sampler": sampler.sampler_id}))
        shutil.rmtree(self.durability.sampler_weights(sampler.sampler_id), ignore_errors=True)

    def linked_checkpoint(self, address: Address, folder: Path, session_id: str) -> Path:
        """Return a folder with the files of a checkpoint: links in ``folder``, or without durability the checkpoint itself.

        The links are needed because the checkpoint may be deleted while a restart still needs its files. The owner of the
        session must be allowed to read the checkpoint. The key of the current request is not checked: a request may run during
        another one, or after a restart.

        Raises:
            CheckpointError: the checkpoint does not exist.
            Refused: 507, the disk is full.
        """
        nested = folder / address.folder_name
        if self.durability.is_on and nested.exists():
            return nested
        if self.durability.is_on and (folder / manifest.NAME).exists():
            return folder
        owner, reader = self.catalog.owner_of(address), self.tenants.owner_of(session_id)
        if not self.tenants.keys.may_use(reader, owner) and not self.catalog.is_public(address):
            raise not_found(address)
        self.catalog.find(address)
        checkpoint = self.catalog.folder_of(address)
        if not self.durability.is_on:
            return checkpoint
        if manifest.read(checkpoint)["kind"] != "delta":
            return self.durability.link(checkpoint, folder)
        # A delta is loaded with the checkpoints before it, which are expected in the same folder.
        for part in sampler_checkpoints.lineage(checkpoint):
            if not (folder / part.name).exists():
                self.durability.link(part, folder / part.name)
        return nested

    def abandon_work(self) -> None:
        """Stop the computation of all requests at shutdown. They stay unsettled, and a restart recomputes them."""
        self.requests.frozen = True
        for poll in self.polls:
            poll.cancel()
        for session in self.sessions.values():
            session.lane.drop()
        for sampler in self.samplers.values():
            # The timer of an announced batch, or its last request, would start the batch on the dropped lane.
            if sampler.batch is not None:
                sampler.batch.cancel()
        for run in self.runs.values():
            run.lane.clear()
        self.endpoint.drop()
        if self.deployed is not None:
            self.deployed.abandon()

    # ---- tasks ---------------------------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end_task)
        return task

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the server has failed: %s", task.get_coro(), exc_info=error)
