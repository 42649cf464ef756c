"""A worker thread, on which queues of jobs take turns.

The jobs of one queue run in order. Long jobs pause between their steps, and the thread then continues with the queue whose
owner has used it least. The measure is seconds and not tokens, because a token costs more in a small batch than in a large one.
A pause changes no number: a job keeps its state.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypeVar

import torch

from cookbook.backends.pausable import CallThreads
from cookbook.engine.memory import keep_freed_memory
from cookbook.errors import BackendError, CookbookError
from cookbook.futures import Future

T = TypeVar("T")
R = TypeVar("R")

TRAINING_REMEDY = "lower backend.micro_batch_tokens, then backend.retain_gb, or set backend.activation_checkpointing=true"
SAMPLING_REMEDY = "lower deployment.max_batch_tokens, and backend.micro_batch_tokens if prompt logprobs are computed"


# Seconds by which an owner must be behind before it interrupts another one; otherwise two owners would switch at every step.
SLICE_S = 0.02
# Seconds of head start of an owner without queued jobs, so that its next job runs first.
HEAD_START_S = 0.2

Steps = Generator[None, None, None]
# The purpose of the jobs that this thread or task submits, for :attr:`JobSchedule.on_slice`.
PURPOSE: ContextVar[str] = ContextVar("PURPOSE", default="")


@contextlib.contextmanager
def purpose(text: str) -> Iterator[None]:
    """Context in which submitted jobs get the purpose ``text``."""
    token = PURPOSE.set(text)
    try:
        yield
    finally:
        PURPOSE.reset(token)


@dataclass(eq=False)
class Account:
    """The use of the thread by one owner, for example a client, in seconds. ``clock_s``: least use of its queues with jobs.

    ``parent`` is the account that several accounts share, such as that of an API key with several clients. Parents take turns
    first, and then the accounts of one parent.
    """

    used_s: float = 0.0
    clock_s: float = 0.0
    num_ready: int = 0
    parent: Account | None = None

    @property
    def top(self) -> Account:
        """The account that takes turns with those of other owners."""
        return self if self.parent is None else self.parent


class SharedWork(Protocol):
    """Work of a job that may be computed together with the work of other queues' first jobs, in less time than in turn.

    Works with an equal ``key`` that is not None may be computed together, if their ``size`` is at most ``max_size`` in total.
    """

    @property
    def key(self) -> Hashable | None: ...
    @property
    def size(self) -> int: ...
    @property
    def max_size(self) -> int: ...

    def compute_together(self, works: Sequence[Any]) -> None:
        """Compute all ``works``, of which this is the first. Errors are results of the works."""

    def result(self) -> Any:
        """Return the result of the computed work, or raise its error."""


@dataclass(eq=False)
class Job:
    """``begin`` returns a generator that pauses between steps. ``future`` gets an error if the job is dropped.

    ``work``: what the job computes, if it may be computed together with other jobs.
    """

    begin: Callable[[], Steps]
    future: Future[Any]
    work: SharedWork | None = None
    purpose: str = field(default_factory=PURPOSE.get)
    has_begun: bool = False
    steps: Steps = field(init=False)

    def __post_init__(self) -> None:
        self.steps = self.begin()

    def restart(self) -> None:
        """Drop what the job has computed. Its next step is the first one again."""
        self.steps.close()
        self.steps, self.has_begun = self.begin(), False


@dataclass(eq=False)
class JobQueue:
    """Jobs of one owner that run in order.

    Attributes:
        share: part of the seconds that counts as use. A queue with 0.5 gets twice the seconds of a queue with 1.
        is_closed: the jobs are dropped, the current one at its next pause.
        drops_begun: the job that has begun is dropped at its next pause. The queue stays open.
        is_paused: no job runs; see :meth:`Lane.pause`.
    """

    account: Account
    share: float = 1.0
    used_s: float = 0.0
    is_closed: bool = False
    drops_begun: bool = False
    is_paused: bool = False
    jobs: deque[Job] = field(default_factory=deque)

    def use(self, seconds: float) -> None:
        """Count seconds of the thread."""
        used_s = seconds * self.share
        self.used_s += used_s
        self.account.used_s += used_s
        if self.account.parent is not None:
            self.account.parent.used_s += used_s

    @property
    def is_dropping(self) -> bool:
        """Whether the first job, or what it has computed, is dropped at its next turn."""
        return self.is_closed or self.drops_begun or self.is_paused

    @property
    def rank(self) -> tuple[bool, float, float, float]:
        """Sort key: the queue with the lowest rank runs next. Jobs to drop come first, so that their memory is freed."""
        return not self.is_dropping, self.account.top.used_s, self.account.used_s, self.used_s


class JobSchedule:
    """The queues of one thread.

    Attributes:
        on_slice: called with the purposes of the jobs that have begun, the one that computes next first; before the thread
            waits, without purposes.
        is_suspect: whether a job with this purpose begins only if no other such job has begun.
    """

    def __init__(self) -> None:
        self.on_slice: Callable[..., None] = lambda *purposes: None
        self.is_suspect: Callable[[str], bool] = lambda purpose: False
        self._purposes: tuple[str, ...] = ()
        # Queues with jobs, except paused ones.
        self._ready: list[JobQueue] = []
        # Paused queues with jobs that have left the turns.
        self._paused: list[JobQueue] = []
        self._changed = threading.Condition()
        self._closed = False
        self._current: JobQueue | None = None
        # Least use of the accounts with jobs. Accounts that were idle start close to this value: idle time is not saved up.
        self._clock_s = 0.0

    @property
    def wants_pause(self) -> bool:
        """Whether the current job should pause: another queue has jobs, or the job's own queue is closed."""
        return len(self._ready) > 1 or self.drops_current

    @property
    def drops_current(self) -> bool:
        """Whether the current job is dropped at its next pause."""
        return self._current is not None and self._current.is_dropping

    def put(self, queue: JobQueue, job: Job) -> None:
        """Queue a job. Raises BackendError: the queue or the worker is closed."""
        with self._changed:
            if self._closed:
                raise BackendError("the trainer is closed; create a new one")
            if queue.is_closed:
                raise BackendError("the session of this call has ended; create a new client")
            if not queue.jobs:
                self._add(queue)
            queue.jobs.append(job)
            self._changed.notify()

    def close(self) -> None:
        """Let :meth:`run` return once all queued jobs have run, also those of paused queues."""
        with self._changed:
            self._closed = True
            for queue in (*self._ready, *self._paused):
                self._resume(queue)
            self._changed.notify()

    def drop(self, *queues: JobQueue) -> None:
        """Close ``queues`` and drop their jobs: the current one at its next pause, the others without a start.

        Without arguments, drop the jobs of all queues.
        """
        with self._changed:
            for queue in queues or (*self._ready, *self._paused):
                queue.is_closed = True
                self._resume(queue)

    def pause(self, queue: JobQueue) -> None:
        """Run no job of ``queue`` until :meth:`resume`; see :meth:`Lane.pause`."""
        with self._changed:
            # The thread takes the queue at its next turn, because only the thread may restart a job.
            queue.is_paused = not self._closed

    def resume(self, queue: JobQueue) -> None:
        """Run the jobs of ``queue`` again. A job that has not been restarted yet continues."""
        with self._changed:
            self._resume(queue)

    def _resume(self, queue: JobQueue) -> None:
        queue.is_paused = False
        if queue in self._paused:
            self._paused.remove(queue)
            self._add(queue)
            self._changed.notify()

    def clear(self, queue: JobQueue) -> None:
        """Drop the jobs of ``queue``, the one that has begun at its next pause. The queue stays open."""
        with self._changed:
            # Only the thread of the schedule may drop a job that has begun.
            is_aside = queue in self._paused
            count = 1 if queue.jobs and not is_aside and (queue is self._current or queue.jobs[0].has_begun) else 0
            queue.drops_begun = count == 1
            dropped = list(queue.jobs)[count:]
            if is_aside:
                self._paused.remove(queue)
            elif queue in self._ready and not count:
                self._remove(queue)
            for _ in dropped:
                queue.jobs.pop()
        for job in dropped:
            _fail(job)

    def run(self, at_end: Callable[[], None]) -> None:
        """Run the jobs, until the schedule is closed and no jobs are left. Call ``at_end`` on the same thread."""
        while (queue := self._next()) is not None:
            if queue.is_closed:
                self._drop(queue, len(queue.jobs))
            elif queue.drops_begun:
                self._drop(queue, 1)
            elif queue.is_paused:
                self._set_aside(queue)
            elif len(queues := self._sharing(queue)) > 1:
                self._run_together(queues)
                del queues
            else:
                self._run_slice(queue)
                del queues
            # Drop the reference now: the queue holds the data of its jobs, and the next job may arrive much later.
            del queue
        at_end()

    def _next(self) -> JobQueue | None:
        with self._changed:
            self._current = None
            if not self._ready:
                self._announce(())
            while not self._ready:
                if self._closed:
                    return None
                self._changed.wait()
            self._current = queue = min(self._candidates(), key=lambda candidate: candidate.rank)
            return queue

    def _candidates(self) -> list[JobQueue]:
        """Return the queues that may run next: while a suspect job has begun, none whose first job is another suspect."""
        suspects = [queue for queue in self._ready if self.is_suspect(queue.jobs[0].purpose)]
        if not any(queue.jobs[0].has_begun for queue in suspects):
            return self._ready
        return [queue for queue in self._ready if queue not in suspects or queue.jobs[0].has_begun or queue.is_dropping]

    def _run_slice(self, queue: JobQueue) -> None:
        """Run the first job of the queue to its end, or until another queue is further behind."""
        queue.jobs[0].has_begun = True
        with self._changed:
            jobs = [candidate.jobs[0] for candidate in self._ready if candidate is not queue]
            purposes = [job.purpose for job in jobs if job.has_begun]
            # A job that is dropped while this one runs must not stay in memory.
            del jobs
        self._announce((queue.jobs[0].purpose, *purposes))
        steps, is_running = queue.jobs[0].steps, True
        while is_running and not queue.is_dropping:
            started = time.perf_counter()
            is_running = next(steps, True) is None
            queue.use(time.perf_counter() - started)
            if self._is_ahead(queue):
                break
        if not is_running:
            with self._changed:
                queue.jobs.popleft()
                queue.drops_begun = False
                if not queue.jobs:
                    self._remove(queue)

    def _sharing(self, queue: JobQueue) -> list[JobQueue]:
        """Return ``queue`` and the queues whose first jobs are computed together with its first job, in the order of turns.

        The first job of ``queue`` would run now in any case. It takes the others along; they do not delay it by more than
        the largest shared work.
        """
        with self._changed:
            first = queue.jobs[0]
            if first.work is None or first.has_begun or self.is_suspect(first.purpose) or (key := first.work.key) is None:
                return [queue]
            queues, size = [queue], first.work.size
            for other in sorted(self._ready, key=lambda candidate: candidate.rank):
                job = other.jobs[0]
                if other is queue or other.is_dropping or job.has_begun or job.work is None or self.is_suspect(job.purpose):
                    continue
                if job.work.key == key and size + job.work.size <= first.work.max_size:
                    queues.append(other)
                    size += job.work.size
            if len(queues) > 1:
                for sharing in queues:
                    sharing.jobs[0].has_begun = True
            return queues

    def _run_together(self, queues: Sequence[JobQueue]) -> None:
        """Compute the first jobs of ``queues`` together, and divide the seconds among the queues by the size of their works."""
        jobs = [queue.jobs[0] for queue in queues]
        works = [job.work for job in jobs if job.work is not None]
        with self._changed:
            paused = [
                candidate.jobs[0].purpose
                for candidate in self._ready
                if candidate not in queues and candidate.jobs[0].has_begun
            ]
        self._announce((*(job.purpose for job in jobs), *paused))
        started = time.perf_counter()
        try:
            works[0].compute_together(works)
            errors: list[BaseException] = []
        except BaseException as error:  # noqa: BLE001 - raised again when the callers read the futures
            errors = [error]
        elapsed_s, size = time.perf_counter() - started, sum(work.size for work in works)
        for queue, job, work in zip(queues, jobs, works, strict=True):
            queue.use(elapsed_s * work.size / size)
            try:
                job.future.set_result(_raise(errors[0]) if errors else work.result())
            except BaseException as error:  # noqa: BLE001 - raised again when the caller reads the future
                job.future.fail(with_remedy(error))
        with self._changed:
            for queue in queues:
                queue.jobs.popleft()
                queue.drops_begun = False
                if not queue.jobs:
                    self._remove(queue)

    def _announce(self, purposes: tuple[str, ...]) -> None:
        if purposes != self._purposes:
            self._purposes = purposes
            self.on_slice(*purposes)

    def _is_ahead(self, queue: JobQueue) -> bool:
        """Whether the use of ``queue`` exceeds that of another queue with jobs by more than ``SLICE_S``."""
        if len(self._ready) == 1:
            return False
        with self._changed:
            for other in self._ready:
                if other.account.top is not queue.account.top:
                    ahead = queue.account.top.used_s - other.account.top.used_s
                elif other.account is not queue.account:
                    ahead = queue.account.used_s - other.account.used_s
                else:
                    ahead = queue.used_s - other.used_s
                if ahead > SLICE_S or other.is_dropping:
                    return True
        return False

    def _drop(self, queue: JobQueue, count: int) -> None:
        """Drop the first ``count`` jobs of the queue."""
        with self._changed:
            jobs = [queue.jobs.popleft() for _ in range(count)]
            queue.drops_begun = False
            if not queue.jobs:
                self._remove(queue)
        for job in jobs:
            _fail(job)

    def _set_aside(self, queue: JobQueue) -> None:
        """Restart the job of a paused queue that has begun, and take the queue out of the turns."""
        if queue.jobs[0].has_begun:
            queue.jobs[0].restart()
        with self._changed:
            # Jobs may have been dropped meanwhile: the one that has begun is dropped at the next turn.
            if queue.is_paused and not queue.drops_begun:
                self._remove(queue)
                self._paused.append(queue)

    def _add(self, queue: JobQueue) -> None:
        account = queue.account
        self._update_clocks(account)
        if account.top.num_ready == 0:
            account.top.used_s = max(account.top.used_s, self._clock_s - HEAD_START_S)
        if account.parent is not None:
            if not account.num_ready:
                account.used_s = max(account.used_s, account.parent.clock_s - HEAD_START_S)
            account.parent.num_ready += 1
        queue.used_s = max(queue.used_s, account.clock_s - HEAD_START_S)
        account.num_ready += 1
        self._ready.append(queue)

    def _remove(self, queue: JobQueue) -> None:
        self._update_clocks(queue.account)
        queue.account.num_ready -= 1
        if queue.account.parent is not None:
            queue.account.parent.num_ready -= 1
        self._ready.remove(queue)

    def _update_clocks(self, account: Account) -> None:
        """Set the clocks to the least use of those that have jobs."""
        self._clock_s = max(self._clock_s, min((queue.account.top.used_s for queue in self._ready), default=0.0))
        if (parent := account.parent) is not None:
            used = [queue.account.used_s for queue in self._ready if queue.account.parent is parent]
            parent.clock_s = max(parent.clock_s, min(used, default=0.0))
        own = [queue.used_s for queue in self._ready if queue.account is account]
        account.clock_s = max(account.clock_s, min(own, default=0.0))


