"""Accepted requests, their results, and feeds of settled requests for clients that poll for many results.

A request has one of four states::

    accepted -> running -> settled -> logged

- accepted: the bytes of the request are in the log.
- running: the trainer or sampler has started the request.
- settled: the client can fetch the result.
- logged: the result is in the log, so a restart need not recompute it.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import hashlib
import json
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import InitVar, dataclass, field
from typing import Any

from cookbook.backends.local import LocalTrainer
from cookbook.errors import RolloutError
from cookbook.server.journal.log import Log, Record
from cookbook.server.wire.bodies import Refused
from cookbook.server.wire.encode import StoredResult, failure
from cookbook.types import JsonObject

# Copies of a sampling client in other processes share its session. Copy k numbers its requests from k * CLONE.
CLONE = 1_000_000_000
SAMPLE = "asample"
FETCHED_MESSAGE = "retrieve_future: the result of {!r} was fetched before and is no longer kept"
EVICTED_MESSAGE = "retrieve_future: the result of {!r} was evicted before it was fetched; raise server.max_results_mb"


@dataclass
class _Feed:
    """Settled requests that one client has not seen yet.

    Attributes:
        last: the newest cursor.
        entries: cursor and description of each settled request, by request id.
        changed: set when an entry is added.
    """

    # Start above the cursors of earlier processes, so that a client does not skip new entries as already seen.
    last: int = field(default_factory=lambda: time.time_ns() // 1000)
    entries: OrderedDict[str, tuple[int, JsonObject]] = field(default_factory=OrderedDict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Completions:
    """One feed per client of a sampling session."""

    def __init__(self) -> None:
        # By sampling session and client.
        self._feeds: defaultdict[tuple[str, int], _Feed] = defaultdict(_Feed)

    def add(self, request: Request, result: StoredResult) -> None:
        feed = self._feeds[request.scope, request.number // CLONE]
        state: JsonObject = {"state": "failed"}
        if not result.is_failure:
            state = {"state": "finished", "response_payload_uncompressed_size": len(result.body)}
        feed.last += 1
        feed.entries[request.request_id] = feed.last, {"request_id": request.request_id, **state}
        feed.changed.set()

    def drop(self, request: Request) -> None:
        """Remove a request whose result was dropped."""
        if feed := self._feeds.get((request.scope, request.number // CLONE)):
            feed.entries.pop(request.request_id, None)

    async def after(self, sampler_id: str, clone: int, cursor: int, wait_s: float) -> tuple[list[JsonObject], int]:
        """Return the entries after ``cursor``, and the newest cursor. Waits up to ``wait_s`` seconds for the first entry.

        The client has seen the entries up to ``cursor``, so they are removed.
        """
        feed = self._feeds[sampler_id, clone]
        while feed.entries and next(iter(feed.entries.values()))[0] <= cursor:
            feed.entries.popitem(last=False)
        if not feed.entries and wait_s > 0:
            feed.changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(feed.changed.wait(), wait_s)
        return [entry for _, entry in feed.entries.values()], feed.last

    def remove(self, owner: str) -> None:
        """Remove the feeds of a sampling session, or of all sampling sessions of a session, and wake their waiters."""
        for key in [key for key in self._feeds if key[0] == owner or key[0].startswith(f"{owner}:")]:
            self._feeds.pop(key).changed.set()


def unknown_request(request_id: str) -> Refused:
    return Refused(
        404,
        f"retrieve_future: unknown request {request_id!r}; its session has ended, or the server was restarted with "
        "server.durability=off; create a new client",
    )


class RequestState(enum.Enum):
    accepted = "accepted"
    running = "running"
    settled = "settled"
    logged = "logged"


@dataclass(frozen=True)
class Work:
    """Work of the trainer for one request of a training run.

    Attributes:
        begin: queues the trainer's call.
        encode: converts the return value of the call to the result.
        is_saved: for requests that only write a checkpoint: whether an earlier process has already written it.
        publishes: id of the sampling session that the request creates.
        reports_once: errors of earlier requests fail this optimizer step, but no later one.
    """

    begin: Callable[[LocalTrainer], Future[Any]]
    encode: Callable[[Any], StoredResult]
    is_saved: Callable[[], bool] | None = None
    publishes: str | None = None
    reports_once: bool = False


def _digest(kind: str, body: bytes) -> bytes:
    """Return a digest that is the same for all attempts of one request, so that retries are recognized."""
    if kind == "save_weights_for_sampler":
        # The tinker client increments this field at each attempt, so a retry of the same request has another value.
        fields = {name: value for name, value in json.loads(body).items() if name != "sampling_session_seq_id"}
        body = json.dumps(fields, sort_keys=True).encode()
    return hashlib.sha256(body).digest()


@dataclass(eq=False)
class Request:
    """One request of a client. Scope and number identify it and are its idempotency key.

    Attributes:
        scope: id of the run, of the sampling session, or of the custom losses of a session.
        number: number of the request in its scope.
        digest: distinguishes a retry from a different request with the same number.
        work: the trainer's part; None once it has begun, and for requests that are not for a training run.
        log: the log of the request and of its result.
        result: None until the request is settled, and after the result was dropped.
        metadata: how the result was computed, logged with the result so that a replay can repeat it.
        settled: set once the request is settled, or its session has ended.
        is_restored: an earlier process accepted the request, and may have run it.
        expected: the result that an earlier process computed, while the request is replayed.
        is_cancelled: the client has cancelled the request.
        num_tokens: largest number of tokens that a sampling request draws, from when it is queued; or the tokens of a training
            request.
        stop: stops the computation of a sampling request; None before it begins.
        sharer: key whose share of the limits the request counts towards, from when it is accepted.
    """

    scope: str
    number: int
    kind: str
    body: InitVar[bytes]
    work: Work | None = None
    log: Log = field(init=False, repr=False)
    state: RequestState = RequestState.accepted
    result: StoredResult | None = None
    fetched: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    accepted_at: float = field(default_factory=time.monotonic)
    settled_at: float = 0.0
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    is_restored: bool = False
    expected: StoredResult | None = None
    is_cancelled: bool = False
    num_tokens: int = 0
    stop: Callable[[], None] | None = field(default=None, repr=False)
    sharer: str | None = None

    def __post_init__(self, body: bytes) -> None:
        self.digest = _digest(self.kind, body)
        self.num_bytes = len(body)

    @property
    def request_id(self) -> str:
        return f"{self.scope}/{self.number}"

    def start(self) -> None:
        """Mark the request as running. A settled request stays settled: recovery recomputes it as part of its batch."""
        if not self.settled.is_set():
            self.state = RequestState.running

    def log_result(self) -> None:
        """Write the result to the log. Raises Refused (507): the disk is full."""
        assert self.result is not None
        header = {"what": "result", "id": self.request_id, "type": self.result.content_type, "error": self.result.error}
        self.log.append(Record({**header, **self.metadata}, self.result.body))
        self.state = RequestState.logged


@dataclass
class _KeptResults:
    """Results of one key: their bytes, and the ids of the fetched and the unfetched ones in the order of dropping."""

    num_bytes: int = 0
    fetched: OrderedDict[str, None] = field(default_factory=OrderedDict)
    unfetched: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self.fetched) + len(self.unfetched)


class RequestStore:
    """All accepted requests of the server.

    Args:
        max_bytes: limit on the kept results. Beyond it, results of the key with the most bytes are dropped: the longest-fetched
            first, then the oldest unfetched.
        max_pending: limit on the bytes of unsettled requests. Beyond it, new requests are refused. If several keys share the
            limit, each leaves as many bytes free as its requests have.
        sharer_of: returns the key whose share an object counts towards, by id; None: it does not share the limits.
    """

    def __init__(
        self, max_bytes: int, max_pending: int = 1 << 30, sharer_of: Callable[[str], str | None] = lambda _: None
    ) -> None:
        self.max_bytes = max_bytes
        self.max_pending = max_pending
        self.kept_bytes = self.pending_bytes = 0
        # Set at shutdown: no new requests are accepted.
        self.closing = False
        # Set at shutdown: requests stay unsettled, and a restart recomputes them.
        self.frozen = False
        self.completions = Completions()
        # Called with every request when it is settled.
        self.watchers: list[Callable[[Request], None]] = []
        self._requests: dict[str, Request] = {}
        self._sharer_of = sharer_of
        # By key: the results that are kept, and the bytes of unsettled requests.
        self._kept: defaultdict[str | None, _KeptResults] = defaultdict(_KeptResults)
        self._pending: Counter[str | None] = Counter()
        # By scope: requests with lower numbers have run and will never run again.
        self._retired_below: dict[str, int] = {}

    def accept(self, log: Log, request: Request, body: bytes, *, is_due: bool = False) -> tuple[Request, bool]:
        """Log a new request. Returns the request, or the earlier request of which it is a retry, and whether it is new.

        A client retries a request if the acknowledgement was lost. The retry must not run the request a second time.

        Args:
            is_due: other requests wait for this one, so the limit on pending bytes does not apply.

        Raises:
            Refused: 400, a different request has this number; 429, too many bytes are pending (clients retry soon); 503, the
                server is shutting down; 507, the disk is full.
        """
        kind = request.kind
        known = self._requests.get(request.request_id)
        if known is not None and known.digest != request.digest:
            raise Refused(
                400,
                f"{kind}: request {request.number} of {request.scope} was accepted with a different body; a retry must send "
                "the same bytes",
            )
        if known is not None:
            return known, False
        request.log = log
        if request.number < self._retired_below.get(request.scope, 0):
            # This is a late retry: the client fetched the result long ago.
            return request, False
        if self.closing:
            raise Refused(503, "the server is shutting down: it finishes accepted requests and accepts no new ones")
        if self.pending_bytes and self.pending_bytes + len(body) > self.max_pending and not is_due:
            raise Refused(429, f"{kind}: {self.pending_bytes >> 20} MiB of requests are pending; retry later")
        request.sharer = self._sharer_of(request.scope)
        own_bytes = 0 if request.sharer is None else self._pending[request.sharer]
        if own_bytes and own_bytes + len(body) > self.max_pending - self.pending_bytes and not is_due:
            raise Refused(429, f"{kind}: {own_bytes >> 20} MiB of requests of {request.sharer} are pending; retry later")
        # Log before anything else: if this fails, the request was not accepted, and the client retries it.
        log.append(Record({"what": "request", "id": request.request_id, "kind": kind}, body))
        self._requests[request.request_id] = request
        self._add_pending(request, request.num_bytes)
        return request, True

    def is_known(self, request: Request) -> bool:
        """Whether the request is a retry of an accepted one."""
        return request.request_id in self._requests

    def restore(self, log: Log, request: Request) -> None:
        """Add a request of an earlier process, with its result if there is one."""
        request.log, request.is_restored = log, True
        request.sharer = self._sharer_of(request.scope)
        self._requests[request.request_id] = request
        self._add_pending(request, request.num_bytes)
        if request.result is not None:
            # It is unknown whether the client has fetched the result. Count it as fetched, so that it can be dropped.
            request.fetched = True
            request.state = RequestState.logged
            self._keep_result(request, request.result)

    def settle(self, request: Request, result: StoredResult) -> None:
        """Set the result. Do nothing if the request is already settled or cancelled, or its session or the server has ended."""
        if request.settled.is_set() or self.frozen:
            return
        request.state, request.result = RequestState.settled, result
        # If the disk is full, the request stays settled but not logged. log_results() retries before the next snapshot.
        with contextlib.suppress(Refused):
            request.log_result()
        self._keep_result(request, result)
        for watcher in self.watchers:
            watcher(request)

    def log_results(self, scope: str) -> None:
        """Log the results of ``scope`` that a full disk kept from being logged. Raises Refused (507): the disk still is."""
        for request in self._requests.values():
            if request.scope == scope and request.state is RequestState.settled and request.result is not None:
                request.log_result()

    def _keep_result(self, request: Request, result: StoredResult) -> None:
        request.settled_at = time.monotonic()
        self.kept_bytes += len(result.body)
        results = self._kept[request.sharer]
        results.num_bytes += len(result.body)
        self._add_pending(request, -request.num_bytes)
        results.unfetched[request.request_id] = None
        request.settled.set()
        if request.kind == SAMPLE:
            self.completions.add(request, result)
        while self.kept_bytes > self.max_bytes and sum(map(len, self._kept.values())) > 1:
            shares = sorted(self._kept.values(), key=lambda share: share.num_bytes, reverse=True)
            oldest = (next(iter(share.fetched or share.unfetched)) for share in shares if len(share))
            # The newest result goes last: its client has had no time to fetch it.
            self._drop_result(self._requests[next(name for name in oldest if name != request.request_id)])

    def _add_pending(self, request: Request, num_bytes: int) -> None:
        self.pending_bytes += num_bytes
        self._pending[request.sharer] += num_bytes

    def cancel(self, request_id: str) -> None:
        """Fail a sampling request that is not settled, and stop it. Requests of other kinds are not cancelled."""
        request = self._requests.get(request_id)
        if request is not None and request.kind == SAMPLE and not request.settled.is_set():
            request.is_cancelled = True
            if request.stop is not None:
                request.stop()
                request.stop = None
            self.settle(request, failure(RolloutError("asample: cancelled by the client")))

    def acknowledge(self, request_ids: Iterable[str]) -> None:
        """Drop results whose receipt the client has confirmed."""
        for request_id in request_ids:
            if request_id in self._requests:
                self._drop_result(self._requests[request_id])

    async def fetch(self, request_id: str, wait_s: float) -> StoredResult | None:
        """Wait up to ``wait_s`` seconds for a result. Returns None if the request is not settled by then.

        Raises:
            Refused: 404, the request is unknown, or its session ended; 410, its result was dropped.
        """
        request = self._requests.get(request_id)
        if request is None:
            if self.is_retired(request_id):
                raise Refused(410, FETCHED_MESSAGE.format(request_id))
            raise unknown_request(request_id)
        try:
            await asyncio.wait_for(request.settled.wait(), wait_s)
        except TimeoutError:
            return None
        if request_id not in self._requests:
            raise Refused(404, f"retrieve_future: the session of {request_id!r} has ended")
        if request.result is None:
            raise Refused(410, (FETCHED_MESSAGE if request.fetched else EVICTED_MESSAGE).format(request_id))
        request.fetched = True
        results = self._kept[request.sharer]
        results.unfetched.pop(request_id, None)
        results.fetched[request_id] = None
        results.fetched.move_to_end(request_id)
        return request.result

    def remove_samples(self, session_id: str) -> None:
        """Remove the unsettled sampling requests of a session. Their results are ignored."""
        own = [request for request in self.unsettled() if request.kind == SAMPLE and request.scope.startswith(f"{session_id}:")]
        self.remove([request.request_id for request in own])

    def remove_session(self, session_id: str) -> None:
        """Remove all requests and feeds of a session that has ended."""
        self.remove([known for known in self._requests if known.startswith((f"{session_id}:", f"{session_id}/"))])
        for scope in [known for known in self._retired_below if known == session_id or known.startswith(f"{session_id}:")]:
            del self._retired_below[scope]
        self.completions.remove(session_id)

    def remove_old(self, age_s: float) -> None:
        """Remove requests that were settled more than ``age_s`` seconds ago and are fetched.

        For servers without a log. With a log, requests are removed together with their log file.
        """
        limit = time.monotonic() - age_s
        old = [request for request in self._requests.values() if request.settled.is_set() and request.settled_at < limit]
        for request in [request for request in old if request.fetched or request.result is None]:
            # Samples do not arrive in order, so a lower number may still be new.
            if request.kind != SAMPLE:
                self.retire_below(request.scope, max(request.number + 1, self._retired_below.get(request.scope, 0)))
            self.remove([request.request_id])

    def remove(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if (request := self._requests.pop(request_id, None)) is not None:
                self._drop_result(request)
                if not request.settled.is_set():
                    self._add_pending(request, -request.num_bytes)
                    # Wake the callers of fetch(). A result that is computed later is ignored.
                    request.settled.set()

    def retire_below(self, scope: str, number: int) -> None:
        """Declare that requests of ``scope`` below ``number`` never run again. Kept results can still be fetched."""
        self._retired_below[scope] = number

    def may_be_fetched(self, request_id: str) -> bool:
        """Whether the client has yet to fetch the result of the request."""
        request = self._requests.get(request_id)
        return request is not None and not (request.settled.is_set() and (request.fetched or request.result is None))

    def is_retired(self, request_id: str) -> bool:
        """Whether the request never runs again."""
        scope, _, number = request_id.rpartition("/")
        # The id comes from a client, and int() of a very long number is slow.
        return number.isdecimal() and len(number) < 20 and int(number) < self._retired_below.get(scope, 0)

    def __len__(self) -> int:
        return len(self._requests)

    def unsettled(self) -> list[Request]:
        return [request for request in self._requests.values() if not request.settled.is_set()]

    def _drop_result(self, request: Request) -> None:
        results = self._kept[request.sharer]
        results.fetched.pop(request.request_id, None)
        results.unfetched.pop(request.request_id, None)
        if request.kind == SAMPLE:
            self.completions.drop(request)
        if request.result is not None:
            self.kept_bytes -= len(request.result.body)
            results.num_bytes -= len(request.result.body)
            request.result = None
