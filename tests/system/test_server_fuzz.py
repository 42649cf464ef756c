"""The campaign of :mod:`fuzz_server`, short: ``python tools/fuzz_server.py`` plays it at length."""

from __future__ import annotations

import json

import httpx
import pytest
import servertools
import zstandard
from waiting import WAIT_S

from cookbook.server.wire.decode import decompress

fuzz_server = pytest.importorskip("fuzz_server", reason="needs the package tinker")
recording = pytest.importorskip("recording")

REQUESTS = 120


@pytest.fixture(scope="module")
def calm(tiny_folder, tmp_path_factory):
    return recording.recorded(tiny_folder, tmp_path_factory.mktemp("calm"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("attacked")


@pytest.fixture(scope="module")
def server(tiny_folder, folder):
    out = folder / "a" / "out"
    with servertools.running(tiny_folder, out, names=["tiny"], max_request_mb=4, gap_timeout_s=0.2) as found:
        yield found


@pytest.mark.slow
def test_hostile_requests_are_refused_or_fail_and_others_notice_nothing(server, folder, calm, monkeypatch):
    monkeypatch.setattr("cookbook.server.routes.requests.LONG_POLL_S", 1.0)
    templates, openapi, seen = calm
    with fuzz_server.Campaign(server.url, templates, openapi) as campaign:
        campaign.run(REQUESTS, seed_=0)
    total = sum(campaign.counts.by_kind.values(), fuzz_server.Counter())
    assert campaign.counts.wrong == []
    assert total["requests"] >= REQUESTS and total["results"] and total["failed futures"] and total["4xx"]
    assert recording.honest(server.url) == seen
    assert fuzz_server.escaped(folder, [folder / "a" / "out"]) == []


# ---- what longer campaigns have found --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def post(server):
    """``post(path, body)`` -> status and answer; for a promise, the result."""

    def send(path, body, method="POST"):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = httpx.request(method, f"{server.url}/api/v1/{path}", content=data, timeout=WAIT_S)
        told = response.json() if response.content else None
        if isinstance(told, dict) and "request_id" in told:
            return send("retrieve_future", {"request_id": told["request_id"]})
        return response.status_code, told

    return send


@pytest.fixture(scope="module")
def run_id(post):
    return new_run(post)


def new_run(post) -> str:
    """Return the name of a new run in a session of its own: its requests are numbered from 1."""
    session_id = post("create_session", {})[1]["session_id"]
    made = post("create_model", {"session_id": session_id, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 1}})
    return made[1]["model_id"]


@pytest.mark.parametrize("number", [10**9, 10**300, -1])
def test_numbers_that_become_names_have_nine_digits(post, run_id, number):
    session_id = run_id.partition(":")[0]
    made = {"session_id": session_id, "base_model": "tiny"}
    assert post("create_model", {**made, "model_seq_id": number})[0] == 422
    assert post("create_sampling_session", {**made, "sampling_session_seq_id": number})[0] == 422


def test_a_time_beyond_all_calendars_is_refused_and_the_lists_stay_readable(post):
    run_id = new_run(post)
    for number, ttl in enumerate((1e308, 1e12, -1.0), start=1):
        told = post("save_weights", {"model_id": run_id, "seq_id": number, "path": "x", "ttl_seconds": ttl})[1]
        assert "ttl_seconds: expected above 0" in told["error"]
    assert post("save_weights", {"model_id": run_id, "seq_id": 4, "path": "x"})[1]["path"].endswith("/x")
    place = f"training_runs/{run_id}/checkpoints/weights/x/ttl"
    assert post(place, b'{"ttl_seconds": Infinity}', "PUT")[0] == post(place, {"ttl_seconds": 1e300}, "PUT")[0] == 422
    assert post("checkpoints", b"", "GET")[0] == 200
    listed = post(f"training_runs/{run_id}/checkpoints", b"", "GET")[1]["checkpoints"]
    assert [one["expires_at"] for one in listed] == [None]


def test_numbers_too_large_to_compute_with_are_the_clients_fault(post):
    run_id = new_run(post)
    session_id = run_id.partition(":")[0]
    step = {"model_id": run_id, "seq_id": 1, "adam_params": {"learning_rate": 10**400}}
    assert post("optim_step", step)[1]["category"] == "user"
    assert post("save_weights_for_sampler", {"model_id": run_id, "seq_id": 2})[1]["category"] == "user"
    made = {"session_id": session_id, "model_seq_id": 1, "base_model": "tiny", "lora_config": {"rank": 1, "seed": 1 << 70}}
    assert post("create_model", made)[0] == 422
    assert post("retrieve_future", {"request_id": f"{run_id}/{'9' * 5000}"})[0] == 404


def test_a_packed_body_is_read_to_its_end():
    """A second frame after the first is a part of the body, and not ignored."""
    packed = b"".join(map(zstandard.ZstdCompressor().compress, (b"first, ", b"second")))
    assert decompress(packed, "zstd", 1000) == b"first, second"
