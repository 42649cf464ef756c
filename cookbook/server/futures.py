"""Requests that were accepted, and their results: what a client may ask for again and again until it has got them."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

from cookbook.server.errors import Refused
from cookbook.server.results import Result


@dataclass
class Answer:
    """One accepted request. ``digest`` tells a repetition from another request under the same number."""

    request_id: str
    digest: bytes
    kind: str
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    result: Result | None = None  # None: not yet, or no longer


class Answers:
    """All of them. Results that were fetched go first when they exceed ``max_bytes`` together."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.kept_bytes = 0
        self._answers: dict[str, Answer] = {}
        self._fetched: OrderedDict[str, None] = OrderedDict()

    def claim(self, scope: str, number: int, body: bytes, kind: str) -> tuple[Answer, bool]:
        """The answer to request ``number`` of ``scope``, and whether it is a new one.

        A client repeats a request whose acknowledgement it has not seen. It must not run twice.

        Raises:
            Refused: 400, another request had that number.
        """
        request_id = f"{scope}/{number}"
        digest = hashlib.sha256(body).digest()
        known = self._answers.get(request_id)
        if known is None:
            known = self._answers[request_id] = Answer(request_id, digest, kind)
            return known, True
        if known.digest != digest:
            raise Refused(400, f"{kind}: number {number} of {scope} was another request; a repetition must be the same bytes")
        return known, False

    def settle(self, answer: Answer, result: Result) -> None:
        answer.result = result
        self.kept_bytes += len(result.body)
        answer.settled.set()
        self._shrink()

    async def fetch(self, request_id: str, wait_s: float) -> Result | None:
        """The result, as soon as it is there; None when it is not after ``wait_s``.

        Raises:
            Refused: 404, no such request; 410, its result was fetched long ago and dropped.
        """
        answer = self._answers.get(request_id)
        if answer is None:
            raise Refused(404, f"retrieve_future: there is no request {request_id!r} here; the server may have started anew")
        try:
            await asyncio.wait_for(answer.settled.wait(), wait_s)
        except TimeoutError:
            return None
        if answer.result is None:
            raise Refused(410, f"retrieve_future: the result of {request_id!r} was fetched before and is no longer kept")
        self._fetched[request_id] = None
        self._fetched.move_to_end(request_id)
        return answer.result

    def forget(self, scope: str) -> None:
        """Drops everything of ``scope``: nobody will ask any more."""
        for request_id in [known for known in self._answers if known.rpartition("/")[0] == scope]:
            self._drop(request_id)
            del self._answers[request_id]

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def pending(self) -> int:
        return sum(not answer.settled.is_set() for answer in self._answers.values())

    def _shrink(self) -> None:
        while self.kept_bytes > self.max_bytes and self._fetched:
            self._drop(next(iter(self._fetched)))

    def _drop(self, request_id: str) -> None:
        self._fetched.pop(request_id, None)
        answer = self._answers[request_id]
        if answer.result is not None:
            self.kept_bytes -= len(answer.result.body)
            answer.result = None
