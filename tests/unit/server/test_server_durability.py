"""State that outlives the server: requests, results, weights, samplers; in servers that are killed and started again."""

from __future__ import annotations

import asyncio
import errno
import json
import resource
import shutil
import socket
import struct
import zlib
from pathlib import Path

import children
import httpx
import numpy as np
import pytest
import servertools
import tiny
from sessions import RATE, Client, asked, equal, passing, stepping, weights
from waiting import WAIT_S, until

from cookbook.backends.local import LocalConfig
from cookbook.cli.app import run as cookbook
from cookbook.errors import CheckpointError
from cookbook.server.handlers.recovery import _check_requests
from cookbook.server.journal.log import MAGIC, Content, Log, Record, encode, read
from cookbook.server.state import snapshots
from cookbook.server.wire.bodies import Refused
from cookbook.utils import files

tinker = pytest.importorskip("tinker")
proto = pytest.importorskip("tinker.proto.request_conv")


@pytest.fixture
def start(tiny_folder, tmp_path):
    """``start(**options)``: a server on the same folder each time."""
    return lambda **options: servertools.running(tiny_folder, tmp_path / "out", names=["tiny"], **options)


# ---- the file --------------------------------------------------------------------------------------------------------


def test_a_record_that_a_crash_has_cut_off_is_told_from_a_damaged_one(tmp_path):
    whole = [Record({"what": "x", "number": number}, b"body" * 90 * number) for number in range(1, 4)]
    parts = [MAGIC, *map(encode, whole)]
    ends = np.cumsum([len(part) for part in parts])
    data, file = b"".join(parts), tmp_path / "log"
    for size in range(len(data) + 1):
        num_whole = max(int((ends <= size).sum()) - 1, 0)
        # Zeros in place of what was not written begin where the last sync ended, or with a sector.
        for unwritten in (0, 40, 3000) if size in ends or size % 512 == 0 else (0,):
            file.write_bytes(data[:size] + bytes(unwritten))
            content = read(file)
            assert content.records == whole[:num_whole] and not content.damage, size
            if not unwritten:
                assert content.torn_bytes == size - (ends[num_whole] if size >= len(MAGIC) else 0)
    for place in [*range(len(MAGIC)), *(int(end) + offset for end in ends[:-1] for offset in (*range(60), 300))]:
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        file.write_bytes(flipped)
        content, damaged = read(file), int((ends <= place).sum()) - 1
        assert content.records == whole[: max(damaged, 0)] + whole[damaged + 1 :] and not content.torn_bytes, place
        (damage,) = content.damage
        assert damage.start <= place < damage.end
        # The header of a record with a damaged body, or checksum of the body, tells which record is lost.
        in_record, header_end = place - int(ends[damaged]), 20 + len(json.dumps(whole[damaged].header))
        is_body = damaged >= 0 and (16 <= in_record < 20 or in_record >= header_end)
        assert damage.header == (whole[damaged].header if is_body else None)


def test_files_of_the_former_format_are_read(tmp_path):
    def former(record):
        header = json.dumps(record.header).encode()
        lengths = struct.pack("<II", len(header), len(record.body))
        return lengths + struct.pack("<I", zlib.crc32(lengths + header + record.body)) + header + record.body

    whole = [Record({"what": "x", "number": number}, b"body") for number in range(3)]
    data = b"cookbook log 1\n" + b"".join(map(former, whole))
    (tmp_path / "log").write_bytes(data)
    assert read(tmp_path / "log") == Content(whole)
    (tmp_path / "log").write_bytes(data[:-1])
    assert read(tmp_path / "log") == Content(whole[:2], torn_bytes=len(former(whole[2])) - 1)
    (tmp_path / "log").write_bytes(data[:30] + b"?" + data[31:])
    assert read(tmp_path / "log").records == [] and len(read(tmp_path / "log").damage) == 1


def test_a_missing_end_or_file_of_a_log_is_noticed(tmp_path):
    log = Log(tmp_path, Record({"what": "x"}), fsync=False)
    for number in range(3):
        log.append(Record({"what": "y", "number": number}))
        log.rotate()
    assert len(list(Log(tmp_path, Record({}), fsync=False).earlier_records())) == 6
    second = tmp_path / "log-000002"
    second.write_bytes(second.read_bytes()[:-5])
    damaged = Log(tmp_path, Record({}), fsync=False)
    assert len(list(damaged.earlier_records())) == 5
    assert [(one.file, one.end - one.start) for one in damaged.damage] == [(second, 5)]
    second.unlink()
    missing = Log(tmp_path, Record({}), fsync=False)
    assert len(list(missing.earlier_records())) == 4 and [one.file for one in missing.damage] == [second]


