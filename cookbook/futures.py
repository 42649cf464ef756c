"""Futures: results of calls that may still run. Plain code waits with ``.result()``, async code with ``await``.

:func:`call_on` and :class:`Awaiter` connect plain code with event loops. :class:`Failures` records the errors of calls that the
caller has not read yet. :func:`between` marks the places of a long call at which other calls may run.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
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

    def fail(self, error: BaseException) -> None:
        """Set the error with which the call has ended."""
        self.set_exception(error)

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
    """A future whose work starts at the first call that needs it: ``result``, ``exception``, ``done``, a new callback.

    ``await`` first lets the other ready coroutines run, so that their requests start together with this one.
    ``concurrent.futures.wait`` and ``as_completed`` call none of the methods: call :func:`start_all` before them.
    """

    def __init__(self, start: Callable[[], None]) -> None:
        super().__init__()
        self._start: Callable[[], None] | None = start

    def start(self) -> None:
        """Start the work unless it is under way."""
        if (start := self._start) is not None:
            start()

    def started(self) -> None:
        """Note that the work is under way."""
        self._start = None

    def result(self, timeout: float | None = None) -> T:
        self.start()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.start()
        return super().exception(timeout)

    def done(self) -> bool:
        self.start()
        return super().done()

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[T]], object]) -> None:
        self.start()
        super().add_done_callback(fn)

    def __await__(self) -> Generator[Any, None, T]:
        # As asyncio.sleep(0) does.
        yield
        return (yield from super().__await__())


def start_all(futures: Iterable[concurrent.futures.Future[Any]]) -> None:
    """Start the work of lazy futures, for ``concurrent.futures.wait`` and ``as_completed``."""
    for future in futures:
        if isinstance(future, LazyFuture):
            future.start()


def done(value: T) -> Future[T]:
    """Return a future that already holds its value."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


# ---- event loops -----------------------------------------------------------------------------------------------------


def call_on(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *arguments: object) -> None:
    """Call ``callback`` on the event loop, from any thread. Do nothing if the loop is closed, because no task is left."""
    try:
        loop.call_soon_threadsafe(callback, *arguments)
    except RuntimeError:
        # The loop may be closed between a check and the call.
        if not loop.is_closed():
            raise


