"""Calls that pause in their middle: each runs on a thread of its own, and only while the worker's thread waits for it.

A thread of its own keeps what torch stores per thread, such as the gradient mode, apart from the calls that run in the pauses.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator
from typing import Any, Protocol, TypeVar, cast

import torch

from cookbook.futures import on_pause

T = TypeVar("T")
# Of one worker. Each call thread has torch's threads of its own.
MAX_THREADS = 32


class CallDropped(BaseException):
    """Raised in a call at its pause, because its session has ended."""


class PauseSchedule(Protocol):
    """The jobs of a worker, which say whether the current call should pause, and whether it is then dropped."""

    @property
    def wants_pause(self) -> bool: ...

    @property
    def drops_current(self) -> bool: ...


class CallThread:
    """A thread that runs one call after the other, for :class:`CallThreads`."""

    def __init__(self, pool: CallThreads) -> None:
        self._pool = pool
        self._worker = threading.current_thread()
        # Commands for the thread: a call to begin, True to continue after a pause, False to drop the call, None to end.
        self._commands: queue.SimpleQueue[Callable[[], Any] | bool | None] = queue.SimpleQueue()
        # Whether the call has paused. Else it has ended.
        self._reports: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._result: Any = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="cookbook-call", daemon=True).start()

    def steps(self, job: Callable[[], T]) -> Generator[None, None, T]:
        """Run ``job``. Yields at every pause, and returns its result."""
        has_paused = self._send(job)
        # Drop the reference of this thread, because the call may hold large tensors.
        del job
        while has_paused:
            try:
                yield
            except GeneratorExit:
                # The call may pause again while it ends.
                while self._send(False):
                    pass
                self._error = self._result = None
                raise
            has_paused = self._send(True)
        error, result = self._error, self._result
        self._error = self._result = None
        if error is not None:
            raise error
        return cast("T", result)

    def close(self) -> None:
        """End the thread. It must have no call."""
        self._commands.put(None)

    def _send(self, command: Callable[[], Any] | bool) -> bool:
        """Send a command, and return whether the call has paused again."""
        self._commands.put(command)
        return self._reports.get()

    def _pause(self, holds_memory: bool) -> None:
        if not self._pool.may_pause(holds_memory):
            return
        # A call that pauses to be dropped does so beside a call that already holds memory.
        is_holder = holds_memory and not self._pool.is_held
        self._pool.is_held |= is_holder
        self._reports.put(True)
        continues = self._commands.get()
        if is_holder:
            self._pool.is_held = False
        if not continues:
            raise CallDropped

    def _run(self) -> None:
        # Torch's thread count is a setting of each thread.
        torch.set_num_threads(self._pool.threads)
        on_pause(self._pause, self._worker)
        while (job := self._commands.get()) is not None:
            assert callable(job)
            try:
                self._result = job()
            except BaseException as error:  # noqa: BLE001 - raised again on the worker's thread
                self._error = error
            del job
            self._reports.put(False)


class CallThreads:
    """Threads for the calls of one worker. The worker's thread waits while one of them computes.

    Attributes:
        threads: torch's threads for each call.
        schedule: the jobs of the worker.
        is_held: a call that holds large tensors has paused. Other such calls then run without a pause, which limits the memory
            to that of two calls.
    """

    def __init__(self, threads: int, schedule: PauseSchedule) -> None:
        self.threads = threads
        self.schedule = schedule
        self.is_held = False
        self._idle: list[CallThread] = []
        self._num_threads = 0

    def close(self) -> None:
        """End the threads. No call may be under way."""
        for thread in self._idle:
            thread.close()

    def may_pause(self, holds_memory: bool) -> bool:
        return self.schedule.wants_pause and (self.schedule.drops_current or not (holds_memory and self.is_held))

    def steps(self, job: Callable[[], T]) -> Generator[None, None, T]:
        """Run ``job``. Yields at every pause, and returns its result. Without an idle thread, it runs here and never pauses."""
        if not self._idle:
            if self._num_threads == MAX_THREADS:
                return job()
            self._num_threads += 1
            self._idle.append(CallThread(self))
        thread = self._idle.pop()
        try:
            return (yield from thread.steps(job))
        finally:
            self._idle.append(thread)