def _raise(error: BaseException) -> NoReturn:
    raise error


def _fail(job: Job) -> None:
    job.steps.close()
    if not job.future.done():
        job.future.set_exception(BackendError("the call was dropped: its session has ended, or the server stops"))


class Lane:
    """A queue of jobs on the thread of a worker. Its jobs run in order; lanes of a worker take turns.

    ``calls``: threads on which the jobs run, so that a job can pause in the middle of a call; None: jobs run on the worker.
    """

    def __init__(
        self, schedule: JobSchedule, thread: threading.Thread, queue: JobQueue, calls: CallThreads | None = None
    ) -> None:
        self.thread = thread
        self._schedule = schedule
        self._queue = queue
        self._calls = calls

    def submit(self, job: Callable[[], T], future: Future[T] | None = None, work: SharedWork | None = None) -> Future[T]:
        """Queue ``job``, and return the future (``future`` if given) that receives the job's result or exception.

        Args:
            work: what ``job`` computes, if it may be computed together with jobs of other lanes.

        Raises:
            BackendError: the worker or the lane is closed.
        """

        if (calls := self._calls) is not None:
            return self._put(_run_steps, lambda: calls.steps(job), future, work)
        return self._put(_run_call, job, future, work)

    def steps(self, job: Callable[[], T]) -> Generator[None, None, T]:
        """Run ``job`` as a part of a job of this lane. Yields at its pauses, if the calls of the lane pause."""
        return job() if self._calls is None else (yield from self._calls.steps(job))

    def submit_steps(self, job: Callable[[], Generator[None, None, T]], future: Future[T] | None = None) -> Future[T]:
        """Queue a job that is a generator, which pauses at every ``yield``. Jobs of other lanes may run during a pause.

        Raises:
            BackendError: the worker or the lane is closed.
        """
        return self._put(_run_steps, job, future)

    def _put(
        self,
        run: Callable[[Callable[[], R], Future[T]], Steps],
        job: Callable[[], R],
        future: Future[T] | None,
        work: SharedWork | None = None,
    ) -> Future[T]:
        submitted: Future[T] = Future() if future is None else future
        submitted.answered_by = self.thread
        self._schedule.put(self._queue, Job(lambda: run(job, submitted), submitted, work))
        return submitted

    def close(self) -> None:
        """Wait for the queued jobs. A paused lane resumes."""
        self.resume()
        # Jobs run in order, so when this one has run, all earlier ones have.
        self.submit(lambda: None).result()

    def drop(self) -> None:
        """Close the lane and drop its jobs, the current one at its next pause. Their futures get a BackendError."""
        self._schedule.drop(self._queue)

    def pause(self) -> None:
        """Run no job until :meth:`resume`. The current job stops at its next pause, and starts again afterwards.

        What it has computed until then is dropped, so its second start must have the result of the first.
        """
        self._schedule.pause(self._queue)

    def resume(self) -> None:
        """Run the jobs again."""
        self._schedule.resume(self._queue)

    def clear(self) -> None:
        """Drop the jobs, the current one at its next pause. Their futures get a BackendError. The lane stays open."""
        self._schedule.clear(self._queue)


