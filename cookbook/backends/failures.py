"""The record of errors of failed calls that the caller has not read yet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from cookbook.futures import Future

T = TypeVar("T")


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
            self._steps = [one for one in self._steps if one is not step]

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
        self._reported = tuple(one for one in self.known if not any(one is other for other in later))
        return self._reported[0] if self._reported else None

    def record(self, error: BaseException) -> None:
        """Record that the step has failed with ``error``. An error that the step only reports is recorded already."""
        if not any(error is one for one in self._reported):
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
    """Future that calls ``on_read`` when the caller reads its error."""

    def __init__(self, on_read: Callable[[BaseException], None]) -> None:
        super().__init__()
        self._on_read = on_read

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
            self._on_read(error)