class FailingDisk:
    """Fails the next fsyncs of files, and loses what they should have written, as a disk with an error does."""

    def __init__(self, monkeypatch):
        self.failures = 0
        self.synced = []
        self._real = files.sync_descriptor
        monkeypatch.setattr(files, "sync_descriptor", self._sync)

    def _sync(self, descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if self.failures and path.is_file():
            self.failures -= 1
            raise OSError(errno.EIO, "Input/output error")
        self._real(descriptor)
        self.synced.append(path)


def test_a_failed_sync_is_remembered(tmp_path, monkeypatch):
    """The next sync of the same file would report success, although the kernel may have dropped the data."""
    disk = FailingDisk(monkeypatch)
    log = Log(tmp_path, Record({"what": "x"}), fsync=True)
    first, second = tmp_path / "log-000001", tmp_path / "log-000002"

    async def fill():
        log.append(Record({"what": "y", "number": 0}))
        disk.failures = 2
        for _ in range(2):  # the second one fails to replace the file
            with pytest.raises(Refused, match="Input/output error"):
                await log.synced()
        inode = first.stat().st_ino
        log.append(Record({"what": "y", "number": 1}))
        await log.synced()
        assert first.stat().st_ino != inode and disk.synced[-2:] == [tmp_path, second]
        assert any(path.name.startswith(".log-000001") for path in disk.synced)
        disk.failures = 1
        with pytest.raises(OSError, match="Input/output error"):
            log.rotate()
        log.append(Record({"what": "y", "number": 2}))
        inode = second.stat().st_ino
        log.rotate()
        assert second.stat().st_ino != inode

    asyncio.run(fill())
    numbers = [one.header.get("number") for one in Log(tmp_path, Record({}), fsync=False).earlier_records()]
    assert numbers == [None, 0, None, 1, None, 2] and not list(tmp_path.glob(".*"))


def test_nothing_is_acknowledged_if_the_disk_has_lost_a_record(tmp_path, monkeypatch):
    disk = FailingDisk(monkeypatch)
    log = Log(tmp_path, Record({"what": "x"}), fsync=True)

    async def fill():
        log.append(Record({"what": "y"}, b"body"))
        disk.failures = 1
        with pytest.raises(Refused):
            await log.synced()
        file = tmp_path / "log-000001"
        file.write_bytes(file.read_bytes()[:-4] + bytes(4))
        for _ in range(2):
            with pytest.raises(Refused, match="the disk has lost records of the log; restart the server"):
                await log.synced()

    asyncio.run(fill())


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rank", [4, 0])
def test_a_run_resumes_in_the_middle_of_a_step(start, tmp_path, tiny_folder, rank):
    """Two passes have accumulated, a custom loss waits for its gradient, and later requests for one that has not come."""

    def requests(run):
        passes = {number: ("forward_backward", passing(run, number, number)) for number in (1, 3, 6, 8, 9)}
        forwards = {number: ("forward_backward", passing(run, number, number + 1, forward_only=True)) for number in (2, 5, 7)}
        steps = {number: ("optim_step", stepping(run, number)) for number in (4, 10, 12)}
        return {**passes, **forwards, **steps, 11: ("forward_backward", passing(run, 11, 3))}

    with servertools.running(tiny_folder, tmp_path / "calm", names=["tiny"]) as server:
        client = Client(server)
        run = client.run(rank)
        calm = {number: client.result(*request) for number, request in sorted(requests(run).items())}
        expected = weights(server, run)

    with start() as server:
        client = Client(server)
        run = client.run(rank)
        asked = requests(run)
        before = {number: client.result(*asked[number]) for number in range(1, 10)}
        promise = client.post(*asked[11])  # 10 has not come
    with start() as server:
        client = Client(server, client.session)
        again = {number: client.post(*asked[number])["request_id"] for number in range(1, 10)}
        assert {number: client.fetch(request_id).content for number, request_id in again.items()} == before
        assert client.send("forward_backward", passing(run, 9, 99)).status_code == 400
        after = {number: client.result(*asked[number]) for number in (10, 12)}
        after[11] = client.fetch(promise["request_id"]).content
        assert {**before, **after} == calm
        assert equal(weights(server, run), expected)
        assert server.service.runs[run].trainer.step == 3


@pytest.mark.slow
def test_failures_are_repeated_too(start):
    with start() as server:
        client = Client(server)
        run = client.run()
        failed = [
            client.result("forward_backward", passing(run, 1, loss="nonsense")),
            client.result("optim_step", stepping(run, 2)),
        ]
        client.result("forward_backward", passing(run, 3))
        client.result("optim_step", stepping(run, 4))
        expected = weights(server, run)
        failed.append(client.result("forward_backward", passing(run, 5, loss="nonsense")))
    assert all(b"unknown name 'nonsense'" in one for one in failed)
    with start() as server:
        client = Client(server, client.session)
        assert client.result("optim_step", stepping(run, 6)) == failed[1]
        assert equal(weights(server, run), expected)
        client.result("forward_backward", passing(run, 7))
        assert b"optim/grad_norm" in client.result("optim_step", stepping(run, 8))


@pytest.mark.slow
def test_only_a_failed_gradient_call_fails_the_next_optimizer_step(start):
    """Errors of a save, a load and a forward pass are results of their requests, before and after a restart."""

    def side_failures(client, run, first):
        save, load = {"path": "taken"}, {"path": f"tinker://{run}/weights/missing"}
        requests = [("save_weights", save), ("load_weights", load)]
        asked = [(kind, {"model_id": run, "seq_id": first + place, **one}) for place, (kind, one) in enumerate(requests)]
        asked.append(("forward_backward", passing(run, first + 2, loss="nonsense", forward_only=True)))
        return [client.result(*one) for one in asked]

    with start() as server:
        client = Client(server)
        run = client.run()
        client.result("save_weights", {"model_id": run, "seq_id": 1, "path": "taken"})
        client.result("forward_backward", passing(run, 2))
        assert all(b'"error"' in one for one in side_failures(client, run, 3))
        assert b"optim/grad_norm" in client.result("optim_step", stepping(run, 6))
        client.result("forward_backward", passing(run, 7))
        assert all(b'"error"' in one for one in side_failures(client, run, 8))
    with start() as server:
        client = Client(server, client.session)
        assert b"optim/grad_norm" in client.result("optim_step", stepping(run, 11))
        failed = client.result("forward_backward", passing(run, 12, loss="nonsense"))
        side_failures(client, run, 13)
        assert client.result("optim_step", stepping(run, 16)) == failed


@pytest.mark.slow
def test_what_a_client_has_read_outlives_the_server(start):
    """The client reports which errors its caller has read; only an unread error fails the next steps."""

    def telling(run, number, read):
        fields = {"type": "adamw", **RATE, "failures_read": read}
        return {"model_id": run, "seq_id": number, "optimizer_params": fields}

    with start() as server:
        client = Client(server)
        run = client.run()
        client.result("forward_backward", passing(run, 1))
        client.result("optim_step", telling(run, 2, "false"))
        expected = weights(server, run)
    with start() as server:
        client = Client(server)
        run = client.run()
        client.result("forward_backward", passing(run, 1))
        failed = client.result("forward_backward", passing(run, 2, loss="nonsense"))
        assert client.result("optim_step", telling(run, 3, "false")) == failed
    with start() as server:
        client = Client(server, client.session)
        assert client.result("optim_step", telling(run, 4, "false")) == failed  # still unread
        client.result("forward_backward", passing(run, 5))
        client.result("forward_backward", passing(run, 6, loss="nonsense"))
    with start() as server:
        client = Client(server, client.session)
        assert b"optim/grad_norm" in client.result("optim_step", telling(run, 7, "true"))
        assert equal(weights(server, run), expected)
        client.result("forward_backward", passing(run, 8))
    with start() as server:
        client = Client(server, client.session)
        assert b"optim/grad_norm" in client.result("optim_step", telling(run, 9, "false"))


@pytest.mark.slow
def test_a_log_is_as_long_as_what_a_state_has_not_seen(start, monkeypatch, tmp_path):
    monkeypatch.setattr(snapshots, "RETRY_S", 0.0)
    with start(checkpoint_s=1e-9) as server:
        client = Client(server)
        run = client.run()
        for number in range(1, 21, 2):
            client.result("forward_backward", passing(run, number, number))
            client.result("optim_step", stepping(run, number + 1))
        server.call(server.service.prune_logs)
        sampler = json.loads(
            client.result("save_weights_for_sampler", {"model_id": run, "seq_id": 21, "sampling_session_seq_id": 0})
        )
        drawn = client.sample(sampler["sampling_session_id"], 0)
        expected = weights(server, run)
        place = tmp_path / "out" / "sessions" / client.session / "run-0"
        assert len(list(place.glob("log-*"))) <= 3 and len(list(place.glob("state-*"))) <= 2
    with start(checkpoint_s=1e-9) as server:
        client = Client(server, client.session)
        assert client.post("optim_step", stepping(run, 2))["request_id"] == f"{run}/2"
        assert client.fetch(f"{run}/2").status_code == 410
        assert client.fetch(f"{run}/99").status_code == 404
        assert equal(weights(server, run), expected) and server.service.runs[run].trainer.step == 10
        client.result("forward_backward", passing(run, 22))
        client.result("optim_step", stepping(run, 23))  # and a state that has the sampler behind it
        assert client.sample(sampler["sampling_session_id"], 1) != drawn
    with start() as server:
        client = Client(server, client.session)
        assert client.sample(sampler["sampling_session_id"], 0) == drawn
        assert server.service.runs[run].trainer.step == 11


@pytest.mark.slow
def test_a_state_stays_where_nothing_came_after_it(start, monkeypatch):
    monkeypatch.setattr(snapshots, "RETRY_S", 0.0)
    with start(checkpoint_s=1e-9) as server:
        client = Client(server)
        run = client.run()
        client.result("forward_backward", passing(run, 1))
        client.result("optim_step", stepping(run, 2))
        until(lambda: server.service.snapshots[run].newest == 2)
        expected = weights(server, run)
    for _ in range(2):
        with start() as server:
            assert equal(weights(server, run), expected)
            server.call(server.service.prune_logs)


@pytest.mark.slow
def test_samplers_in_flight_follow_after_a_restart(start):
    def publish(client, run, seq_id, number):
        message = {"model_id": run, "seq_id": seq_id, "sampling_session_seq_id": number, "kind": "inflight"}
        return json.loads(client.result("save_weights_for_sampler", message))["sampling_session_id"]

    with start(checkpoint_s=1e-9) as server:
        client = Client(server)
        run = client.run()
        first = publish(client, run, 1, 0)
        before = client.sample(first, 0, seed=1)
        client.result("forward_backward", passing(run, 2))
        client.result("optim_step", stepping(run, 3))
        until(lambda: server.service.snapshots[run].newest == 3)
        second = publish(client, run, 4, 1)
        drawn = client.sample(first, 1, seed=1)
        assert drawn == client.sample(second, 0, seed=1) != before
        assert client.post("join_sampling_session", {"sampling_session_id": second}) == {"client_counter": 1}
    with start(checkpoint_s=1e-9) as server:
        client = Client(server, client.session)
        third = publish(client, run, 5, 2)
        assert [client.sample(one, 9, seed=1) for one in (first, second, third)] == [drawn] * 3
        assert client.post("join_sampling_session", {"sampling_session_id": second}) == {"client_counter": 2}


@pytest.mark.slow
def test_attempts_to_publish_weights_are_one_request(start):
    """The tinker client counts sampling_session_seq_id up at each attempt, also if the server stopped before it answered."""
    drawn = []
    with start() as server:
        for number, attempts in enumerate(([0], [5, 6])):
            client = Client(server)
            run = client.run()
            bodies = [{"model_id": run, "seq_id": 1, "sampling_session_seq_id": attempt} for attempt in attempts]
            results = {client.result("save_weights_for_sampler", body) for body in bodies}
            assert len(results) == 1, number
            drawn.append(client.sample(json.loads(results.pop())["sampling_session_id"], 0))
        other = {"model_id": run, "seq_id": 1, "sampling_session_seq_id": 5, "kind": "inflight"}
        assert client.send("save_weights_for_sampler", other).status_code == 400
    assert drawn[0] == drawn[1]


@pytest.mark.slow
def test_what_was_loaded_may_be_deleted(start):
    with start() as server:
        client = Client(server)
        run = client.run()
        client.result("forward_backward", passing(run, 1))
        client.result("optim_step", stepping(run, 2))
        path = json.loads(client.result("save_weights", {"model_id": run, "seq_id": 3, "path": "one"}))["path"]
        message = {"session_id": client.session, "model_seq_id": 1, "path": path, "optimizer": True}
        other = json.loads(client.result("load_weights", message))["model_id"]
        sampler = {"session_id": client.session, "sampling_session_seq_id": 5, "model_path": path}
        sampler_id = client.post("create_sampling_session", sampler)["sampling_session_id"]
        drawn = client.sample(sampler_id, 0)
        client.result("load_weights", {"model_id": run, "seq_id": 4, "path": path, "optimizer": False})
        checkpoints = f"api/v1/training_runs/{run}/checkpoints"
        assert httpx.delete(f"{server.url}/{checkpoints}/weights/one", timeout=WAIT_S).status_code == 204
        expected = [weights(server, one) for one in (run, other)]
    with start() as server:
        client = Client(server, client.session)
        assert client.result("load_weights", message) == json.dumps({"type": "load_weights", "model_id": other}).encode()
        client.result("forward_backward", passing(run, 5, forward_only=True))  # the replay is over
        assert all(equal(weights(server, one), known) for one, known in zip((run, other), expected, strict=True))
        assert client.post("create_sampling_session", sampler) == {
            "type": "create_sampling_session",
            "sampling_session_id": sampler_id,
        }
        assert client.sample(sampler_id, 0) == drawn != client.sample(sampler_id, 1)
        assert httpx.get(f"{server.url}/{checkpoints}", timeout=WAIT_S).json()["checkpoints"] == []


@pytest.mark.slow
def test_a_save_that_was_not_acknowledged_is_repeated_or_found(start, tmp_path):
    with start() as server:
        client = Client(server)
        run = client.run()
        saving = {"model_id": run, "seq_id": 1, "path": "one"}
        saved = client.result("save_weights", saving)
    file = next((tmp_path / "out" / "sessions" / client.session / "run-0").glob("log-*"))
    records = [record for record in read(file).records if record.header.get("id") != f"{run}/1" or record.kind == "request"]
    file.write_bytes(MAGIC + b"".join(map(encode, records)))  # as if killed before the result was noted
    with start() as server:
        client = Client(server, client.session)
        assert client.result("save_weights", saving) == saved
    file.write_bytes(MAGIC + b"".join(map(encode, records)))
    for facts in (tmp_path / "out" / run.replace(":", ".") / "facts").glob("*"):
        facts.unlink()  # as if killed before it was known
    for later in file.parent.glob("log-*"):
        if later != file:
            later.unlink()
    with start() as server:
        client = Client(server, client.session)
        assert client.result("save_weights", saving) == saved
        assert b"exists already" in client.result("save_weights", {**saving, "seq_id": 2})


@pytest.mark.slow
def test_a_replay_that_finds_something_else_stops_the_run(start, tmp_path):
    with start() as server:
        client = Client(server)
        run = client.run()
        client.result("forward_backward", passing(run, 1))
        message = {"model_id": run, "seq_id": 2, "sampling_session_seq_id": 0}
        sampler = json.loads(client.result("save_weights_for_sampler", message))["sampling_session_id"]
        pending = promised(client, sampler)
    file = next((tmp_path / "out" / "sessions" / client.session / "run-0").glob("log-*"))
    records = [
        Record(one.header, one.body[:-1] + b"?") if one.kind == "result" and one.header["id"].endswith("/1") else one
        for one in read(file).records
    ]
    file.write_bytes(MAGIC + b"".join(map(encode, records)))
    with start() as server:
        client = Client(server, client.session)
        assert b"was replayed after a restart and gave a different result" in client.result("optim_step", stepping(run, 3))
        assert NOT_RECOVERED in client.fetch(pending).content


@pytest.mark.slow
def test_what_cannot_be_recovered_costs_no_more_than_itself(start, tmp_path, caplog):
    sessions = tmp_path / "out" / "sessions"
    with start() as server:
        broken, client = Client(server), Client(server)
        lost_run, run = broken.run(), client.run()
        path = json.loads(client.result("save_weights_for_sampler", {"model_id": run, "seq_id": 1, "path": "x"}))["path"]
        message = {"model_id": run, "seq_id": 2, "sampling_session_seq_id": 0}
        published = json.loads(client.result("save_weights_for_sampler", message))["sampling_session_id"]
        message = {"session_id": client.session, "sampling_session_seq_id": 1, "model_path": path}
        loaded = client.post("create_sampling_session", message)["sampling_session_id"]
        pending = [promised(client, sampler) for sampler in (published, loaded)]
        (folder,) = server.service.catalog.folder.glob("*/sampler_weights.x")
    # A log without what every request has, a request of a kind that this version does not know, and a checkpoint that is gone.
    (sessions / broken.session / "run-1").mkdir()
    lines = [Record({"what": "run", "kind": "create_model"}), Record({"what": "request"})]
    (sessions / broken.session / "run-1" / "log-000001").write_bytes(MAGIC + b"".join(map(encode, lines)))
    lines = [Record({"what": "run", "kind": "create_model"}), Record({"what": "request", "id": f"{run}/3", "kind": "dance"})]
    (sessions / client.session / "run-0" / "log-000009").write_bytes(MAGIC + b"".join(map(encode, lines)))
    for gone in (folder, sessions / client.session / "weights-1"):
        shutil.rmtree(gone)
    with start() as server:
        service, client = server.service, Client(server, client.session)
        assert f"{sessions / broken.session}: cannot recover the session" in caplog.text
        assert f"{run} could not be recovered after the restart" in caplog.text
        assert list(service.sessions) == [client.session]
        assert not service.runs and not service.snapshots and not service.unfinished_batches
        assert client.send("optim_step", stepping(lost_run, 1)).status_code == 404
        assert f"cannot read request {run}/3 in the log" in client.send("optim_step", stepping(run, 4)).json()["detail"]
        assert all(NOT_RECOVERED in client.fetch(one).content for one in pending)


def harm(file, kind):
    """Damage a file as disks and people do."""
    data = file.read_bytes()
    middle = len(data) // 2
    if kind == "missing":
        file.unlink()
    else:
        file.write_bytes(
            {
                "truncated": data[:middle],
                "flipped": data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :],
                "zero": bytes(len(data)),
            }[kind]
        )


