"""Requests that were accepted, and their results: what a client may ask for again and again until it has got them."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from cookbook.errors import RolloutError
from cookbook.server.completions import Completions
from cookbook.server.errors import Refused
from cookbook.server.log import Log
from cookbook.server.records import Record
from cookbook.server.results import Result, failure

SAMPLE = "asample"
GONE = "retrieve_future: the result of {!r} was fetched before and is no longer kept"
MISSED = "retrieve_future: the result of {!r} was not fetched before others needed the memory; raise server.max_results_mb"


@dataclass
class Answer:
    """One accepted request. ``digest`` tells a repetition from another request under the same number; ``log`` holds it, and
    gets its result with ``facts`` of how it was computed.
    """

    request_id: str
    digest: bytes
    kind: str
    log: Log
    num_bytes: int = 0  # of the request
    asked: float = field(default_factory=time.monotonic)
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    result: Result | None = None  # None: not yet, or no longer
    fetched: bool = False
    done: float = 0.0  # when it was settled
    facts: dict[str, Any] = field(default_factory=dict)

    def request(self, body: bytes) -> Record:
        return Record({"what": "request", "id": self.request_id, "kind": self.kind}, body)

    def record(self, result: Result) -> Record:
        told = {"what": "result", "id": self.request_id, "type": result.content_type, "error": result.error}
        return Record({**told, **self.facts}, result.body)


class Answers:
    """All of them. Results go when they exceed ``max_bytes`` together, those that were fetched first. Nothing new is accepted
    while requests of ``max_pending`` bytes wait for theirs.
    """

    def __init__(self, max_bytes: int, max_pending: int = 1 << 30) -> None:
        self.max_bytes = max_bytes
        self.max_pending = max_pending
        self.kept_bytes = self.pending_bytes = 0
        self.closing = False  # nothing new is accepted
        self.completions = Completions()
        self.watchers: list[Callable[[Answer, Result], None]] = []  # called with every answer as it is settled
        self._answers: dict[str, Answer] = {}
        self._fetched: OrderedDict[str, None] = OrderedDict()
        self._unfetched: OrderedDict[str, None] = OrderedDict()
        self._unlogged: dict[str, Answer] = {}  # their results are not on the disk
        self._floors: dict[str, int] = {}  # by scope: requests of lower numbers are done with, known here or not

    def claim(self, log: Log, scope: str, number: int, body: bytes, kind: str, *, is_due: bool = False) -> tuple[Answer, bool]:
        """The answer to request ``number`` of ``scope``, and whether it is a new one, which is in ``log`` then.

        A client repeats a request whose acknowledgement it has not seen. It must not run twice. ``is_due``: others wait for it.

        Raises:
            Refused: 400, another request had that number; 429, too much is pending: clients ask again soon; 503, the server is
                about to end; 507, the disk is full.
        """
        request_id = f"{scope}/{number}"
        digest = hashlib.sha256(body).digest()
        known = self._answers.get(request_id)
        if known is None and number < self._floors.get(scope, 0):
            return Answer(request_id, digest, kind, log), False  # the result was fetched long ago
        if known is None:
            if self.closing:
                raise Refused(503, "the server is shutting down and takes no new work; what it has accepted is finished")
            if self.pending_bytes and self.pending_bytes + len(body) > self.max_pending and not is_due:
                raise Refused(429, f"{kind}: {self.pending_bytes >> 20} MiB of requests are pending; send it again later")
            known = Answer(request_id, digest, kind, log, len(body))
            log.append(known.request(body))
            self._answers[request_id] = known
            self.pending_bytes += known.num_bytes
            return known, True
        if known.digest != digest:
            raise Refused(400, f"{kind}: number {number} of {scope} was another request; a repetition must be the same bytes")
        return known, False

    def restore(self, answer: Answer, result: Result | None) -> None:
        """An answer that an earlier process has promised, and perhaps given: who had it then, and who had not, is not known."""
        self._answers[answer.request_id] = answer
        self.pending_bytes += answer.num_bytes
        if result is not None:
            answer.fetched = True
            self._keep(answer, result)
            self._shrink()

    def settle(self, answer: Answer, result: Result) -> None:
        """The first result counts: what comes after a cancellation, or after its client has left, is nobody's."""
        if answer.settled.is_set():
            return
        try:
            answer.log.append(answer.record(result))
        except Refused:  # the disk is full: after a crash now, the request is computed again
            self._unlogged[answer.request_id] = answer
        self._keep(answer, result)
        for told in self.watchers:
            told(answer, result)
        self._shrink()

    def log_late(self, scope: str) -> None:
        """Logs the results of ``scope`` that did not fit on the disk in their time. Raises Refused: they still do not."""
        for request_id, answer in list(self._unlogged.items()):
            if request_id.rpartition("/")[0] == scope:
                if answer.result is not None:
                    answer.log.append(answer.record(answer.result))
                del self._unlogged[request_id]

    def _keep(self, answer: Answer, result: Result) -> None:
        answer.result, answer.done = result, time.monotonic()
        self.kept_bytes += len(result.body)
        self.pending_bytes -= answer.num_bytes
        self._unfetched[answer.request_id] = None
        answer.settled.set()
        if answer.kind == SAMPLE:
            scope, _, number = answer.request_id.rpartition("/")
            size, failed = len(result.body), result.is_failure
            self.completions.add(scope, int(number), request_id=answer.request_id, num_bytes=size, failed=failed)

    def cancel(self, request_id: str) -> None:
        """Fails a sampling request that is still waiting; nothing happens to any other."""
        answer = self._answers.get(request_id)
        if answer is not None and answer.kind == SAMPLE:
            self.settle(answer, failure(RolloutError("asample: cancelled by the client")))

    def acknowledge(self, request_ids: Iterable[str]) -> None:
        """The client has these results: they need not be kept."""
        for request_id in request_ids:
            if request_id in self._answers:
                self._drop(request_id)

    async def fetch(self, request_id: str, wait_s: float) -> Result | None:
        """The result, as soon as it is there; None when it is not after ``wait_s``.

        Raises:
            Refused: 404, no such request, or its session ended meanwhile; 410, its result was fetched long ago and dropped.
        """
        answer = self._answers.get(request_id)
        if answer is None and self.is_past(request_id):
            raise Refused(410, GONE.format(request_id))
        if answer is None:
            raise Refused(404, f"retrieve_future: there is no request {request_id!r} here; the server may have started anew")
        try:
            await asyncio.wait_for(answer.settled.wait(), wait_s)
        except TimeoutError:
            return None
        if request_id not in self._answers:
            raise Refused(404, f"retrieve_future: the session of {request_id!r} has ended")
        if answer.result is None:
            raise Refused(410, (GONE if answer.fetched else MISSED).format(request_id))
        answer.fetched = True
        self._unfetched.pop(request_id, None)
        self._fetched[request_id] = None
        self._fetched.move_to_end(request_id)
        return answer.result

    def forget(self, owner: str) -> None:
        """Drops everything of a session: nobody will ask any more."""
        self.remove([known for known in self._answers if known.startswith((f"{owner}:", f"{owner}/"))])
        for scope in [known for known in self._floors if known == owner or known.startswith(f"{owner}:")]:
            del self._floors[scope]
        self.completions.forget(owner)

    def forget_old(self, age_s: float) -> None:
        """Forgets what was answered so long ago, and fetched. Where there is a log, it tells what can be forgotten."""
        limit = time.monotonic() - age_s
        old = [one for one in self._answers.values() if one.settled.is_set() and one.done < limit]
        for answer in [one for one in old if one.fetched or one.result is None]:
            scope, _, number = answer.request_id.rpartition("/")
            if answer.kind != SAMPLE:  # their numbers have no order
                self.raise_floor(scope, max(int(number) + 1, self._floors.get(scope, 0)))
            self.remove([answer.request_id])

    def remove(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if request_id in self._answers:
                self._drop(request_id)
                answer = self._answers.pop(request_id)
                if not answer.settled.is_set():
                    self.pending_bytes -= answer.num_bytes
                    answer.settled.set()  # whoever waits is told; what is still computed for it is nobody's
                self._unlogged.pop(request_id, None)

    def raise_floor(self, scope: str, number: int) -> None:
        """Requests of ``scope`` below ``number`` have run, and never do again; their results are kept while they are known."""
        self._floors[scope] = number

    def is_wanted(self, request_id: str) -> bool:
        """Whether somebody may not have its result yet."""
        answer = self._answers.get(request_id)
        return answer is not None and not (answer.settled.is_set() and (answer.fetched or answer.result is None))

    def is_past(self, request_id: str) -> bool:
        """Whether it lies below its scope's floor."""
        scope, _, number = request_id.rpartition("/")
        return number.isdecimal() and len(number) < 20 and int(number) < self._floors.get(scope, 0)

    def __len__(self) -> int:
        return len(self._answers)

    def unsettled(self) -> list[Answer]:
        """Those without a result yet."""
        return [answer for answer in self._answers.values() if not answer.settled.is_set()]

    @property
    def pending(self) -> int:
        return len(self.unsettled())

    def _shrink(self) -> None:
        while self.kept_bytes > self.max_bytes and len(self._fetched) + len(self._unfetched) > 1:
            self._drop(next(iter(self._fetched or self._unfetched)))

    def _drop(self, request_id: str) -> None:
        self._fetched.pop(request_id, None)
        self._unfetched.pop(request_id, None)
        answer = self._answers[request_id]
        self._tell_no_more(answer)
        if answer.result is not None:
            self.kept_bytes -= len(answer.result.body)
            answer.result = None

    def _tell_no_more(self, answer: Answer) -> None:
        if answer.kind == SAMPLE:
            scope, _, number = answer.request_id.rpartition("/")
            self.completions.drop(scope, int(number), answer.request_id)
