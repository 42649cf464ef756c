"""``server.share_passes``: gradients of several adapters from one pass, the turns of each, and replays with the same bits."""

from __future__ import annotations

from dataclasses import dataclass, field

import httpx
import numpy as np
import pytest
import servertools
from fairness import held
from sessions import Client, equal, passing, stepping, weights
from waiting import WAIT_S

from cookbook.backends.worker import Account, Worker, purpose

# ---- turns -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Work:
    """Takes a second, however many are computed together. ``order`` lists the names of works by pass."""

    name: str
    order: list[list[str]]
    clock: object
    key: str | None = "same"
    size: int = 10
    max_size: int = 30
    fails: bool = False
    during: list[object] = field(default_factory=list)

    def compute(self):
        self.compute_together([self])
        return self.result()

    def compute_together(self, works):
        self.order.append([work.name for work in works])
        self.clock.now += 1.0
        for work in works:
            for action in work.during:
                action()

    def result(self):
        if self.fails:
            raise ValueError(self.name)
        return self.name


@pytest.fixture
def put(clock):
    """``put(lane, name, **fields)`` queues a work; ``put.order`` lists the names of the works of each pass."""

    def queue(lane, name, **fields):
        work = Work(name, queue.order, clock, **fields)
        return lane.submit(work.compute, work=work)

    queue.order = []
    return queue


def used(lane):
    return lane._queue.used_s, lane._queue.account.used_s


def test_waiting_works_of_one_key_are_computed_together(put):
    worker = Worker(1)
    lanes = [worker.lane(Account(), 0.5) for _ in range(6)]
    go = held(worker)
    before = [used(lane) for lane in lanes]
    jobs = [
        put(lanes[0], "a"),
        put(lanes[0], "second of a"),
        put(lanes[1], "b", fails=True),
        put(lanes[2], "other key", key="other"),
        put(lanes[3], "alone", key=None),
        put(lanes[4], "c", size=5),
        put(lanes[5], "too large", size=20),
    ]
    go.set()
    results = [job.exception(WAIT_S) or job.result() for job in jobs]
    assert [str(one) for one in results] == ["a", "second of a", "b", "other key", "alone", "c", "too large"]
    assert isinstance(results[2], ValueError)
    assert put.order[0] == ["a", "b", "c"]
    # The second work of a lane waits for the first, and then shares a pass as well.
    assert sorted(map(sorted, put.order[1:])) == [["alone"], ["other key"], ["second of a", "too large"]]
    # Of the seconds of a pass each lane uses its part of the size, times its share.
    spent = [tuple(np.subtract(used(lane), one)) for lane, one in zip(lanes, before, strict=True)]
    assert spent[1] == pytest.approx((0.5 * 10 / 25, 0.5 * 10 / 25))
    assert spent[4] == pytest.approx((0.5 * 5 / 25, 0.5 * 5 / 25))
    assert spent[2] == pytest.approx((0.5, 0.5))
    worker.close()


def test_a_long_queue_gets_no_more_seconds_with_shared_works(put, clock):
    """One owner always has works waiting, and so has another with works that cannot be shared: both get equal seconds."""
    worker = Worker(1)
    mine, other = worker.lane(Account()), worker.lane(Account())
    go = held(worker)
    jobs = [put(mine, "mine") for _ in range(20)] + [put(other, "other", key=None) for _ in range(20)]
    go.set()
    for job in jobs:
        job.result(WAIT_S)
    names = [name for names in put.order[:20] for name in names]
    assert abs(names.count("mine") - names.count("other")) <= 2
    worker.close()


def test_suspects_are_computed_alone(put):
    """A request is at fault for the end of a process only if it alone was computed each time."""
    worker, seen = Worker(1), []
    worker.on_slice(lambda *purposes: seen.append(purposes), lambda text: text.startswith("suspect"))
    lanes = [worker.lane(Account()) for _ in range(4)]
    go = held(worker)
    jobs = []
    for lane, name in zip(lanes, ("suspect 1", "a", "suspect 2", "b"), strict=True):
        with purpose(name):
            jobs.append(put(lane, name))
    go.set()
    for job in jobs:
        job.result(WAIT_S)
    worker.close()
    assert sorted(map(sorted, put.order)) == [["a", "b"], ["suspect 1"], ["suspect 2"]]
    assert {("suspect 1",), ("suspect 2",), ("a", "b")} <= set(seen)


