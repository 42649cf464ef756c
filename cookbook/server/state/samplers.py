"""Sampling sessions, the batching of their requests, and the cache of sessions whose weights are in memory."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from cookbook.backends import worker
from cookbook.backends.local.sample_queue import LocalSampler
from cookbook.backends.worker import Lane
from cookbook.checkpoints import manifest, sampler_checkpoints
from cookbook.futures import call_on
from cookbook.server.state.countdown import Countdown
from cookbook.types import SampleResponse

Callback = Callable[[Future[SampleResponse]], None]
# The limit can be high, because most sessions share their weights with others.
MAX_SAMPLERS = 1024
# Ids of evicted sessions are kept, so that later requests fail with an error that names the eviction.
MAX_EVICTED_IDS = 10_000


class AnnouncedBatch:
    """A batch that a client has announced: none of its requests starts until all have arrived.

    The last bits of a result depend on which requests are computed together. Waiting for the whole batch makes results
    independent of arrival times.

    Args:
        timeout_s: seconds after which the batch starts with the requests that have arrived.
    """

    def __init__(self, session: SamplingSession, batcher: Batcher, count: int, timeout_s: float) -> None:
        self._session = session
        self._batcher = batcher
        self._count = count
        self._starts: dict[int, Callable[[], None]] = {}
        self._timer = Countdown(timeout_s, self.start)

    def add(self, number: int, start: Callable[[], None]) -> None:
        """Add a request; ``start`` functions are called in the order of the requests' numbers."""
        self._starts[number] = start
        if len(self._starts) == self._count:
            self.start()

    def cancel(self) -> None:
        """Never start the requests, because their session has ended."""
        self._timer.cancel()
        self._session.batch = None

    def start(self) -> None:
        """Start the requests that have arrived."""
        self._timer.cancel()
        self._session.batch = None
        with self._batcher.same_batch:
            for number in sorted(self._starts):
                self._starts[number]()


@dataclass
class SamplingSession:
    """Server side of a sampling client: one version of the weights, or the newest in-flight weights of its run.

    Attributes:
        seed: base of the seeds of requests without a seed.
        published_by: number of the run's request that published the weights; 0: a checkpoint or the base model.
        num_bytes: size of the weights; 0 if they belong to the base model or to a run, which are in memory anyway.
        num_pending: number of requests that are not settled.
    """

    sampler_id: str
    session_id: str
    base_model: str
    model_path: str | None
    sampler: LocalSampler
    seed: int
    published_by: int = 0
    num_bytes: int = 0
    num_pending: int = 0
    batch: AnnouncedBatch | None = None

    def seed_of(self, number: int) -> int:
        """Return the seed for a request without one: different for each number, and the same for a retry."""
        name = f"{self.seed} {self.sampler_id.rpartition(':')[2]} {number}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 2


