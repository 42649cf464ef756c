"""Watchdog for an unreachable server. It warns and finally gives up; the client package retries silently, without limit."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cookbook.futures import Future

T = TypeVar("T")

log = logging.getLogger("cookbook")

# Seconds between two probes of the server while a call is pending.
PROBE_S = 2.0
# For this many seconds after a failed probe, failed requests are attributed to the unreachable server.
RECENT_S = 300.0


@dataclass(eq=False)
class Watchdog:
    """Tracks the pending calls to a server, and fails all of them once the server has been unreachable for ``patience_s``.

    Args:
        url: address of the server, for log messages.
        is_reachable: whether the server responds; must not raise.
        unreachable: returns the error with which the calls fail.
        lost: returns an error if the server is permanently gone; calls then fail immediately. Otherwise returns None.
    """

    url: str
    is_reachable: Callable[[], bool]
    patience_s: float
    unreachable: Callable[[], BaseException]
    lost: Callable[[], BaseException | None] = lambda: None
    # Whether the server was unreachable for longer than ``patience_s``.
    gave_up: bool = False
    # Whether the connection is closed, so that requests are no longer retried.
    closed: bool = False
    _pending: set[Future[Any]] = field(default_factory=set)
    # Time of the last successful probe, or of the first pending call if that is later.
    _last_seen: float = 0.0
    # Time of the last failed probe.
    _last_unanswered: float = -math.inf
    _is_running: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def follow(self, call: concurrent.futures.Future[T], translate: Callable[[BaseException], BaseException]) -> Future[T]:
        """Track ``call``. Returns a future with its result, its translated error, or the error of an unreachable server."""
        followed: Future[T] = Future()
        with self._lock:
            if not self._pending:
                self._last_seen = time.monotonic()
            self._pending.add(followed)
            # The thread runs only while calls are pending. A permanent thread would keep an unused connection in memory.
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._watch, name="cookbook-watch", daemon=True).start()

        def copy_result(done: concurrent.futures.Future[T]) -> None:
            with self._lock:
                self._pending.discard(followed)
            error = concurrent.futures.CancelledError() if done.cancelled() else done.exception()
            # The watchdog may have failed the future already.
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                if error is not None:
                    followed.set_exception(translate(error))
                else:
                    followed.set_result(done.result())

        call.add_done_callback(copy_result)
        return followed

    def waits_for_server(self) -> bool:
        """Whether the server was unreachable recently, and the watchdog has not given up."""
        return not (self.gave_up or self.closed) and time.monotonic() - self._last_unanswered < RECENT_S

    def give_up(self, error: BaseException) -> None:
        """Fail every pending call with ``error``."""
        with self._lock:
            pending, self._pending = self._pending, set()
        for followed in pending:
            # The result may have arrived in the meantime.
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                followed.set_exception(error)

    def _watch(self) -> None:
        """Probe the server while a call is pending, and after a warning until the server responds again."""
        reported = False
        while True:
            time.sleep(PROBE_S)
            with self._lock:
                if not self._pending and not reported:
                    self._is_running = False
                    return
            if self.is_reachable():
                if reported:
                    log.warning("%s answers again, after %.0f s", self.url, time.monotonic() - self._last_seen)
                self._last_seen, reported = time.monotonic(), False
                continue
            self._last_unanswered = time.monotonic()
            if not reported:
                limit = f" for up to {self.patience_s:g} s (backend.patience_s)" if math.isfinite(self.patience_s) else ""
                log.warning("no answer from %s; trying again%s", self.url, limit)
                reported = True
            error = self.lost()
            if error is None and time.monotonic() - self._last_seen > self.patience_s:
                error = self.unreachable()
            if error is not None:
                self.gave_up, reported = True, False
                self.give_up(error)
