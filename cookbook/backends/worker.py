"""One thread that does jobs in the order they were given, and answers through futures."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch

from cookbook.engine.heap import keep_freed_memory
from cookbook.errors import BackendError, CookbookError
from cookbook.futures import Future

T = TypeVar("T")
Jobs: TypeAlias = "queue.SimpleQueue[Callable[[], None] | None]"

TRAINING_REMEDY = "lower backend.micro_batch_tokens, then backend.retain_gb, or set backend.activation_checkpointing=true"
SAMPLING_REMEDY = "lower deployment.max_batch_tokens, and backend.micro_batch_tokens where prompts are scored"


class Worker:
    """Runs jobs one after another, off the caller's thread. torch's thread count is per thread, so it is set here.

    The thread ends with :meth:`close`, or after its last job once nobody holds the worker any more.
    """

    def __init__(self, threads: int) -> None:
        self._jobs: Jobs = queue.SimpleQueue()
        self._lock = threading.Lock()  # no job may follow the one that ends the thread
        self._closed = False
        keep_freed_memory()  # first: a thread chooses its heap when it begins
        # The thread knows the queue only: knowing the worker, it would keep it, and itself, alive.
        self.thread = threading.Thread(target=_run, args=(self._jobs,), name="cookbook-trainer", daemon=True)
        self.thread.start()
        weakref.finalize(self, self._jobs.put, None).atexit = False
        self.submit(lambda: torch.set_num_threads(threads))

    def submit(self, job: Callable[[], T], future: Future[T] | None = None) -> Future[T]:
        """Queues ``job``; its result or exception arrives in ``future``."""
        answer: Future[T] = Future() if future is None else future
        answer.answered_by = self.thread
        with self._lock:
            if self._closed:
                raise BackendError("the trainer is closed; make a new one")
            self._jobs.put(lambda: _answer(job, answer))
        return answer

    def close(self) -> None:
        """Waits for the jobs under way.

        Raises:
            BackendError: one of them closes its own trainer.
        """
        if threading.current_thread() is self.thread:
            raise BackendError(
                "close: called by a loss or a done-callback, which run inside the trainer; close it from outside"
            )
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self.thread.join()


def _run(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # and with it the data of the call, while the next one is waited for


def _answer(job: Callable[[], Any], future: Future[Any]) -> None:
    try:
        result = job()
    except BaseException as error:  # noqa: BLE001 - it is raised again where the future is read
        future.set_exception(explained(error))
    else:
        future.set_result(result)


def explained(error: BaseException, remedy: str = TRAINING_REMEDY) -> BaseException:
    """``error``, or when memory ran out, one that says what to do about it."""
    is_shortage = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
    if isinstance(error, CookbookError) or not is_shortage:
        return error
    return BackendError(f"out of memory: {str(error).splitlines()[0]}; {remedy}")
