"""Sampling sessions, and how their requests are answered together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from cookbook.backends.sampling import LocalSampler
from cookbook.backends.worker import Worker

Told = Callable[[Future[Any]], None]


@dataclass
class SamplingSession:
    """What a sampling client holds on to: one version of the weights, or the newest its run has published in flight."""

    sampler_id: str
    session_id: str
    base_model: str
    model_path: str | None
    sampler: LocalSampler


class Batcher:
    """Answers sampling requests in batches that are closed when the worker gets to them.

    While it computes one batch the next one gathers. No time is waited for, and under load everything that has arrived
    shares its forward passes.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._lock = threading.Lock()
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

    def _close(self) -> None:
        """Looking at one future sends all that were asked of its model. This runs where they are computed."""
        with self._lock:
            batch, self._gathering = self._gathering, []
        for asked, told in batch:
            asked.add_done_callback(told)
