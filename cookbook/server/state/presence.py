"""Clients that vanish while they wait for samples: the sampling of their sessions pauses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cookbook.backends.worker import Lane
from cookbook.server.metrics import log_event
from cookbook.server.state.countdown import Countdown

# Seconds after a closed connection in which a client sends its next request if it still runs.
GRACE_S = 0.5
# Factor of these seconds for a client that has returned, such as one whose connections a proxy closes after a while.
RETURNED = 4
MAX_GRACE_S = 30.0


class Presence:
    """Pauses the sampling lane of a session while its client has vanished.

    A client that waits for samples has an open poll. If a poll ends because its connection closes, no other poll is open, and
    the client sends nothing for ``grace_s`` seconds, it has vanished. The lane then drops what was drawn. The next request of
    the client resumes the lane, which draws the same tokens from the start.

    A client that returns after a pause has lost the work of its lane, so it gets more time from then on. Without this rule a
    client whose connections are closed repeatedly would never get its samples.

    Args:
        session_id: id of the session, for the event log.
        has_work: whether the session waits for samples.
    """

    def __init__(self, session_id: str, lane: Lane, has_work: Callable[[], bool]) -> None:
        self.grace_s = GRACE_S
        self.is_paused = False
        self._session_id = session_id
        self._lane = lane
        self._has_work = has_work
        self._num_polls = 0
        self._countdown: Countdown | None = None

    def heard(self) -> None:
        """Note that the client has sent a request."""
        if self._countdown is not None:
            # The request may have waited in the kernel since before the connection was closed, so it does not show that the
            # client still runs. A client that waits for samples has an open poll when the new countdown ends.
            self._countdown.cancel()
            self._countdown = Countdown(self.grace_s, self._end_grace)
        if self.is_paused:
            self.is_paused = False
            self.grace_s = min(self.grace_s * RETURNED, MAX_GRACE_S)
            log_event("sampling resumed", session=self._session_id)
            self._lane.resume()

    @contextmanager
    def poll(self) -> Iterator[None]:
        """Context of an open poll."""
        self._num_polls += 1
        try:
            yield
        finally:
            self._num_polls -= 1

    def lost(self) -> None:
        """Note that the connection of a poll was closed by the client."""
        if self._countdown is None and not self.is_paused:
            self._countdown = Countdown(self.grace_s, self._end_grace)

    def end(self) -> None:
        """Stop the countdown, because the session ends."""
        if self._countdown is not None:
            self._countdown.cancel()
            self._countdown = None
        # The function refers to the session, which refers to this object. With such a cycle the session would stay in memory
        # until the garbage collector runs.
        self._has_work = lambda: False

    def _end_grace(self) -> None:
        self._countdown = None
        if not self._num_polls and self._has_work():
            self.is_paused = True
            log_event("sampling paused", session=self._session_id)
            self._lane.pause()