@pytest.mark.slow
def test_damage_to_a_file_of_a_run_costs_no_acknowledged_request(start, tmp_path, tiny_folder, caplog):
    """Each file of a run, damaged in four ways: the run continues with the same bits, or one line says why not."""
    with start(checkpoint_s=1e-9) as server:
        client = Client(server)
        run = client.run()
        client.result("forward_backward", passing(run, 1))
        client.result("optim_step", stepping(run, 2))
        until(lambda: list(server.service.snapshots[run].kept) == [2])
        client.result("forward_backward", passing(run, 3))
        client.result("optim_step", stepping(run, 4))
        until(lambda: list(server.service.snapshots[run].kept) == [2, 4])
        server.service.config.checkpoint_s = 1e9
        client.result("forward_backward", passing(run, 5))
        client.result("optim_step", stepping(run, 6))
        expected = weights(server, run)
    place = tmp_path / "out" / "sessions" / client.session / "run-0"
    (tmp_path / "out").rename(tmp_path / "whole")
    (log,) = (path for path in (tmp_path / "whole").rglob("run-0/log-*") if b"/6" in path.read_bytes())
    inside = [log.name, *(f"state-4/{name}" for name in ("checkpoint.json", "adapter_model.safetensors"))]
    moments = next((log.parent / "state-4" / "trainer").glob("*.safetensors"))
    for name in [*inside, str(moments.relative_to(log.parent))]:
        for kind in ("truncated", "flipped", "zero", "missing"):
            shutil.copytree(tmp_path / "whole", tmp_path / "out")
            harm(place / name, kind)
            caplog.clear()
            with start() as server:
                warnings = [one.getMessage() for one in caplog.records if one.name == "cookbook" and one.levelname != "INFO"]
                if name != log.name:
                    # The state before it, and the log, lead to the same weights.
                    until(lambda: server.service.runs[run].trainer.step == 3)
                    assert equal(weights(server, run), expected), (name, kind)
                    assert len(warnings) == 1 and "state-4" in warnings[0] and "trying the state before it" in warnings[0]
                elif run not in server.service.runs:
                    refused = Client(server, client.session).send("optim_step", stepping(run, 7))
                    assert "is lost, because bytes" in refused.json()["detail"] and kind == "flipped", kind
                    assert any("could not be recovered" in one for one in warnings)
                elif kind == "flipped":
                    # A result was lost, which is recomputed.
                    until(lambda: server.service.runs[run].trainer.step == 3)
                    assert equal(weights(server, run), expected) and "the result" in warnings[0]
                else:
                    # The end looks like that of a crash. The next request waits for the missing ones, and then fails.
                    assert warnings if kind != "missing" else not warnings
                    server.call(lambda: setattr(server.service.runs[run], "gap_timeout_s", 0.01))
                    assert b"has not arrived within" in Client(server, client.session).result("optim_step", stepping(run, 9))
            shutil.rmtree(tmp_path / "out")


