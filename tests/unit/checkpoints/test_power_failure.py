"""A power failure at any moment: files are whole, and acknowledged data are on the disk.

The disk of ``power.Disk`` keeps only data that were forced to it, so every missing fsync fails one of these tests.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import threading

import numpy as np
import power
import pytest
import tiny
from waiting import WAIT_S, until

from cookbook.checkpoints import manifest, sampler_checkpoints, sharded, store
from cookbook.server.journal.log import Log, Record, read
from cookbook.utils import files

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the disk of these tests looks into /proc")


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """``failing(root, check)``: a Disk on ``root``.

    Before and after every fsync, ``check`` gets what a power failure would leave then.
    """
    disks, moments = [], itertools.count()

    def make(root, check=None, delay_s=0.0):
        def at_sync():
            # Names reach the disk when they are forced to it, or all before, or those of one folder before.
            folders = [root.resolve(), *(path for path in root.resolve().rglob("*") if path.is_dir())]
            for early in (set(), set(folders), *({folder} for folder in folders)):
                check(disks[-1].survivors(tmp_path / f"moment-{next(moments)}", early.__contains__))

        root.mkdir(exist_ok=True)
        disks.append(power.Disk(root, monkeypatch, at_sync if check else None, delay_s))
        return disks[-1]

    yield make
    for disk in disks:
        disk.close()


def test_text_is_the_old_or_the_new_one(failing, tmp_path):
    root = tmp_path / "run"
    root.mkdir()
    (root / "status.json").write_text("old")
    seen = []
    disk = failing(root, lambda left: seen.append((left / "status.json").read_text()))
    files.write_text(root / "status.json", "new")
    assert set(seen) <= {"old", "new"} and seen[0] == "old"
    assert (disk.survivors(tmp_path / "left") / "status.json").read_text() == "new"


@pytest.mark.parametrize("overwrite", [False, True])
def test_checkpoints_survive(failing, make_engine, tmp_path, overwrite):
    """The earlier one until the next is stored, and the next from the moment on that it was acknowledged."""
    engine = make_engine(lora_rank=2)
    root = tmp_path / "run"

    def whole(left):
        assert store.newest(left / "checkpoints") is not None

    store.save(engine, root / "checkpoints" / "step-000001", state=True)
    disk = failing(root, whole)
    second = "step-000001" if overwrite else "step-000002"
    engine.step = 7
    store.save(engine, root / "checkpoints" / second, state=True, overwrite=overwrite)
    left = store.newest(disk.survivors(tmp_path / "left") / "checkpoints")
    assert left is not None and left.name == second
    assert manifest.read(left)["step"] == 7


def test_the_first_checkpoint_of_a_new_folder_survives(failing, make_engine, tmp_path):
    disk = failing(tmp_path / "run")
    store.save(make_engine(), tmp_path / "run" / "a" / "checkpoints" / "step-000001", state=True)
    manifest.verify(disk.survivors(tmp_path / "left") / "a" / "checkpoints" / "step-000001")


def test_sampler_weights_survive(failing, make_engine, tmp_path):
    engine = make_engine()
    disk = failing(tmp_path / "run")
    sampler = sampler_checkpoints.SamplerCheckpoints()
    sampler.save(engine, tmp_path / "run" / "a", "base")
    with_delta = sampler.save(engine, tmp_path / "run" / "b", "delta")
    left = disk.survivors(tmp_path / "left")
    assert sampler_checkpoints.reconstruct(left / "b").digest == manifest.read(tmp_path / "run" / "b")["weights"]
    assert with_delta.path.endswith("b")


def test_every_rank_stores_its_own_shards(failing, tmp_path):
    """The manifest is written by one rank, which cannot force files of another machine to that machine's disk."""
    import torch

    disk = failing(tmp_path / "run")
    sharded.save({"a": torch.arange(4.0)}, tmp_path / "run", max_bytes=1 << 20)
    stored = [content for content in disk.contents.values() if b"DCP_SHARDING_INFO" in content]
    assert len(stored) == 1 and len(stored[0]) == next((tmp_path / "run").glob("shard-*")).stat().st_size


# ---- the server's log ------------------------------------------------------------------------------------------------


def records(folder):
    return [record.header["number"] for file in sorted(folder.glob("log-*")) for record in read(file).records]


def numbered(number):
    return Record({"what": "request", "number": number})


def test_a_record_outlives_its_acknowledgement(failing, tmp_path):
    disk = failing(tmp_path / "out")
    log = Log(tmp_path / "out" / "sessions" / "s" / "run-0", numbered(0), fsync=True)

    async def acknowledged():
        log.append(numbered(1))
        await log.synced()
        assert records(disk.survivors(tmp_path / "one") / "sessions" / "s" / "run-0") == [0, 1]
        log.append(numbered(2))
        log.rotate()
        assert records(disk.survivors(tmp_path / "two") / "sessions" / "s" / "run-0") == [0, 1, 2]
        log.append(numbered(3))
        await log.synced()
        assert records(disk.survivors(tmp_path / "three") / "sessions" / "s" / "run-0") == [0, 1, 2, 0, 3]

    asyncio.run(acknowledged())


