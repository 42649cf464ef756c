"""The endpoint for agents: the weights that it samples from, and the part of the worker's time that each API key gets.

Its requests are not logged: an agent's connection ends with the server, so no client could fetch a result after a restart.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from cookbook.backends.local.sample_queue import LocalSampler, SampleQueue
from cookbook.backends.worker import Account, Lane
from cookbook.server.state.host import Host
from cookbook.server.state.samplers import Batcher, SamplingSession

# Owner of the sampling sessions of the endpoint. No client can create or name a session with this id.
OWNER = "endpoint"


class SizeClass(NamedTuple):
    """Requests of one caller and of similar size, which share batches."""

    lane: Lane
    queue: SampleQueue
    batcher: Batcher


@dataclass(eq=False)
class Caller:
    """The use of the endpoint by one API key.

    Requests of similar size share a batch. Requests of different size are computed in turns, so that a short answer does not
    wait until the long answers before it are complete.

    Attributes:
        account: its use of the worker thread, which the endpoint shares with all sessions.
        pending_tokens: tokens that its unfinished requests may sample.
        num_requests: number of its requests, from which the seeds of requests without a seed are derived.
    """

    account: Account = field(default_factory=Account)
    pending_tokens: int = 0
    num_requests: int = 0
    _classes: dict[int, SizeClass] = field(default_factory=dict)

    def size_class(self, host: Host, num_tokens: int) -> SizeClass:
        """Return the queue of requests with up to ``num_tokens`` tokens. Each class spans a factor of 16."""
        size = num_tokens.bit_length() // 4
        if size not in self._classes:
            lane = host.worker.lane(self.account, pauses=host.can_pause)
            self._classes[size] = SizeClass(lane, host.sample_queue(lane), Batcher(lane))
        return self._classes[size]

    @property
    def num_drawn(self) -> int:
        """Tokens of its unfinished completions, in memory."""
        return sum(waiting_class.queue.num_drawn for waiting_class in self._classes.values())

    def drop(self) -> None:
        """Stop all requests."""
        for waiting_class in self._classes.values():
            waiting_class.lane.drop()


class Callers(dict[str, Caller]):
    """The callers by the name of their API key, made when they are used. ``new_account`` makes the account of a name."""

    def __init__(self, new_account: Callable[[str], Account]) -> None:
        super().__init__()
        self._new_account = new_account

    def __missing__(self, name: str) -> Caller:
        self[name] = caller = Caller(self._new_account(name))
        return caller


class Endpoint:
    """State of the endpoint. Only the event loop changes it.

    Attributes:
        callers: by the name of the API key; without keys all clients are one caller.
        idle: set while no request is unfinished.
        created: start of the server, in seconds since 1970.
        rendering: held while a prompt is rendered on another thread; the renderer is not thread-safe.
    """

    def __init__(self, new_account: Callable[[str], Account] = lambda _: Account()) -> None:
        self.callers = Callers(new_account)
        self.idle = asyncio.Event()
        self.idle.set()
        self.rendering = asyncio.Lock()
        self.num_unfinished = 0
        self.created = time.time()
        self._base: SamplingSession | None = None

    def begin(self, caller: Caller, weights: SamplingSession, num_tokens: int) -> None:
        """Count a request as unfinished. The cache does not evict its weights until :meth:`end`."""
        caller.pending_tokens += num_tokens
        weights.num_pending += 1
        self.num_unfinished += 1
        self.idle.clear()

    def end(self, caller: Caller, weights: SamplingSession, num_tokens: int) -> None:
        """Count a request as finished."""
        caller.pending_tokens -= num_tokens
        weights.num_pending -= 1
        self.num_unfinished -= 1
        if not self.num_unfinished:
            self.idle.set()

    @property
    def num_drawn(self) -> int:
        """Tokens of unfinished completions, in memory."""
        return sum(caller.num_drawn for caller in self.callers.values())

    def drop(self) -> None:
        """Stop all requests."""
        for caller in self.callers.values():
            caller.drop()

    async def base(self, host: Host) -> SamplingSession:
        """Return a session on the base model."""
        if self._base is None:
            sampler: LocalSampler = await asyncio.to_thread(host.base_sampler)
            self._base = SamplingSession(f"{OWNER}:base", OWNER, host.name, None, sampler, host.seed)
        return self._base
