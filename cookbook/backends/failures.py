"""Which failed call still has to be told."""

from __future__ import annotations


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
