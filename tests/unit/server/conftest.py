"""A clock of the worker that a test moves."""

import pytest

from cookbook.backends import worker as backend_worker


@pytest.fixture
def clock(monkeypatch):
    """A clock that the jobs move."""

    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

    monkeypatch.setattr(backend_worker, "time", clock := Clock())
    return clock


@pytest.fixture
def turns(clock):
    """``turns(lane, name, steps, seconds)`` queues a job of several steps, and the names of all steps in their order."""
    order = []

    def queue(lane, name, steps, seconds):
        def job():
            for _ in range(steps):
                order.append(name)
                clock.now += seconds
                yield

        return lane.submit_steps(job)

    return queue, order
