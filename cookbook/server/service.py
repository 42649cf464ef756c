"""What the server knows: sessions, their training runs and sampling sessions, answers, checkpoints.

All of it changes on one event loop only; models compute on the host's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cookbook.server.catalogue import Catalogue
from cookbook.server.config import ServerConfig
from cookbook.server.downloads import Downloads
from cookbook.server.durability import Durability
from cookbook.server.errors import Refused
from cookbook.server.futures import Answer, Answers
from cookbook.server.graph_loss import GraphLoss
from cookbook.server.host import Host
from cookbook.server.live import LiveSamplers
from cookbook.server.log import Log
from cookbook.server.messages import CreateSession
from cookbook.server.metrics import Metrics
from cookbook.server.observed import event, settled
from cookbook.server.records import Record
from cookbook.server.results import Result, failure
from cookbook.server.runs import TrainingRun
from cookbook.server.samplers import Batcher, SamplingSession
from cookbook.server.states import RETRY_S, States, prune_samples

T = TypeVar("T")


@dataclass
class Session:
    """One client. Its runs and samplers are freed when it ends, or has been silent for too long.

    ``log`` is of what it is and has made, ``samples`` of what its samplers are asked.
    """

    session_id: str
    user_metadata: dict[str, Any] | None
    display_name: str | None
    log: Log
    samples: Log
    key: str | None = None  # of the request that created it
    last_seen: float = field(default_factory=time.monotonic)
    run_ids: list[str] = field(default_factory=list)
    sampler_ids: list[str] = field(default_factory=list)
    losses: dict[str, GraphLoss] = field(default_factory=dict)  # made by create_custom_loss

    @property
    def losses_scope(self) -> str:
        return f"{self.session_id}:loss"


class Service:
    """The state behind the routes."""

    def __init__(self, host: Host, catalogue: Catalogue, config: ServerConfig) -> None:
        self.host = host
        self.catalogue = catalogue
        self.config = config
        self.answers = Answers(config.max_results_mb << 20, config.max_pending_mb << 20)
        self.metrics = Metrics()
        self.answers.watchers += [self.metrics.settled, settled]
        self.batcher = Batcher(host.worker)
        self.downloads = Downloads(catalogue)
        self.durability = Durability(catalogue.folder, config.durability)
        self.sessions: dict[str, Session] = {}
        self.runs: dict[str, TrainingRun] = {}
        self.making_runs: set[str] = set()  # those that will be in ``runs``, and take their memory already
        self.samplers = LiveSamplers(config.sampler_bytes, self._let_go, self.answers.completions.forget)
        self.states: dict[str, States] = {}  # of the runs, where they are kept
        self.coming: set[str] = set()  # samplers of an earlier process that are not made again yet
        self.lost: dict[str, str] = {}  # runs of an earlier process that cannot be made again, and why
        self.sampler_came: Callable[[SamplingSession], None] = lambda _: None
        self.making_samplers = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop itself holds its tasks weakly

    # ---- sessions ------------------------------------------------------------------------------------------------

    def create_session(self, message: CreateSession, key: str | None) -> Session:
        """``key`` is the client's, and the same in all repetitions of a request.

        Raises:
            Refused: 429, there are too many; 507, the disk is full.
        """
        for known in self.sessions.values():
            if key is not None and known.key == key:
                return known
        if len(self.sessions) >= self.config.max_sessions:
            raise Refused(429, f"there are {len(self.sessions)} sessions; close some, or raise server.max_sessions")
        session_id = f"s{secrets.token_hex(8)}"
        facts = {"user_metadata": message.user_metadata, "display_name": message.display_name, "key": key}
        session = self.new_session(session_id, {"what": "session", "model": self.host.digests["weights"], **facts})
        session.log.begin()
        return session

    def new_session(self, session_id: str, facts: dict[str, Any]) -> Session:
        """From what its log begins with."""
        log = self.durability.log(session_id, "log", Record(facts))
        samples = self.durability.log(session_id, "samples", Record({"what": "samples"}))
        session = Session(session_id, facts["user_metadata"], facts["display_name"], log, samples, facts["key"])
        self.sessions[session_id] = session
        return session

    def session(self, session_id: str) -> Session:
        """It has just been heard of. Raises Refused, 404."""
        if session_id not in self.sessions:
            raise Refused(404, f"there is no session {session_id!r}; it ended, or was silent for too long")
        found = self.sessions[session_id]
        found.last_seen = time.monotonic()
        return found

    def end_session(self, session_id: str) -> None:
        """Frees what the session holds. Checkpoints stay."""
        session = self.sessions.pop(session_id)
        for sampler_id in session.sampler_ids:
            self.samplers.remove(sampler_id)
        self.samplers.forget(session_id)
        for run_id in session.run_ids:
            self.runs.pop(run_id, None)
            self.states.pop(run_id, None)
        self.answers.forget(session_id)
        self.durability.forget(session_id)

    def end_silent_sessions(self) -> None:
        limit = time.monotonic() - self.config.session_timeout_s
        for session_id in [known for known, session in self.sessions.items() if session.last_seen < limit]:
            self.end_session(session_id)

    def prune_logs(self) -> None:
        """Deletes what nobody will ask for again."""
        for states in self.states.values():
            states.prune()
        for session in self.sessions.values():
            prune_samples(session.samples, self.answers, self.config.log_mb << 20)
        if not self.durability.is_on:
            self.answers.forget_old(RETRY_S)

    @property
    def log_bytes(self) -> int:
        logs = [log for one in self.sessions.values() for log in (one.log, one.samples)]
        return sum(log.num_bytes for log in [*logs, *(run.log for run in self.runs.values())])

    # ---- what sessions hold --------------------------------------------------------------------------------------

    def run(self, run_id: str) -> TrainingRun:
        """Raises Refused, 404."""
        if run_id not in self.runs:
            why = self.lost.get(run_id, f"there is no training run {run_id!r} in memory")
            raise Refused(404, f"{why}; make one from a checkpoint")
        found = self.runs[run_id]
        self.session(found.session_id)
        return found

    def add_run(self, run: TrainingRun) -> None:
        """Raises Refused, 404: its session ended while it was made."""
        session = self.session(run.session_id)
        self.runs[run.facts.run_id] = run
        if self.durability.is_on:
            every_s, log_bytes = self.config.checkpoint_s, self.config.log_mb << 20
            states = self.states[run.facts.run_id] = States(run, self.host.worker, self.samplers, every_s, log_bytes)
            run.begun = states.begun
        session.run_ids.append(run.facts.run_id)

    def sampler(self, sampler_id: str) -> SamplingSession:
        """Raises Refused: 404, or 429 while it is made again after a restart."""
        if sampler_id in self.coming:
            # Clients take this as "ask again soon", for as long as it takes.
            raise Refused(429, f"the sampling session {sampler_id!r} is being made again after a restart")
        if sampler_id not in self.samplers:
            raise Refused(404, f"there is no sampling session {sampler_id!r}; make a new sampling client")
        found = self.samplers.asked(sampler_id)
        self.session(found.session_id)
        return found

    def add_sampler(self, sampler: SamplingSession) -> None:
        """Raises Refused, 404: its session ended while it was made."""
        known = self.session(sampler.session_id).sampler_ids
        self.samplers.add(sampler)
        if sampler.sampler_id not in known:
            known.append(sampler.sampler_id)
        self.coming.discard(sampler.sampler_id)
        self.sampler_came(sampler)

    def _let_go(self, sampler: SamplingSession) -> None:
        """Its weights took too much memory. A restart makes it no more where a checkpoint was its origin; one that a run has
        published comes back where the run's newest state, or a request after it, names it.
        """
        event("sampler let go", sampler=sampler.sampler_id, bytes=sampler.num_bytes)
        session = self.sessions.get(sampler.session_id)
        if session is None:  # it could not be made again after a restart, and its files are left where they are
            return
        session.sampler_ids.remove(sampler.sampler_id)
        for run in map(self.runs.__getitem__, session.run_ids):
            run.published.pop(sampler.sampler_id, None)
            if sampler in run.inflight:
                run.inflight.remove(sampler)
        with contextlib.suppress(Refused):  # the disk is full: then a restart makes it again, and lets it go again
            session.log.append(Record({"what": "let go", "sampler": sampler.sampler_id}))
        self.durability.drop_weights(sampler.sampler_id)

    # ---- work that is no trainer's call --------------------------------------------------------------------------

    def in_thread(self, work: Callable[[], T], answer: Answer, encode: Callable[[T], Result]) -> asyncio.Task[None]:
        """Does ``work`` on a thread and ``encode`` back on the event loop, and settles ``answer`` with the outcome."""

        async def do() -> None:
            try:
                result = encode(await asyncio.to_thread(work))
            except BaseException as error:  # noqa: BLE001 - it fails the request
                result = failure(error)
            self.answers.settle(answer, result)

        return self.spawn(do())

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