def test_a_record_appended_during_a_sync_waits_for_its_own(monkeypatch, tmp_path):
    """A sync covers what was appended before it began; what came meanwhile may not be acknowledged with it."""
    log = Log(tmp_path / "log", numbered(0), fsync=True)
    began, go_on, real = threading.Event(), threading.Event(), os.fsync
    count = []

    def slow(descriptor):
        count.append(descriptor)
        began.set()
        assert go_on.wait(WAIT_S)
        real(descriptor)

    async def acknowledged():
        log.append(numbered(1))
        monkeypatch.setattr(os, "fsync", slow)
        first = asyncio.ensure_future(log.synced())
        while not began.is_set():
            await asyncio.sleep(0.001)
        log.append(numbered(2))
        second = asyncio.ensure_future(log.synced())
        await asyncio.sleep(0)
        began.clear()
        go_on.set()
        await first
        assert not second.done()
        await second
        assert len(count) == 2

    asyncio.run(acknowledged())


# ---- the server ------------------------------------------------------------------------------------------------------


def test_what_the_server_acknowledged_outlives_a_power_failure(failing, tiny_folder, tmp_path):
    """A copy of the disk is taken at each acknowledgement. A server on the copy has everything acknowledged until then."""
    pytest.importorskip("tinker")
    servertools = pytest.importorskip("servertools")
    from sessions import Client, passing, stepping

    # Slow syncs: a request that is acknowledged before its sync is then not on the copy.
    left, disk = {}, failing(tmp_path / "out", delay_s=0.2)
    with servertools.running(tiny_folder, tmp_path / "out", names=["tiny"]) as server:
        client = Client(server)
        left["session"] = disk.survivors(tmp_path / "session")
        run = client.run()
        saved = client.result("save_weights_for_sampler", {"model_id": run, "seq_id": 1, "path": "a"})
        client.post("create_sampling_session", _sampler(client, run))
        left["sampler"] = disk.survivors(tmp_path / "sampler")
        drawn = client.sample(f"{client.session}:sample:0", 0)
        first = client.post("forward_backward", passing(run, 2))["request_id"]
        left["pass"] = disk.survivors(tmp_path / "pass")
        expected = client.fetch(first).content
        stepped = client.result("optim_step", stepping(run, 3))
        # After a restart no other client may get the number of one that has joined, and batches must be those of before.
        for path, log, kind in (("join_sampling_session", "log", "joined"), ("cookbook/batch", "samples", "batch")):
            body = {"sampling_session_id": f"{client.session}:sample:0", "count": 1}
            assert client.send(path, body).status_code in (200, 204)
            logs = (disk.survivors(tmp_path / kind) / "sessions" / client.session / log).glob("log-*")
            assert kind in [record.kind for file in logs for record in read(file).records]
    manifest.verify(left["sampler"] / run.replace(":", ".") / "sampler_weights.a")
    with servertools.running(tiny_folder, left["session"], names=["tiny"]) as server:
        assert Client(server, client.session).send("session_heartbeat", {"session_id": client.session}).status_code == 200
    assert b"tinker://" in saved
    with servertools.running(tiny_folder, left["sampler"], names=["tiny"]) as server:
        again = Client(server, client.session)
        assert again.sample(f"{client.session}:sample:0", 0) == drawn
    with servertools.running(tiny_folder, left["pass"], names=["tiny"]) as server:
        again = Client(server, client.session)
        assert again.fetch(first).content == expected
        assert again.result("optim_step", stepping(run, 3)) == stepped


def _sampler(client, run):
    path = f"tinker://{run}/sampler_weights/a"
    return {"session_id": client.session, "sampling_session_seq_id": 0, "model_path": path}


@pytest.mark.slow
def test_the_state_a_run_is_replayed_from_is_stored_before_older_ones_are_deleted(failing, monkeypatch, tiny_folder, tmp_path):
    pytest.importorskip("tinker")
    servertools = pytest.importorskip("servertools")
    from sessions import Client, passing, stepping

    from cookbook.server.state.snapshots import StateSnapshots

    left, real = [], StateSnapshots._delete_others

    def deleting(self):
        real(self)
        left.append(disk.survivors(tmp_path / f"left-{len(left)}"))

    monkeypatch.setattr(StateSnapshots, "_delete_others", deleting)
    with servertools.running(tiny_folder, tmp_path / "out", names=["tiny"], checkpoint_s=1e-9) as server:
        disk = failing(tmp_path / "out")
        client = Client(server)
        run = client.run()
        for number in (1, 3, 5):
            client.result("forward_backward", passing(run, number, number))
            client.result("optim_step", stepping(run, number + 1))
        last = client.result("forward_backward", passing(run, 7))
        until(lambda: len(left) >= 2)
    with servertools.running(tiny_folder, left[1], names=["tiny"]) as server:
        again = Client(server, client.session)
        assert run in server.service.runs
        for number in (1, 3, 5):
            again.result("forward_backward", passing(run, number, number))
            again.result("optim_step", stepping(run, number + 1))
        assert again.result("forward_backward", passing(run, 7)) == last


def test_linked_weights_survive(failing, tmp_path):
    """A sampler's weights are links to a checkpoint that may be deleted."""
    from cookbook.server.journal.durability import Durability

    saved = tmp_path / "out" / "checkpoint"
    (saved / "trainer").mkdir(parents=True)
    (saved / "trainer" / "x").write_bytes(np.arange(tiny.VOCABULARY).tobytes())
    contents = (saved / "trainer" / "x").read_bytes()

    def whole_or_absent(left):
        for linked in left.glob("sessions/s/weights-0"):
            assert (linked / "trainer" / "x").read_bytes() == contents

    disk = failing(tmp_path / "out", whole_or_absent)
    durability = Durability(tmp_path / "out", "synced")
    place = durability.link(saved, durability.sampler_weights("s:sample:0"))
    left = disk.survivors(tmp_path / "left") / place.relative_to(tmp_path / "out")
    assert (left / "trainer" / "x").read_bytes() == contents
