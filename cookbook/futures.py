"""Futures: results of calls that may still run. Plain code waits with ``.result()``, async code with ``await``.

:func:`between` marks the places of a long call at which other calls may run.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Generic, TypeVar

from cookbook.errors import BackendError

T = TypeVar("T")


class Future(concurrent.futures.Future[T], Generic[T]):
    """A ``concurrent.futures.Future`` that can also be awaited, with Tinker's extra spellings.

    ``answered_by`` is the thread that will set the result, if known. A wait on that thread would never end, so it is an error.
    """

    answered_by: threading.Thread | None = None

    def result(self, timeout: float | None = None) -> T:
        """Raises BackendError on the thread that computes the result."""
        self._check_thread()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Raises BackendError on the thread that computes the result."""
        self._check_thread()
        return super().exception(timeout)

    def failure(self) -> BaseException | None:
        """Return the error if the call has failed by now. Never waits, and the error still counts as unread."""
        return concurrent.futures.Future.exception(self) if self.done() else None

    def cancel(self) -> bool:
        """Return False: every call runs, in its order. A timeout ends the wait, not the call."""
        return False

    def __await__(self) -> Generator[Any, None, T]:
        self._check_thread()
        return (yield from asyncio.wrap_future(self).__await__())

    async def coroutine(self) -> T:
        return await self

    async def result_async(self, timeout: float | None = None) -> T:
        return await asyncio.wait_for(self.coroutine(), timeout)

    def future(self) -> Future[T]:
        return self

    def _check_thread(self) -> None:
        acting = _OF_THREAD.acts_for or threading.current_thread()
        if self.answered_by is acting and not self.done():
            raise BackendError(
                "the trainer waits for itself: a loss or a done-callback, which run on its thread, asked for another call's "
                "result; ask before or after"
            )


class LazyFuture(Future[T]):
    """A future whose work starts at its first use: a wait, a check whether it is done, or a new callback.

    ``await`` first lets the other ready coroutines run, so that their requests start together with this one.
    """

    def __init__(self, start: Callable[[], None]) -> None:
        # The constructor of the base class uses the condition, which must not start the work.
        self._start: Callable[[], None] | None = None
        super().__init__()
        self._start = start

    def started(self) -> None:
        """Note that the work is under way."""
        self._start = None

    # Every use of a future takes its condition first: its own methods, `concurrent.futures.wait`, `as_completed` and asyncio.
    # `wait` and `as_completed` use nothing else that could be overridden.
    @property
    def _condition(self) -> threading.Condition:
        if (start := self._start) is not None:
            start()
        return self._lock

    @_condition.setter
    def _condition(self, condition: threading.Condition) -> None:
        self._lock = condition

    def __await__(self) -> Generator[Any, None, T]:
        # As asyncio.sleep(0) does.
        yield
        return (yield from super().__await__())


def done(value: T) -> Future[T]:
    """Return a future that already holds its value."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


# ---- pauses ----------------------------------------------------------------------------------------------------------


class _CallsOfThread(threading.local):
    pause: Callable[[bool], None] | None = None
    # The thread that waits for this one while it computes.
    acts_for: threading.Thread | None = None


_OF_THREAD = _CallsOfThread()


def on_pause(pause: Callable[[bool], None], acts_for: threading.Thread) -> None:
    """Call ``pause`` at every pause on this thread. Its argument: the call keeps large tensors during the pause.

    Args:
        acts_for: the thread that waits while this thread computes. Neither may wait for a result that the other will set.
    """
    _OF_THREAD.pause, _OF_THREAD.acts_for = pause, acts_for


def between(items: Iterable[T], *, holds_memory: bool = False) -> Iterator[T]:
    """Yield ``items``, with a pause between two of them if :func:`on_pause` was called on this thread."""
    for number, item in enumerate(items):
        if number and _OF_THREAD.pause is not None:
            _OF_THREAD.pause(holds_memory)
        yield item
