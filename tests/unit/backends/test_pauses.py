"""Calls that pause between passes: what a pause, a drop and the end of a worker leave behind."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from waiting import WAIT_S

from cookbook.backends.worker import SLICE_S, Account, Lane, Worker
from cookbook.errors import BackendError
from cookbook.futures import Future, between


@contextlib.contextmanager
def pausing_lanes(count: int) -> Iterator[list[Lane]]:
    """Lanes of different owners on one worker, which is closed at the end."""
    worker = Worker(1)
    yield [worker.lane(Account(), pauses=True) for _ in range(count)]
    worker.close()


class Call:
    """A call of infinitely many passes. Each pass is counted, and waits until another call has begun."""

    def __init__(self, others: threading.Barrier, *, holds_memory: bool = False) -> None:
        self.passes, self._others, self._holds_memory = 0, others, holds_memory

    def __call__(self) -> None:
        for _ in between(iter(int, 1), holds_memory=self._holds_memory):
            self.passes += 1
            if self.passes == 1:
                threading.Thread(target=self._others.wait, daemon=True).start()


def test_calls_under_way_are_dropped_at_their_pause_and_the_lanes_stay_open():
    with pausing_lanes(2) as lanes:
        begun = threading.Barrier(3)
        futures = [lane.submit(Call(begun)) for lane in lanes]
        begun.wait(WAIT_S)
        # One of them computes now, the other has paused.
        for lane in lanes:
            lane.clear()
        for future in futures:
            with pytest.raises(BackendError, match="the call was dropped"):
                future.result(WAIT_S)
        assert [lane.submit(lambda: "next").result(WAIT_S) for lane in lanes] == ["next", "next"]


def test_one_paused_call_holds_memory_also_after_another_was_dropped():
    with pausing_lanes(3) as (first, second, third):
        begun = threading.Barrier(2)
        holder = Call(begun, holds_memory=True)
        held = first.submit(holder)
        begun.wait(WAIT_S)

        def passes_of_the_first() -> set[int]:
            seen = set()
            for _ in between(range(20), holds_memory=True):
                time.sleep(2 * SLICE_S)
                seen.add(holder.passes)
            return seen

        last = Future()

        def drops_itself() -> None:
            third.submit(passes_of_the_first, last)
            for _ in between(range(1000), holds_memory=True):
                second.drop()

        with pytest.raises(BackendError, match="the call was dropped"):
            second.submit(drops_itself).result(WAIT_S)
        # The first call keeps its memory in its pause, so the third does not pause, and the first does not run in between.
        assert len(last.result(WAIT_S)) == 1
        first.drop()
        with pytest.raises(BackendError, match="the call was dropped"):
            held.result(WAIT_S)


def test_a_call_that_waits_for_its_own_worker_is_an_error_and_not_a_deadlock():
    with pausing_lanes(1) as (lane,):
        wait: Callable[[], object] = lambda: lane.submit(lambda: 1).result(WAIT_S)  # noqa: E731
        with pytest.raises(BackendError, match="the trainer waits for itself"):
            lane.submit(wait).result(WAIT_S)


def test_the_threads_of_calls_end_with_their_worker():
    before = set(threading.enumerate())
    with pausing_lanes(2) as lanes:
        for lane in lanes:
            lane.submit(lambda: None).result(WAIT_S)
        started = set(threading.enumerate()) - before
        assert {thread.name for thread in started} >= {"cookbook-trainer", "cookbook-call"}
    for thread in started:
        thread.join(WAIT_S)
        assert not thread.is_alive()