def test_a_lost_request_is_noticed_by_its_result(tmp_path):
    """The record of the last request is lost with its header; its result proves that it has run."""
    lost = Record({"what": "request", "id": "s:train:0/2", "kind": "optim_step"}, b"step 2")
    log = Log(tmp_path, Record({"what": "run"}), fsync=False)
    for record in (
        Record({"what": "request", "id": "s:train:0/1", "kind": "forward_backward"}),
        lost,
        Record({"what": "result", "id": "s:train:0/2"}),
    ):
        log.append(record)
    data = bytearray(log.files[0].path.read_bytes())
    data[data.index(encode(lost))] ^= 1
    log.files[0].path.write_bytes(data)
    after = Log(tmp_path, Record({}), fsync=False)
    records = list(after.earlier_records())
    _check_requests(after, records, {1}, 2)
    for snapshot in (0, 1):
        with pytest.raises(CheckpointError, match="the run cannot continue after request 1"):
            _check_requests(after, records, {1}, snapshot)


# ---- around them -----------------------------------------------------------------------------------------------------


def broken_disk():
    raise OSError("the disk cannot sync")


@pytest.mark.slow
def test_a_full_disk_refuses_the_request_and_nothing_else(start, tmp_path, monkeypatch):
    session, run, passed, stepped = children.in_child(lambda: fill_disk(start, tmp_path, monkeypatch))
    with start() as server:
        assert Client(server, session).result("forward_backward", passing(run, 1)) == passed
        assert Client(server, session).result("optim_step", stepping(run, 2)) == stepped