class Worker(Lane):
    """Runs jobs on its own thread. Torch uses ``threads`` threads for each job. The worker is the first of its lanes.

    The thread ends when :meth:`close` is called, or once the worker is garbage-collected and its queued jobs have run.
    """

    def __init__(self, threads: int) -> None:
        # Before the thread starts, because a thread chooses its malloc arena when it starts.
        keep_freed_memory()
        schedule = JobSchedule()
        # The thread refers only to the schedule. A reference to the worker would keep it from being garbage-collected.
        self._call_threads = calls = CallThreads(threads, schedule)
        thread = threading.Thread(target=schedule.run, args=(calls.close,), name="cookbook-trainer", daemon=True)
        super().__init__(schedule, thread, JobQueue(Account()))
        thread.start()
        weakref.finalize(self, schedule.close).atexit = False
        # Run this on the thread itself: torch's thread count is a setting of each thread.
        self.submit(lambda: torch.set_num_threads(threads))

    def on_slice(self, callback: Callable[..., None], is_suspect: Callable[[str], bool]) -> None:
        """Call ``callback`` on the thread with the purposes of the jobs that have begun, the one that computes next first.

        A job whose purpose ``is_suspect`` begins only if no other such job has begun.
        """
        self._schedule.on_slice, self._schedule.is_suspect = callback, is_suspect

    def lane(self, account: Account, share: float = 1.0, *, pauses: bool = False) -> Lane:
        """Return a new lane. Lanes of one ``account`` share its part of the thread; see :class:`JobQueue` for ``share``.

        ``pauses``: its calls pause between two passes through the model while jobs of other lanes wait.
        """
        return Lane(self._schedule, self.thread, JobQueue(account, share), self._call_threads if pauses else None)

    def close(self) -> None:
        """Wait for the queued jobs, and end the thread.

        Raises:
            BackendError: a job closes its own trainer.
        """
        if threading.current_thread() is self.thread:
            raise BackendError(
                "close: called by a loss or a done-callback, which run on the trainer's thread; close it on another thread"
            )
        self._schedule.close()
        self.thread.join()

    def drop_all(self) -> None:
        """Drop the jobs of all lanes, the current one at its next pause."""
        self._schedule.drop()


