"""Sampling sessions, and how their requests are answered together."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from cookbook.backends.sampling import LocalSampler
from cookbook.backends.worker import Worker

Told = Callable[[Future[Any]], None]


class Gathering:
    """A batch that a client has announced: its requests wait until all have come, so that what is computed together, and with
    it the last bits of the results, does not depend on when they came.

    Args:
        ended: called when it is over.
        together: a context in which what is started is computed together.
    """

    def __init__(
        self,
        count: int,
        timeout_s: float,
        ended: Callable[[], None],
        together: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._count = count
        self._ended = ended
        self._together = together
        self._starts: dict[int, Callable[[], None]] = {}
        self._alarm = asyncio.get_running_loop().call_later(timeout_s, self.end)

    def arrived(self, number: int, start: Callable[[], None]) -> None:
        """``start`` is called in the order of numbers."""
        self._starts[number] = start
        if len(self._starts) == self._count:
            self.end()

    def end(self) -> None:
        """Starts what has come."""
        self._alarm.cancel()
        self._ended()
        with self._together():
            for number in sorted(self._starts):
                self._starts[number]()


@dataclass
class SamplingSession:
    """What a sampling client holds on to: one version of the weights, or the newest its run has published in flight."""

    sampler_id: str
    session_id: str
    base_model: str
    model_path: str | None
    sampler: LocalSampler
    seed: int  # of requests that bring none
    made_by: int = 0  # the number of the run's request that published it
    num_bytes: int = 0  # of weights that are nobody else's
    waiting: int = 0  # requests that are being answered
    joined: int = 0  # clients in other processes that share it
    gathering: Gathering | None = None

    def seed_of(self, number: int) -> int:
        """For a request without a seed: another one each, and the same again when it is repeated."""
        named = f"{self.seed} {self.sampler_id.rpartition(':')[2]} {number}"
        return int.from_bytes(hashlib.blake2b(named.encode(), digest_size=8).digest()) >> 2


class Batcher:
    """Answers sampling requests in batches that are closed when the worker gets to them.

    While it computes one batch the next one gathers. No time is waited for, and under load everything that has arrived
    shares its forward passes.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._lock = threading.RLock()
        self._gathering: list[tuple[Future[Any], Told]] = []

    def add(self, asked: Future[Any], told: Told) -> None:
        """``told`` is called, on the event loop, with ``asked`` once it is answered. Nobody may have looked at it before."""
        loop = asyncio.get_running_loop()

        def tell(done: Future[Any]) -> None:
            loop.call_soon_threadsafe(told, done)

        with self._lock:
            first = not self._gathering
            self._gathering.append((asked, tell))
        if first:
            self._worker.submit(self._close)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What is added inside of the block shares a batch."""
        with self._lock:
            yield

    def _close(self) -> None:
        """Looking at one future sends all that were asked of its model. This runs where they are computed."""
        with self._lock:
            batch, self._gathering = self._gathering, []
        for asked, told in batch:
            asked.add_done_callback(told)
