"""Which failed call still has to be told."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from cookbook.futures import Future

T = TypeVar("T")


class Failures:
    """The first failure since a step has told one, and whether anybody has read it.

    Trainers that share the set ``unread`` add themselves to it while theirs is unread, so that one can end, and be freed,
    without its error being lost.
    """

    def __init__(self, unread: set[Failures] | None = None) -> None:
        self.first: BaseException | None = None
        self._unread = set() if unread is None else unread

    def note(self, error: BaseException) -> None:
        """A call has failed."""
        if self.first is None:
            self.first = error
            self._unread.add(self)

    def read(self, error: BaseException) -> None:
        """The caller knows of ``error``: the end of the run need not tell it again."""
        if error is self.first:
            self._unread.discard(self)

    def forget(self, error: BaseException) -> None:
        """A step has told of ``error``: training may go on."""
        self.read(error)
        if error is self.first:
            self.first = None

    def raise_unread(self) -> None:
        """Tells what nobody has read, once."""
        if self.first is not None and self in self._unread:
            self._unread.discard(self)
            raise self.first


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

    def _note(self, timeout: float | None) -> None:
        if (error := super().exception(timeout)) is not None:
            self._on_read(error)
