"""How many requests to have under way: as many as the server bears, found out by trying."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class AdaptiveLimit:
    """Additive increase, multiplicative decrease.

    A limit's worth of requests without trouble raises it by one. Trouble halves it, once for all requests that were under
    way at that moment: they have met the same congestion.

    Source: Chiu and Jain, Analysis of the Increase and Decrease Algorithms for Congestion Avoidance (1989).
    """

    def __init__(self, start: int, highest: int) -> None:
        self._limit = float(min(start, highest))
        self._highest = highest
        self._under_way = 0
        self._started = 0  # requests so far
        self._deaf_until = 0  # those that started before this one may not halve it again
        self._changed = threading.Condition()

    @property
    def limit(self) -> int:
        return int(self._limit)

    @contextlib.contextmanager
    def slot(self) -> Iterator[Callable[[], None]]:
        """Waits until one more may be under way. What is given is to be called at every sign of congestion."""
        with self._changed:
            self._changed.wait_for(lambda: self._under_way < self.limit)
            self._under_way += 1
            number, self._started = self._started, self._started + 1
        troubled = False

        def trouble() -> None:
            nonlocal troubled, number
            troubled = True
            with self._changed:
                if number >= self._deaf_until:
                    self._limit = max(1.0, self._limit / 2)
                    self._deaf_until = self._started
                number = self._started  # its next attempt starts now

        try:
            yield trouble
        finally:
            with self._changed:
                self._under_way -= 1
                if not troubled:
                    self._limit = min(self._highest, self._limit + 1 / self._limit)
                self._changed.notify_all()
