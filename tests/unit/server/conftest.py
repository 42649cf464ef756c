"""A server and its client for the tests of a module, and a clock of the worker that a test moves."""

from __future__ import annotations

import pytest
import servertools

from cookbook.backends import worker as backend_worker


@pytest.fixture(scope="module")
def server(tiny_folder, tmp_path_factory):
    """A server of the tiny model. Modules with other options have a fixture of their own."""
    with servertools.running(tiny_folder, tmp_path_factory.mktemp("server"), names=["tiny"]) as found:
        yield found


@pytest.fixture(scope="module")
def service(server):
    """The unmodified client of the server."""
    tinker = pytest.importorskip("tinker")
    with tinker.ServiceClient(base_url=server.url, api_key=servertools.KEY) as client:
        yield client


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