class Awaiter:
    """Waits in plain code for results of the user's functions that may be ``async``.

    All results share one event loop until :meth:`close`, because the connections of a client belong to its loop. If the calling
    thread runs a loop already, as in a notebook, a result is awaited on a thread of its own.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def result(self, value: Any) -> Any:
        """Return the result of an awaitable, and any other value unchanged."""
        if not inspect.isawaitable(value):
            return value

        async def awaited() -> Any:
            return await value

        with self._lock:
            loop = self._loop = self._loop or asyncio.new_event_loop()
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                return loop.run_until_complete(awaited())
            with concurrent.futures.ThreadPoolExecutor(1) as thread:
                return thread.submit(loop.run_until_complete, awaited()).result()

    def close(self) -> None:
        """Close the loop, if a result was awaited."""
        if self._loop is not None:
            self._loop.close()


# ---- unread errors ---------------------------------------------------------------------------------------------------


class Failures:
    """The errors of failed calls that the caller has not read yet, oldest first.

    An optimizer step reports the errors that were unread when the caller requested the step. This depends on the order of the
    caller's actions only, not on how early a call failed, so the outcome does not depend on the speed of the trainer.

    Args:
        unread: set that several trainers may share. It contains this object while an error is unread, so that the error
            survives the trainer.
    """

    def __init__(self, unread: set[Failures] | None = None) -> None:
        # By identity: two errors of a user's class may compare equal.
        self._errors: dict[int, BaseException] = {}
        self._steps: list[PendingStep] = []
        self._unread_trainers = set() if unread is None else unread
        self._lock = threading.Lock()
        # Whether the caller has read an error since it last requested a step.
        self._read_since_step = False

    @property
    def errors(self) -> tuple[BaseException, ...]:
        """The unread errors, oldest first."""
        with self._lock:
            return tuple(self._errors.values())

    def record(self, error: BaseException) -> None:
        """Record that a call has failed with ``error``. Recording the same error twice has no effect."""
        with self._lock:
            self._errors.setdefault(id(error), error)
            self._unread_trainers.add(self)

    def mark_read(self, error: BaseException) -> None:
        """Mark ``error`` as read. Steps that were requested before this still report the error, later ones do not."""
        with self._lock:
            if self._errors.pop(id(error), None) is None:
                return
            self._read_since_step = True
            for step in self._steps:
                step.read_late.append(error)
            if not self._errors:
                self._unread_trainers.discard(self)

    def mark_all_read(self) -> None:
        """Mark all errors so far as read."""
        for error in self.errors:
            self.mark_read(error)

    def forget(self, errors: Sequence[BaseException]) -> None:
        """Remove errors, so that no step reports them, not even one that was requested before."""
        with self._lock:
            for error in errors:
                self._errors.pop(id(error), None)
            if not self._errors:
                self._unread_trainers.discard(self)

    def step(self) -> PendingStep:
        """Return a new optimizer step that the caller requests now."""
        with self._lock:
            step = PendingStep(self, after_read=self._read_since_step)
            self._read_since_step = False
            self._steps.append(step)
        return step

    def close_step(self, step: PendingStep) -> None:
        """Stop tracking ``step``, whose turn it is. Errors that are read from now on do not affect the step."""
        with self._lock:
            self._steps = [pending for pending in self._steps if pending is not step]

    def raise_unread(self) -> None:
        """Raise the first unread error if there is one, and mark all errors as read."""
        with self._lock:
            errors, self._errors = list(self._errors.values()), {}
            self._unread_trainers.discard(self)
        if errors:
            raise errors[0]


class PendingStep:
    """An optimizer step that was requested and has not run yet.

    Attributes:
        after_read: the caller has read an error since it requested the previous step.
        read_late: errors that the caller has read since it requested this step. The step still reports them.
    """

    def __init__(self, failures: Failures, *, after_read: bool) -> None:
        self.after_read = after_read
        self.read_late: list[BaseException] = []
        self._failures = failures
        self._reported: tuple[BaseException, ...] = ()

    @property
    def known(self) -> tuple[BaseException, ...]:
        """The errors that the step must report, as far as calls have failed yet."""
        return (*self._failures.errors, *self.read_late)

    def error(self, later: Sequence[BaseException] = ()) -> BaseException | None:
        """Return the first error that the step must report, or None. Call this when it is the step's turn.

        Errors that are read from now on do not affect the step.

        Args:
            later: errors of calls that were made after the step and have already failed; the step does not report them.
        """
        self._failures.close_step(self)
        self._reported = tuple(error for error in self.known if not any(error is other for other in later))
        return self._reported[0] if self._reported else None

    def record(self, error: BaseException) -> None:
        """Record that the step has failed with ``error``. An error that the step only reports is recorded already."""
        if not any(error is reported for reported in self._reported):
            self._failures.record(error)

    def mark_read(self, error: BaseException) -> None:
        """Mark the step's error as read, and with it every error that the step had to report."""
        for reported in (*self._reported, error):
            self._failures.mark_read(reported)


class ServedFailures(Failures):
    """Failures of a run on a server. Errors become read only by :meth:`mark_all_read`, when the client reports it."""

    def mark_read(self, error: BaseException) -> None:
        """Do nothing: the server reads every error to encode it, whether or not the client has seen it."""

    def mark_all_read(self) -> None:
        with self._lock:
            self._errors.clear()

    def raise_unread(self) -> None:
        """Do nothing: the client receives its errors as results of requests."""


class CallFuture(Future[T]):
    """Future of a call whose error counts as unread by the caller until it is read.

    ``failures`` records the error with which the call fails. An error by ``set_exception``, of a call that was dropped, is not
    recorded.
    """

    def __init__(self, failures: Failures | PendingStep) -> None:
        super().__init__()
        self._failures = failures

    def fail(self, error: BaseException) -> None:
        self._failures.record(error)
        self.set_exception(error)

    def result(self, timeout: float | None = None) -> T:
        self._mark_read(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._mark_read(timeout)
        return super().exception(timeout)

    def wait(self) -> T:
        """Return the result to internal code, so that an error still counts as unread by the caller."""
        return Future.result(self)

    def _mark_read(self, timeout: float | None) -> None:
        if (error := super().exception(timeout)) is not None:
            self._failures.mark_read(error)


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