def test_a_lane_that_is_dropped_during_its_pass(put):
    """The pass ends, the other lanes get their results, and the later jobs of the dropped lane fail."""
    worker = Worker(1)
    lanes = [worker.lane(Account()) for _ in range(3)]
    go = held(worker)
    jobs = [put(lanes[0], "a", during=[lanes[1].drop, lanes[2].clear]), put(lanes[1], "b"), put(lanes[2], "c")]
    late = put(lanes[1], "late")
    go.set()
    assert [job.result(WAIT_S) for job in jobs] == ["a", "b", "c"]
    assert "was dropped" in str(late.exception(WAIT_S))
    assert put(lanes[2], "again").result(WAIT_S) == "again"
    worker.close()


# ---- runs ------------------------------------------------------------------------------------------------------------

RANKS = (4, 2, 8)


@pytest.fixture
def start(tiny_folder, tmp_path):
    """``start(**options)``: a server on the same folder each time."""
    return lambda **options: servertools.running(tiny_folder, tmp_path / "out", names=["tiny"], **options)


def played(server, clients, runs, steps, *, first=1):
    """The results of ``steps`` optimizer steps of all runs, whose passes wait at the same time."""
    results = []
    for step in range(steps):
        number = first + 2 * step
        go = held(server.service.host.worker)
        sent = [
            client.post("forward_backward", passing(run, number, seed, count=1 + seed))["request_id"]
            for seed, (client, run) in enumerate(zip(clients, runs, strict=True))
        ]
        go.set()
        results += [client.fetch(one).content for client, one in zip(clients, sent, strict=True)]
        results += [client.result("optim_step", stepping(run, number + 1)) for client, run in zip(clients, runs, strict=True)]
    return results


def num_passes(server, runs):
    return sum(server.service.runs[run].trainer.engine.passes.count for run in runs)


def sessions(server):
    clients = [Client(server) for _ in RANKS]
    return clients, [client.run(rank) for client, rank in zip(clients, RANKS, strict=True)]


@pytest.mark.slow
def test_a_replay_of_one_run_has_the_bits_of_the_shared_passes(start, tmp_path, tiny_folder):
    """Each run replays its own requests alone, whether or not passes are shared now, and then continues.

    Idle adapters are in files meanwhile.
    """
    with servertools.running(tiny_folder, tmp_path / "alone", names=["tiny"]) as server:
        clients, runs = sessions(server)
        played(server, clients, runs, 2)
        alone = [weights(server, run) for run in runs]
        assert num_passes(server, runs) == 6
    with start(share_passes=True, adapters_gb=0) as server:
        clients, runs = sessions(server)
        played(server, clients, runs, 2)
        assert num_passes(server, runs) == 2
        assert server.service.host.idle.num_stored == 3
        assert "cookbook_stored_adapters 3\n" in httpx.get(f"{server.url}/metrics", timeout=WAIT_S).text
        expected = [weights(server, run) for run in runs]
        logged = [server.service.requests._requests[f"{run}/1"].metadata["shape"]["place"] for run in runs]
        assert sorted(logged) == [0, 1, 2]
    for own, other in zip(alone, expected, strict=True):
        assert own.keys() == other.keys()
        assert all(np.allclose(own[name], other[name], rtol=0, atol=1e-5) for name in own)
    for again in (True, False):
        with start(share_passes=again, adapters_gb=0) as server:
            clients = [Client(server, client.session) for client in clients]
            for client, run, own in zip(clients, runs, expected, strict=True):
                # A request waits for the replay.
                assert b"logprobs" in client.result("forward_backward", passing(run, 5 if again else 6, 9, forward_only=True))
                assert server.service.runs[run].trainer.engine.passes.count > 2
                assert equal(weights(server, run), own)


@pytest.mark.slow
def test_by_default_no_bit_depends_on_who_waits(tiny_folder, tmp_path):
    with servertools.running(tiny_folder, tmp_path / "default", names=["tiny"]) as server:
        clients, runs = sessions(server)
        together = played(server, clients, runs, 1)
        expected = [weights(server, run) for run in runs]
        clients, runs = sessions(server)
        for seed, (client, run) in enumerate(zip(clients, runs, strict=True)):
            assert client.result("forward_backward", passing(run, 1, seed, count=1 + seed)) == together[seed]
            client.result("optim_step", stepping(run, 2))
            assert equal(weights(server, run), expected[seed])