def _run_call(job: Callable[[], T], future: Future[T]) -> Steps:
    """Run a job that does not pause. The statement after it makes this function a generator, as a job that pauses."""
    yield from ()
    try:
        result = job()
    except BaseException as error:  # noqa: BLE001 - raised again when the caller reads the future
        future.fail(with_remedy(error))
    else:
        future.set_result(result)


def _run_steps(job: Callable[[], Generator[None, None, T]], future: Future[T]) -> Steps:
    try:
        result = yield from job()
    except GeneratorExit:
        # The job is dropped; the schedule sets the error of the future.
        raise
    except BaseException as error:  # noqa: BLE001 - raised again when the caller reads the future
        future.fail(with_remedy(error))
    else:
        future.set_result(result)


def with_remedy(error: BaseException, remedy: str = TRAINING_REMEDY) -> BaseException:
    """Return ``error`` unchanged, or if it reports a lack of memory, a BackendError with a remedy."""
    # On the CPU torch raises a RuntimeError, which only a part of its message identifies.
    out_of_memory = isinstance(error, torch.OutOfMemoryError) or "t allocate memory" in str(error)
    if isinstance(error, CookbookError) or not out_of_memory:
        return error
    return BackendError(f"out of memory: {str(error).splitlines()[0]}; {remedy}")