class Batcher:
    """Computes the requests of a session in batches: requests that arrive while a batch is computed form the next one.

    No timer delays a request. Under load all requests that have arrived share forward passes.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        # Requests that are added while this lock is held share a batch, because a batch starts under the lock.
        self.same_batch = threading.RLock()
        self._next_batch: list[tuple[str, Future[SampleResponse], Callback]] = []

    def add(self, request_id: str, sample: Future[SampleResponse], callback: Callback) -> None:
        """Add a request to the next batch, and call ``callback`` on the event loop once ``sample`` is done.

        The caller must not have waited for ``sample`` or added callbacks to it: either sends the request without its batch.
        """
        loop = asyncio.get_running_loop()

        def done(_: Future[SampleResponse]) -> None:
            call_on(loop, callback, sample)

        with self.same_batch:
            is_first = not self._next_batch
            self._next_batch.append((request_id, sample, done))
        if is_first:
            self._lane.submit(self._start_batch)

    def _start_batch(self) -> None:
        """Start the batch, on the worker thread. Adding a callback to one sample sends all queued samples of its weights."""
        with self.same_batch:
            batch, self._next_batch = self._next_batch, []
        with worker.purpose("\n".join(request_id for request_id, _, _ in batch)):
            for _, sample, callback in batch:
                sample.add_done_callback(callback)


class SamplerCache(OrderedDict[str, SamplingSession]):
    """Least-recently-used cache of sampling sessions by id, for at most ``max_bytes`` of weights.

    A session with unsettled requests is never evicted. Sessions that share weights are evicted together or not at all, because
    evicting only some of them would free no memory.

    Args:
        on_evict: called with each evicted session.
        on_forget: called with the id of an evicted session when the id is dropped; see ``MAX_EVICTED_IDS``.
        sharer_of: returns the key whose share a session counts towards, by id. Sessions of the key with the most are evicted
            first.
    """

    def __init__(
        self,
        max_bytes: int,
        on_evict: Callable[[SamplingSession], None],
        on_forget: Callable[[str], None],
        sharer_of: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        super().__init__()
        self.max_bytes = max_bytes
        self.num_evicted = 0
        self._on_evict = on_evict
        self._on_forget = on_forget
        self._sharer_of = sharer_of
        self._evicted: OrderedDict[str, None] = OrderedDict()

    def touch(self, sampler_id: str) -> SamplingSession:
        """Return the session and mark it as most recently used."""
        self.move_to_end(sampler_id)
        return self[sampler_id]

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights that only sampling sessions use."""
        return sum({id(session.sampler): session.num_bytes for session in self.values()}.values())

    def was_evicted(self, sampler_id: str) -> bool:
        return sampler_id in self._evicted

    def add(self, session: SamplingSession) -> None:
        self[session.sampler_id] = session
        self.move_to_end(session.sampler_id)
        self._evicted.pop(session.sampler_id, None)
        while len(self) > MAX_SAMPLERS:
            idle = [candidate for candidate in self.values() if candidate is not session and not candidate.num_pending]
            if not idle:
                break
            counts = Counter(map(self._sharer_of, self))
            # The least recently used of the key with the most sessions: max() returns the first of equal ones.
            self._evict(max(idle, key=lambda candidate: counts[self._sharer_of(candidate.sampler_id)]))
        self._free_weights(session)

    def forget_evicted(self, session_id: str) -> None:
        """Drop the ids of the evicted samplers of a session that has ended."""
        for sampler_id in [known for known in self._evicted if known.startswith(f"{session_id}:")]:
            del self._evicted[sampler_id]

    def _free_weights(self, newest: SamplingSession) -> None:
        """Evict the least recently used weights until the limit is met, but not those of ``newest``."""
        # Sessions by their weights, the least recently used weights first. pop() moves weights behind those used earlier.
        users: dict[int, list[SamplingSession]] = {}
        for session in self.values():
            users[id(session.sampler)] = [*users.pop(id(session.sampler), []), session]
        excess = self.num_bytes - self.max_bytes
        bytes_by_sharer: Counter[str | None] = Counter()
        for sharing in users.values():
            bytes_by_sharer[self._sharer_of(sharing[-1].sampler_id)] += sharing[-1].num_bytes
        for sharing in sorted(users.values(), key=lambda sessions: -bytes_by_sharer[self._sharer_of(sessions[-1].sampler_id)]):
            if excess <= 0:
                return
            num_bytes = sharing[-1].num_bytes
            if num_bytes and not any(session is newest or session.num_pending for session in sharing):
                excess -= num_bytes
                for session in sharing:
                    self._evict(session)

    def _evict(self, session: SamplingSession) -> None:
        del self[session.sampler_id]
        self._evicted[session.sampler_id] = None
        self.num_evicted += 1
        self._on_evict(session)
        if len(self._evicted) > MAX_EVICTED_IDS:
            self._on_forget(self._evicted.popitem(last=False)[0])


def trained_bytes(sampler: LocalSampler) -> int:
    """Return the bytes of the trainable weights. A copy of a run's weights shares all others with the base model."""
    parameters = sampler.engine().model.network.parameters()
    return sum(tensor.numel() * tensor.element_size() for tensor in parameters if tensor.requires_grad)


def file_bytes(checkpoint: Path) -> int:
    """Return the bytes that the weights of a checkpoint take in memory. A delta becomes the whole weights of its base."""
    is_delta = (checkpoint / manifest.NAME).is_file() and manifest.read(checkpoint)["kind"] == "delta"
    folder = sampler_checkpoints.lineage(checkpoint)[0] if is_delta else checkpoint
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
