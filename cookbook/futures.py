"""Results on their way. A :class:`Future` can be waited for from plain code (``.result()``) and from async code (``await``)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from cookbook.errors import BackendError

T = TypeVar("T")


class Future(concurrent.futures.Future[T], Generic[T]):
    """A ``concurrent.futures.Future`` that can also be awaited, with Tinker's extra spellings.

    ``answered_by`` is the thread that will set the result, when it is known. Waiting there is an error: it would be for ever.
    """

    answered_by: threading.Thread | None = None

    def result(self, timeout: float | None = None) -> T:
        """Raises BackendError on the thread that is to compute it."""
        self._check_thread()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Raises BackendError on the thread that is to compute it."""
        self._check_thread()
        return super().exception(timeout)

    def failure(self) -> BaseException | None:
        """What it has failed with by now. Never waits, and leaves the error unread: who asks for the result gets it still."""
        return concurrent.futures.Future.exception(self) if self.done() else None

    def cancel(self) -> bool:
        """Never: calls are made in order, each of them. A timeout ends the waiting, not the call."""
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
        if self.answered_by is threading.current_thread() and not self.done():
            raise BackendError(
                "the trainer waits for itself: a loss or a done-callback, which run on its thread, asked for another call's "
                "result; ask before or after"
            )


class LazyFuture(Future[T]):
    """A future whose work starts when somebody first looks at it: waits, asks whether it is done, or adds a callback.

    Await it, and the other coroutines that are ready get their turn first, so that what they ask for starts with it.
    """

    def __init__(self, start: Callable[[], None]) -> None:
        self._start: Callable[[], None] | None = None  # nobody looks while it is made
        super().__init__()
        self._start = start

    def started(self) -> None:
        """Whoever does the work tells that it is under way."""
        self._start = None

    # Every way of looking at a future takes its condition first: its own methods, `concurrent.futures.wait`, `as_completed`
    # and asyncio. `wait` and `as_completed` use nothing else that could be overridden.
    @property
    def _condition(self) -> threading.Condition:
        if (start := self._start) is not None:
            start()
        return self._lock

    @_condition.setter
    def _condition(self, condition: threading.Condition) -> None:
        self._lock = condition

    def __await__(self) -> Generator[Any, None, T]:
        yield  # what asyncio.sleep(0) does
        return (yield from super().__await__())


def done(value: T) -> Future[T]:
    """A future that already holds its value."""
    future: Future[T] = Future()
    future.set_result(value)
    return future
