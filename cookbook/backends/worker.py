"""One thread that does jobs in the order they were given, and answers through futures."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from cookbook.errors import BackendError
from cookbook.futures import Future

T = TypeVar("T")


class Worker:
    """Runs jobs one after another, off the caller's thread. torch's thread count is per thread, so it is set here."""

    def __init__(self, threads: int) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="cookbook-trainer", daemon=True)
        self._thread.start()
        self.submit(lambda: torch.set_num_threads(threads))

    def submit(self, job: Callable[[], T], future: Future[T] | None = None) -> Future[T]:
        """Queues ``job``; its result or exception arrives in ``future``."""
        if self._closed:
            raise BackendError("the trainer is closed; make a new one")
        answer: Future[T] = Future() if future is None else future
        self._jobs.put(lambda: _answer(job, answer))
        return answer

    def close(self) -> None:
        """Waits for the jobs under way."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # and with it the data of the call, while the next one is waited for


def _answer(job: Callable[[], Any], future: Future[Any]) -> None:
    try:
        result = job()
    except BaseException as error:  # noqa: BLE001 - it is raised again where the future is read
        future.set_exception(explained(error))
    else:
        future.set_result(result)


def explained(error: BaseException) -> BaseException:
    """``error``, or when memory ran out, one that says what to do about it."""
    if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
        return error
    return BackendError(
        f"out of memory: {str(error).splitlines()[0]}; lower backend.micro_batch_tokens, then backend.retain_gb, or set "
        "backend.activation_checkpointing=true"
    )
