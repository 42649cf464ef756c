"""Failed calls of a trainer whose errors the caller has not read yet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from cookbook.futures import Future

T = TypeVar("T")


class Failures:
    """The errors of failed calls that the caller has not read, oldest first.

    An optimizer step reports the errors that were unread when the caller asked for that step. Whether a call fails before or
    after that moment makes no difference, so the result does not depend on how fast the trainer is.

    Trainers that share the set ``unread`` add themselves to it while they have an unread error. So a trainer can end, and be
    freed, without its error being lost.
    """

    def __init__(self, unread: set[Failures] | None = None) -> None:
        self._errors: list[BaseException] = []
        self._steps: list[PendingStep] = []
        self._shared = set() if unread is None else unread
        self._lock = threading.Lock()
        self._was_read = False  # an error has been read since the last step was asked for

    @property
    def errors(self) -> tuple[BaseException, ...]:
        """Those that are unread, oldest first."""
        with self._lock:
            return tuple(self._errors)

    def note(self, error: BaseException) -> None:
        """A call has failed with ``error``. Noting an error twice changes nothing."""
        with self._lock:
            if not any(error is one for one in self._errors):
                self._errors.append(error)
            self._shared.add(self)

    def read(self, error: BaseException) -> None:
        """The caller has read ``error``. Steps that were asked for before still report it, later ones do not."""
        with self._lock:
            if not any(error is one for one in self._errors):
                return
            self._was_read = True
            self._errors = [one for one in self._errors if one is not error]
            for step in self._steps:
                step.read_late.append(error)
            if not self._errors:
                self._shared.discard(self)

    def read_all(self) -> None:
        """The caller has read every error so far."""
        for error in self.errors:
            self.read(error)

    def step(self) -> PendingStep:
        """An optimizer step that the caller asks for now."""
        with self._lock:
            step = PendingStep(self, after_read=self._was_read)
            self._was_read = False
            self._steps.append(step)
        return step

    def due(self, step: PendingStep) -> tuple[BaseException, ...]:
        """The errors that ``step`` has to report. From now on the caller's reading does not concern the step."""
        with self._lock:
            self._steps = [one for one in self._steps if one is not step]
        return step.known

    def raise_unread(self) -> None:
        """Raises the first unread error, once."""
        with self._lock:
            errors, self._errors = self._errors, []
            self._shared.discard(self)
        if errors:
            raise errors[0]


class PendingStep:
    """An optimizer step from the moment the caller asks for it until its turn comes.

    ``after_read``: the caller has read an error since it asked for the step before. ``read_late``: errors that the caller has
    read since it asked for this step.
    """

    def __init__(self, failures: Failures, *, after_read: bool) -> None:
        self.after_read = after_read
        self.read_late: list[BaseException] = []
        self._failures = failures
        self._reported: tuple[BaseException, ...] = ()

    @property
    def known(self) -> tuple[BaseException, ...]:
        """The errors that the step has to report, as far as calls have failed by now."""
        return (*self._failures.errors, *self.read_late)

    def error(self, later: Sequence[BaseException] = ()) -> BaseException | None:
        """The first error to report. The step's turn has come: errors that are read from now on do not concern it.

        ``later``: errors of calls that were made after the step and have failed already.
        """
        due = self._failures.due(self)
        self._reported = tuple(one for one in due if not any(one is other for other in later))
        return self._reported[0] if self._reported else None

    def note(self, error: BaseException) -> None:
        """The step has failed with ``error``: one of its own, or one that it reports."""
        if not any(error is one for one in self._reported):
            self._failures.note(error)

    def read(self, error: BaseException) -> None:
        """The caller has read the step's error, and with it all that the step had to report."""
        for one in (*self._reported, error):
            self._failures.read(one)


class ServedFailures(Failures):
    """Failures of a run on a server. The server cannot see what its client has read, so only :meth:`read_all` ends one."""

    def read(self, error: BaseException) -> None:
        """The server itself looks at every error. That says nothing about the client."""

    def read_all(self) -> None:
        with self._lock:
            self._errors.clear()

    def raise_unread(self) -> None:
        """The client gets its errors with the results."""


class CallFuture(Future[T]):
    """Tells the trainer when its error has been read."""

    def __init__(self, on_read: Callable[[BaseException], None]) -> None:
        super().__init__()
        self._on_read = on_read

    def result(self, timeout: float | None = None) -> T:
        self._note(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._note(timeout)
        return super().exception(timeout)

    def wait(self) -> T:
        """The result for code that is not the caller's: an error counts as unread still."""
        return Future.result(self)

    def _note(self, timeout: float | None) -> None:
        if (error := super().exception(timeout)) is not None:
            self._on_read(error)