def fill_disk(start, tmp_path, monkeypatch):
    """Send requests to a server whose disk is full for the first. Return its session and run, and two results."""
    with start() as server:
        client = Client(server)
        run = client.run()
        file = next((tmp_path / "out" / "sessions" / client.session / "run-0").glob("log-*"))
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        children.limit_files(file.stat().st_size + 100)
        refused = client.send("forward_backward", passing(run, 1))
        assert httpx.get(f"{server.url}/api/v1/healthz", timeout=WAIT_S).status_code == 200
        children.limit_files(unlimited)
        assert refused.status_code == 507 and "cannot write: File too large; free disk space" in refused.json()["detail"]
        passed = client.result("forward_backward", passing(run, 1))
        # A disk that cannot sync costs a snapshot, and no request.
        server.service.config.checkpoint_s = 1e-9
        monkeypatch.setattr(server.service.runs[run].log, "rotate", broken_disk)
        stepped = client.result("optim_step", stepping(run, 2))
    assert read(file).torn_bytes == 0  # no half of the refused record is left
    return client.session, run, passed, stepped


@pytest.mark.slow
def test_samples_that_were_promised_are_drawn(start, tmp_path):
    with start() as server:
        client = Client(server)
        message = {"session_id": client.session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler = client.post("create_sampling_session", message)["sampling_session_id"]
        client.post("join_sampling_session", {"sampling_session_id": sampler})
        log = server.service.sessions[client.session].log
        assert log._synced_bytes == log._appended_bytes
        for _ in range(2):  # the first acknowledgement may have been lost
            client.send("cookbook/batch", {"sampling_session_id": sampler, "count": 3})
        drawn = [client.post("asample", asked(sampler, number))["request_id"] for number in range(2)]  # one is missing
    with start() as server:
        client = Client(server, client.session)
        drawn.append(client.post("asample", asked(sampler, 2))["request_id"])
        found = [client.fetch(one).content for one in drawn]
        assert len(set(found)) == 3  # each has a seed of its own
        assert client.post("join_sampling_session", {"sampling_session_id": sampler}) == {"client_counter": 2}
        feed = client.post("retrieve_futures", {"target": {"sampling_session_id": sampler}})
        assert [one["request_id"] for one in feed["completions"]] == drawn
    with start() as server:
        client = Client(server, client.session)
        assert [client.fetch(one).content for one in drawn] == found
        assert server.service.samplers[sampler].batch is None  # so that nothing waits for the first announcement
        again = client.post("retrieve_futures", {"target": {"sampling_session_id": sampler}, "prev_cursor": feed["cursor"]})
        assert {one["request_id"] for one in again["completions"]} == set(drawn) and again["cursor"] > feed["cursor"]
        for _ in range(2):  # the first answer may have been lost
            assert client.send(f"sessions/{client.session}/finish", {}).status_code == 204
    assert not list((tmp_path / "out" / "sessions").iterdir())


NOT_RECOVERED = b"was not recovered after the restart; create a new sampling client"


def promised(client, sampler):
    """A sample that waits for the rest of its batch."""
    client.send("cookbook/batch", {"sampling_session_id": sampler, "count": 2})
    return client.post("asample", asked(sampler, 0))["request_id"]


@pytest.mark.slow
def test_what_belongs_to_another_model_is_left_alone(start, tmp_path, caplog):
    with start() as server:
        client = Client(server)
        run = client.run()
    other = tiny.save(tmp_path / "other", seed=1)
    with servertools.running(other, tmp_path / "out", names=["tiny"]) as server:
        assert run not in server.service.runs and "used another base model" in caplog.text
    with start(backend=LocalConfig(matmul_precision="medium")) as server:
        assert run not in server.service.runs and "of 'highest', now they are 'medium'" in caplog.text
    with start() as server:
        assert run in server.service.runs


def test_switched_off_nothing_is_kept(start, tmp_path):
    with start(durability="off") as server:
        client = Client(server)
        run = client.run()
        client.result("forward_backward", passing(run, 1))
    assert not (tmp_path / "out" / "sessions").exists()
    with start() as server:
        found = httpx.post(f"{server.url}/api/v1/retrieve_future", json={"request_id": f"{run}/1"}, timeout=WAIT_S)
        assert found.status_code == 404 and "restarted with server.durability=off" in found.json()["detail"]


def test_nothing_is_logged_before_it_is_valid(start, tmp_path):
    """Requests that fail change nothing, so a tenant cannot fill the disk with them. Metadata has a limit."""
    with start(max_runs=1) as server:
        client = Client(server)
        run = client.run()
        place = tmp_path / "out" / "sessions" / client.session

        def num_bytes():
            return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())

        before = num_bytes()
        asked = {"session_id": client.session, "model_seq_id": 1, "base_model": "tiny"}
        for _ in range(2):
            assert b"raise server.max_runs" in client.result("create_model", asked)
        missing = {"session_id": client.session, "model_seq_id": 2, "path": f"tinker://{run}/weights/missing"}
        assert b"not found" in client.result("load_weights", missing)
        graph = {"nodes": [{"op": "call_function", "name": "x", "target": "os.system", "args": ["x" * 10_000]}]}
        loss = {"session_id": client.session, "custom_loss_seq_id": 0, "name": "mine", "inputs": [], "graph": graph}
        for _ in range(2):
            assert b"create_custom_loss" in client.result("create_custom_loss", loss)
        assert num_bytes() == before and len(list(place.glob("run-*"))) == 1
        metadata = {"note": "x" * 70_000}
        refused = client.send("create_session", {"user_metadata": metadata})
        assert refused.status_code == 422 and "expected at most 65,536 bytes as JSON" in refused.json()["detail"]
        assert client.send("create_model", {**asked, "user_metadata": metadata}).status_code == 422
        assert client.send("create_model", {**asked, "unknown": "x" * 200_000}).status_code == 413
        saving = {"model_id": run, "seq_id": 1, "path": "one", "user_metadata": metadata}
        assert b"expected at most 65,536 bytes" in client.result("save_weights", saving)
        assert client.post("create_session", {"user_metadata": {"note": "x" * 60_000}})


