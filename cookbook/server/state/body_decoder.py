"""Decoding of large request bodies outside of the event loop, which answers other clients meanwhile."""

from __future__ import annotations

import asyncio
import contextvars
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cookbook.server.keys import caller_name

T = TypeVar("T")
# Smaller bodies are decoded on the event loop: it takes a millisecond, and another thread would add latency.
INLINE_BYTES = 1 << 14
NUM_THREADS = 2


class BodyDecoder:
    """Threads that decode bodies. An API key decodes one body at a time, so that each key waits for one of each other key."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, "decode")
        self._turns: defaultdict[str | None, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def run(self, num_bytes: int, decode: Callable[[], T]) -> T:
        """Return ``decode()`` of a body of ``num_bytes`` bytes."""
        if num_bytes <= INLINE_BYTES:
            return decode()
        context = contextvars.copy_context()
        async with self._turns[caller_name()]:
            return await asyncio.get_running_loop().run_in_executor(self._pool, context.run, decode)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
