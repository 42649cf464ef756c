"""A key cannot use up the server's limits: sessions, pending bytes, results and samplers are shared among the keys."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest
import servertools
from waiting import WAIT_S, until

from cookbook.server.state import samplers
from cookbook.server.state.requests import Request, RequestStore
from cookbook.server.state.samplers import SamplerCache, SamplingSession
from cookbook.server.state.uploads import Uploads
from cookbook.server.wire.bodies import Refused
from cookbook.server.wire.encode import from_json


class Discard:
    """A log that keeps nothing."""

    def append(self, record: object) -> None:
        pass


LOG: Any = Discard()


def owner(object_id: str) -> str:
    return object_id.partition("-")[0]


def request(scope: str, number: int, num_bytes: int = 100) -> tuple[Request, bytes]:
    body = bytes(num_bytes)
    return Request(scope, number, "optim_step", body), body


def sampler(name: str, num_bytes: int = 0) -> SamplingSession:
    weights: Any = object()
    return SamplingSession(name, name, "tiny", None, weights, 0, num_bytes=num_bytes)


def test_sessions_of_one_key_leave_room_for_others(tiny_folder, tmp_path):
    file = tmp_path / "keys"
    file.write_text("alice: tml-alice\nbob: tml-bob\n")

    def status(server, key):
        headers = {"X-API-Key": key}
        return httpx.post(f"{server.url}/api/v1/create_session", json={}, headers=headers, timeout=WAIT_S).status_code

    with servertools.running(tiny_folder, tmp_path / "out", keys_file=str(file), max_sessions=4) as server:
        assert [status(server, "tml-alice") for _ in range(4)] == [200, 200, 429, 429]
        assert status(server, "tml-bob") == 200


def test_requests_without_their_predecessor_keep_no_other_key_out():
    store = RequestStore(1 << 20, 1000, owner)
    accepted = 0
    with pytest.raises(Refused, match="of alice are pending"):
        for number in range(2, 100):
            store.accept(LOG, *request("alice-run", number))
            accepted += 1
    assert accepted == 5
    store.accept(LOG, *request("bob-run", 1))


def test_bodies_that_wait_to_be_decoded_count_for_their_key():
    uploads = Uploads(RequestStore(1 << 20, 1000, owner), 60.0)
    for _ in range(5):
        uploads.hold("alice", 100)
    with pytest.raises(Refused, match="wait to be decoded") as refused:
        uploads.hold("alice", 100)
    assert refused.value.status == 429
    uploads.hold("bob", 400)
    for _ in range(5):
        uploads.release("alice", 100)
    assert dict(uploads.complete_bytes) == {"bob": 400}


def test_a_body_counts_until_its_request_is_answered(tiny_folder, tmp_path):
    """Twenty bodies of 100 KB wait behind one that is being decoded, and the limit of 1 MiB refuses some of them."""
    statuses, begun, go = [], threading.Event(), threading.Event()
    with servertools.running(tiny_folder, tmp_path, max_pending_mb=1) as server:
        decoder = server.service.decoder
        server.call(lambda: asyncio.ensure_future(decoder.run(1 << 20, lambda: begun.set() or go.wait(WAIT_S))) and None)
        assert begun.wait(WAIT_S)

        def send():
            body = b'{"display_name": "' + b"x" * 100_000 + b'"}'
            statuses.append(httpx.post(f"{server.url}/api/v1/telemetry", content=body, timeout=WAIT_S).status_code)

        threads = [threading.Thread(target=send) for _ in range(20)]
        for thread in threads:
            thread.start()
        until(lambda: 429 in statuses)
        assert server.service.uploads.complete_bytes.total() <= 1 << 20
        go.set()
        for thread in threads:
            thread.join(WAIT_S)
        assert statuses.count(200) >= 10
        assert set(statuses) == {200, 429}
        # The server has done with a body only after its client has the response.
        until(lambda: not server.service.uploads.complete_bytes)


def test_results_of_one_key_drop_no_result_of_another():
    store = RequestStore(1000, 1 << 20, owner)
    all_requests = {}
    for scope, count in (("bob-run", 1), ("alice-run", 40)):
        for number in range(count):
            accepted, _ = store.accept(LOG, *request(scope, number))
            store.settle(accepted, from_json({"text": "x" * 90}))
            all_requests[scope, number] = accepted
    assert all_requests["bob-run", 0].result is not None
    assert all_requests["alice-run", 0].result is None
    assert store.kept_bytes <= 1000


def test_samplers_of_one_key_evict_no_sampler_of_another(monkeypatch):
    monkeypatch.setattr(samplers, "MAX_SAMPLERS", 4)
    cache = SamplerCache(1 << 30, lambda _: None, lambda _: None, owner)
    cache.add(sampler("bob-0"))
    for number in range(20):
        cache.add(sampler(f"alice-{number}"))
    assert list(cache) == ["bob-0", "alice-17", "alice-18", "alice-19"]


def test_weights_of_one_key_evict_no_weights_of_another():
    cache = SamplerCache(400, lambda _: None, lambda _: None, owner)
    cache.add(sampler("bob-0", 100))
    for number in range(20):
        cache.add(sampler(f"alice-{number}", 100))
    assert list(cache) == ["bob-0", "alice-17", "alice-18", "alice-19"]


def test_without_several_keys_one_client_may_use_everything():
    store = RequestStore(1 << 20, 1000)
    for number in range(10):
        store.accept(LOG, *request("run", number))
    with pytest.raises(Refused, match="pending; retry later"):
        store.accept(LOG, *request("run", 10))