def test_serve_verify_finds_every_damaged_file(start, tmp_path, capsys):
    out = tmp_path / "out"
    with start() as server:
        client = Client(server)
        run = client.run()
        client.result("save_weights", {"model_id": run, "seq_id": 1, "path": "one"})
    folder = out / run.replace(":", ".")
    assert cookbook(["serve", "--verify", f"out={out}"]) == 0
    assert capsys.readouterr().out.count("whole") >= 5
    for file, place in (
        (folder / "run.json", folder / "run.json"),
        (folder / "facts" / "weights.one.json", folder / "facts" / "weights.one.json"),
        (folder / "weights.one" / "adapter_model.safetensors", folder / "weights.one"),
        (out / "sessions" / client.session / "run-0" / "log-000001", out / "sessions" / client.session / "run-0"),
    ):
        whole = file.read_bytes()
        harm(file, "flipped" if file.suffix != ".json" else "truncated")
        assert cookbook(["serve", "--verify", f"out={out}"]) == 2
        printed = capsys.readouterr()
        assert "1 of" in printed.err
        assert str(place) in next(line for line in printed.out.splitlines() if line.startswith("damaged"))
        if place.parent != out / "sessions" / client.session:
            assert cookbook(["weights", "verify", str(folder)]) == 2
            assert str(place) in capsys.readouterr().out
        file.write_bytes(whole)
    assert cookbook(["serve", "--verify", f"out={tmp_path / 'none'}"]) == 2
    assert "is not the folder of a server" in capsys.readouterr().err


def test_the_folder_of_a_server_with_keys_is_private(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir(mode=0o755)
    with socket.create_server(("127.0.0.1", 0)) as other:
        words = ["serve", f"server.port={other.getsockname()[1]}", "out=out"]
        assert cookbook(words) == 2 and (tmp_path / "out").stat().st_mode & 0o777 == 0o755
        monkeypatch.setenv("COOKBOOK_API_KEYS", "tml-a")
        assert cookbook(words) == 2 and (tmp_path / "out").stat().st_mode & 0o777 == 0o700
    assert "cannot listen" in capsys.readouterr().err


def test_one_server_a_folder(tiny_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    with files.locked(tmp_path / "out"):
        assert cookbook(["serve", f"model.name={tiny_folder}", "server.port=0", "out=out"]) == 2
    assert "is running in out; wait for it or choose another folder" in capsys.readouterr().err
    assert cookbook(["serve", f"model.name={tiny_folder}", "server.durability=maybe"]) == 2
    assert "server.durability: expected one of synced, written, off, got 'maybe'" in capsys.readouterr().err
