"""Requests of one model, in the order of their numbers, however they arrive."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar


class Startable(Protocol):
    def start(self) -> None: ...


Work = TypeVar("Work", bound=Startable)


class Order(Generic[Work]):
    """Starts request ``n`` once ``n - 1`` has been started. A client sends the first part of a batch last, on purpose."""

    def __init__(self, following: int = 1) -> None:
        self.following = following
        self._held: dict[int, Work] = {}

    def put(self, number: int, work: Work) -> None:
        """Starts ``work`` when its turn has come, now or in a later call."""
        self._held[number] = work
        while self.following in self._held:
            due = self._held.pop(self.following)
            self.following += 1
            due.start()

    @property
    def waiting(self) -> int:
        """How many are held back because one before them has not arrived."""
        return len(self._held)

    def give_up(self) -> list[Work]:
        """Takes away those that wait for one that never came. Their callers must be told."""
        held = [self._held[number] for number in sorted(self._held)]
        self._held.clear()
        return held
