"""Waiting for a server that may be gone. The client package asks again for ever, and in silence; here patience ends."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from cookbook.futures import Future

log = logging.getLogger("cookbook")

PROBE_S = 2.0  # between two looks at the server while something is asked of it


class Watch:
    """Follows what is asked of a server, and fails all of it when nobody has answered there for ``patience_s``.

    Args:
        url: what it is called when the user is told that it does not answer, and that it does again.
        is_there: whether the server answers; must not raise.
        silent: the error for what is then failed.
    """

    def __init__(self, url: str, is_there: Callable[[], bool], patience_s: float, silent: Callable[[], BaseException]) -> None:
        self._state = _State(url, is_there, patience_s, silent)
        threading.Thread(target=_look, args=(self._state,), name="cookbook-watch", daemon=True).start()
        weakref.finalize(self, self._state.end).atexit = False

    def follow(self, asked: concurrent.futures.Future[Any]) -> Future[Any]:
        """The answer to ``asked``, or the error that nobody is there."""
        followed: Future[Any] = Future()
        self._state.add(followed)

        def tell(done: concurrent.futures.Future[Any]) -> None:
            self._state.remove(followed)
            error = concurrent.futures.CancelledError() if done.cancelled() else done.exception()
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # patience has ended before
                if error is not None:
                    followed.set_exception(error)
                else:
                    followed.set_result(done.result())

        asked.add_done_callback(tell)
        return followed

    @property
    def gone(self) -> bool:
        """Whether patience has ended."""
        return self._state.gone

    def give_up(self, error: BaseException) -> None:
        """Fails everything under way."""
        self._state.fail(error)

    def close(self) -> None:
        self._state.end()


class _State:
    """What the watching thread knows. It does not know the watch: it would keep it alive."""

    def __init__(self, url: str, is_there: Callable[[], bool], patience_s: float, silent: Callable[[], BaseException]) -> None:
        self.url = url
        self.is_there = is_there
        self.patience_s = patience_s
        self.silent = silent
        self.gone = False
        self.ended = False
        self.changed = threading.Condition()
        self.pending: set[Future[Any]] = set()

    def add(self, followed: Future[Any]) -> None:
        with self.changed:
            self.pending.add(followed)
            self.changed.notify_all()

    def remove(self, followed: Future[Any]) -> None:
        with self.changed:
            self.pending.discard(followed)

    def fail(self, error: BaseException) -> None:
        with self.changed:
            pending, self.pending = self.pending, set()
        for followed in pending:
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # answered in this very moment
                followed.set_exception(error)

    def end(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify_all()


def _look(state: _State) -> None:
    last_seen, told = time.monotonic(), False
    while True:
        with state.changed:
            while not state.pending and not state.ended:
                state.changed.wait()
                last_seen = time.monotonic()
            if state.ended:
                return
            state.changed.wait(PROBE_S)
            if not state.pending:
                continue
        if state.is_there():
            if told:
                log.warning("%s answers again, after %.0f s", state.url, time.monotonic() - last_seen)
            last_seen, told = time.monotonic(), False
            continue
        if not told:
            patience = f"{state.patience_s:g} s (backend.patience_s)"
            log.warning("no answer from %s; asking again until it is there, for up to %s", state.url, patience)
            told = True
        if time.monotonic() - last_seen > state.patience_s:
            state.gone = True
            state.fail(state.silent())
