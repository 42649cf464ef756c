"""API keys as tenants: every route with the own key, another key and none, publishing, quotas, rotation and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import re
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import servertools
import tiny
from fastapi.routing import APIRoute
from servertools import wait_until
from sessions import be_silent, passing
from starlette.routing import Route
from waiting import WAIT_S

from cookbook.errors import ConfigError
from cookbook.server import metrics
from cookbook.server.app import Auth
from cookbook.server.config import ServerConfig
from cookbook.server.handlers import quotas
from cookbook.server.keys import KeyRing

ALICE, BOB, ROOT = "tml-alice", "tml-bob", "tml-root"
KEYS = f"alice: {ALICE}\nbob: {BOB}\nroot: {ROOT} admin\n"
# As long as an id of a session, so that it can replace one inside a protobuf message.
UNKNOWN = "s0123456789abcdef"
TOKENS = [5, 6, 7, 8]
# One for all requests: each client would load the certificates again.
HTTP = httpx.Client(timeout=WAIT_S)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(KEYS)
    return file


@pytest.fixture(scope="module")
def server(tiny_folder, tmp_path_factory, keys):
    with servertools.running(
        tiny_folder, tmp_path_factory.mktemp("server"), names=["tiny"], keys_file=str(keys), durability="written"
    ) as found:
        yield found


@dataclass
class Tenant:
    """A client with one key and one session."""

    url: str
    key: str | None
    session: str = ""
    numbers: Any = field(default_factory=lambda: itertools.count(1))

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.key is not None:
            headers["X-API-Key"] = self.key
        content = {"content": body} if isinstance(body, bytes) else {} if body is None else {"json": body}
        response = HTTP.request(method, f"{self.url}{path}", headers=headers, **content)
        # All folders of these servers are below pytest's. No response may name one.
        assert b"pytest-of" not in response.content, (path, response.text)
        return response

    def post(self, path: str, body: Any, **headers: str) -> Any:
        response = self.send("POST", f"/api/v1/{path}", body, **headers)
        assert response.status_code == 200, response.text
        return response.json()

    def result(self, path: str, body: Any) -> Any:
        promise = {"request_id": self.post(path, body)["request_id"]}
        while b"try_again" in (response := self.send("POST", "/api/v1/retrieve_future", promise)).content:
            pass
        return response.json() if "json" in response.headers["content-type"] else response.content

    def open(self) -> str:
        self.session = self.post("create_session", {})["session_id"]
        return self.session

    def run(self, **more: Any) -> str:
        """Create a run, and train one step."""
        body = {"session_id": self.session or self.open(), "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2}}
        created = self.result("create_model", {**body, **more})
        assert "error" not in created, created
        run = created["model_id"]
        self.result("forward_backward", passing(run, next(self.numbers), 1))
        self.result("optim_step", {"model_id": run, "seq_id": next(self.numbers), "adam_params": {"learning_rate": 0.01}})
        return run


@pytest.fixture(scope="module")
def alice(server):
    """A tenant with a run, checkpoints, a sampler and results."""
    one = Tenant(server.url, ALICE)
    one.open()
    return one


@pytest.fixture(scope="module")
def ids(server, alice):
    """The objects of alice, by name."""
    run = alice.run()
    for kind, more in (("save_weights", {}), ("save_weights_for_sampler", {}), ("save_weights_external", {})):
        saved = alice.result(kind, {"model_id": run, "seq_id": next(alice.numbers), "path": "one", **more})
        assert "error" not in saved, saved
    body = {"session_id": alice.session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = alice.post("create_sampling_session", body)["sampling_session_id"]
    request = alice.post("asample", sample(sampler, 1))["request_id"]
    urls = alice.send("GET", f"/api/v1/training_runs/{run}/checkpoints/external_weights/one/external_weights_urls").json()[
        "urls"
    ]
    return {
        "session_id": alice.session,
        "run_id": run,
        "sampler_id": sampler,
        "request_id": request,
        "kind": "weights",
        "name": "one",
        "path": f"tinker://{run}/weights/one",
        "download": urls["adapter_config.json"].removeprefix(server.url),
    }


def sample(sampler: str, number: int, **more: Any) -> dict[str, Any]:
    prompt, params = {"chunks": [{"tokens": TOKENS}]}, {"max_tokens": 2, "seed": 1}
    return {"sampling_session_id": sampler, "seq_id": number, "prompt": prompt, "sampling_params": params, **more}


# ---- the matrix ------------------------------------------------------------------------------------------------------

# Routes that need no key, and routes that need any key and show no object.
OPEN = {"GET /api/v1/healthz", "GET /api/v1/download/{token}/{file:path}"}
SHARED: dict[str, Any] = {
    "POST /api/v1/client/config": {},
    "POST /api/v1/client/dynamic_config": {},
    "POST /api/v1/create_session": {},
    "POST /api/v1/telemetry": {},
    "GET /api/v1/get_server_capabilities": None,
    "GET /api/v1/cookbook": None,
    "GET /api/v1/docs": None,
    "GET /docs/oauth2-redirect": None,
    "GET /api/v1/openapi.json": None,
    "GET /redoc": None,
    "GET /metrics": None,
    "POST /v1/completions": {"model": "tiny", "prompt": "a", "max_tokens": 1},
    "POST /v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "GET /v1/models/{model:path}": None,
    **{f"{method} /hub/{{repo:path}}/resolve/{{revision}}/{{file:path}}": None for method in ("GET", "HEAD")},
    "GET /hub/api/models/{repo:path}": None,
    "GET /hub/api/models/{repo:path}/revision/{revision}": None,
}
# Values of the parameters of shared routes.
PUBLIC = {"model": "tiny", "repo": "cookbook/tiny", "revision": "main", "file": "tokenizer.json"}
# A shared route that answers 404 to all keys.
EMPTY = "GET /hub/api/models/{repo:path}/tree/{revision}/{folder:path}"
# A route that answers 400 to all keys.
REFUSED = "POST /v1/responses"
# A route that makes an object of the caller and names none. Its answers are tested in test_server_adapters.py.
UPLOAD = "POST /api/v1/cookbook/upload_adapter"
# Routes that list objects.
LISTS = {"GET /v1/models", "GET /api/v1/sessions", "GET /api/v1/training_runs", "GET /api/v1/checkpoints"}
CHECKPOINT = "/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}"


def numbered(**more: Any) -> Any:
    return lambda ids, number: {"model_id": ids["run_id"], "seq_id": number, **more}


# Routes of one object: the body of a request with the ids of alice and the next number of her run. The last ones delete.
OBJECTS: dict[str, Any] = {
    "POST /api/v1/session_heartbeat": lambda ids, _: {"session_id": ids["session_id"]},
    "GET /api/v1/sessions/{session_id}": None,
    "POST /api/v1/get_info": lambda ids, _: {"model_id": ids["run_id"]},
    "POST /api/v1/forward_backward": lambda ids, number: passing(ids["run_id"], number, 1),
    "POST /api/v1/optim_step": numbered(adam_params={"learning_rate": 0.01}),
    "POST /api/v1/save_weights": numbered(path="two"),
    "POST /api/v1/save_weights_for_sampler": numbered(sampling_session_seq_id=7),
    "POST /api/v1/save_weights_external": numbered(path="two"),
    "POST /api/v1/load_weights": lambda ids, number: {"model_id": ids["run_id"], "seq_id": number, "path": ids["path"]},
    "POST /api/v1/create_model": lambda ids, _: {"session_id": ids["session_id"], "model_seq_id": 5, "base_model": "tiny"},
    "POST /api/v1/create_custom_loss": lambda ids, _: {
        "session_id": ids["session_id"], "custom_loss_seq_id": 1, "name": "x", "inputs": [], "graph": {"nodes": []},
    },
    "POST /api/v1/create_sampling_session": lambda ids, _: {
        "session_id": ids["session_id"], "sampling_session_seq_id": 3, "model_path": ids["path"],
    },
    "POST /api/v1/join_sampling_session": lambda ids, _: {"sampling_session_id": ids["sampler_id"]},
    "GET /api/v1/samplers/{sampler_id}": None,
    "POST /api/v1/cookbook/batch": lambda ids, _: {"sampling_session_id": ids["sampler_id"], "count": 1},
    "POST /api/v1/asample": lambda ids, _: sample(ids["sampler_id"], 2),
    "POST /api/v1/retrieve_future": lambda ids, _: {"request_id": ids["request_id"]},
    "POST /api/v1/retrieve_futures": lambda ids, _: {"target": {"sampling_session_id": ids["sampler_id"]}, "timeout": 0},
    "POST /api/v1/cancel_future": lambda ids, _: {"request_id": ids["request_id"]},
    "POST /api/v1/copy_weights": lambda ids, _: {"source_path": ids["path"], "destination_project_id": "archive"},
    "POST /api/v1/weights_info": lambda ids, _: {"tinker_path": ids["path"]},
    "POST /inference/v1/generate": lambda ids, _: {"model": ids["path"], "token_ids": TOKENS},
    "GET /api/v1/training_runs/{run_id}": None,
    "GET /api/v1/training_runs/{run_id}/checkpoints": None,
    f"GET {CHECKPOINT}/external_weights_urls": None,
    f"PUT {CHECKPOINT}/ttl": lambda ids, _: {"ttl_seconds": 3600},
    f"POST {CHECKPOINT}/publish": None,
    f"DELETE {CHECKPOINT}/publish": None,
    f"DELETE {CHECKPOINT}": None,
    "POST /api/v1/sessions/{session_id}/finish": None,
}  # fmt: skip


def test_every_route_has_a_row(server):
    """A new route fails here until this file lists the access of other keys to it."""
    assert set(routes_of(server.app.routes)) == OPEN | SHARED.keys() | {EMPTY, REFUSED, UPLOAD} | LISTS | OBJECTS.keys()


def routes_of(routes, prefix="") -> Iterator[str]:
    for route in routes:
        if not isinstance(route, Route):
            # Newer versions of FastAPI keep the routers that an application includes.
            yield from routes_of(route.original_router.routes, prefix + route.include_context.prefix)
            continue
        yield from (
            f"{method} {prefix}{route.path}"
            for method in route.methods or ()
            if method != "HEAD" or isinstance(route, APIRoute)
        )


def test_the_matrix(server, alice, ids):
    bob, anonymous, root = (Tenant(server.url, key) for key in (BOB, None, ROOT))
    for row in sorted(OPEN):
        method, path = row.split()
        path = ids["download"] if "{" in path else path
        assert {one.send(method, path).status_code for one in (alice, bob, anonymous)} == {200}, row
    for row, body in SHARED.items():
        method, path = row.replace(":path", "").format(**PUBLIC).split()
        assert [one.send(method, path, body).status_code for one in (alice, bob, anonymous)] == [200, 200, 401], row
    for row in sorted(LISTS):
        method, path = row.split()
        seen = [one.send(method, path) for one in (alice, root, bob, anonymous)]
        assert [alice.session in one.text for one in seen] == [True, True, False, False], row
        assert [one.status_code for one in seen] == [200, 200, 200, 401], row
    for row, make in OBJECTS.items():
        method, path = row.split()
        path, body = path.format(**ids), None if make is None else make(ids, next(alice.numbers) if numbers(make, ids) else 0)
        assert anonymous.send(method, path, body).status_code == 401, row
        unknown = alice.send(method, changed(path), changed(body))
        before = state(server, alice, ids)
        hidden = bob.send(method, path, body)
        assert state(server, alice, ids) == before, f"{row}: bob changed something"
        assert hidden.status_code == unknown.status_code, row
        assert unknown.status_code == 404 or row.split("/")[-1] in ("cancel_future", "finish"), (row, unknown.status_code)
        assert changed(hidden.text) == unknown.text, row
        assert row.startswith("DELETE") or root.send("GET", f"/api/v1/training_runs/{ids['run_id']}").status_code == 200
        own = alice.send(method, path, body)
        assert 200 <= own.status_code < 300, (row, own.text)
        if "request_id" in own.text and path != "/api/v1/retrieve_futures":
            # What runs later would look like a change by bob.
            alice.send("POST", "/api/v1/retrieve_future", {"request_id": own.json()["request_id"]})
    assert alice.send("GET", f"/api/v1/sessions/{alice.session}").status_code == 404


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Content-Type": "text/plain"}, 415),
    ],
    ids=str,
)
def test_every_route_of_a_server_without_keys_is_closed_to_web_pages(header, status):
    """Before any route looks at its request, so the parts of the addresses and the bodies do not matter."""

    async def passed(scope, receive, send):
        raise AssertionError(f"{scope['path']} was reached")

    with contextlib.closing(asyncio.new_event_loop()) as loop:
        closed = Auth(passed, KeyRing())
        for row in OPEN | SHARED.keys() | {EMPTY, REFUSED, UPLOAD} | LISTS | OBJECTS.keys():
            method, path = row.split()
            headers = [(name.lower().encode(), value.encode()) for name, value in ({"Host": "localhost"} | header).items()]
            scope = {"type": "http", "method": method, "path": re.sub("[{}]", "", path), "headers": headers}
            sent = []

            async def send(message, sent=sent):
                sent.append(message)

            loop.run_until_complete(closed(scope, None, send))
            assert sent[0]["status"] == status, row


def numbers(make, ids) -> bool:
    return make(ids, 1) != make(ids, 2)


def changed(one):
    """With the id of an unknown session in place of every session's id."""
    if one is None or isinstance(one, str):
        return None if one is None else re.sub("s[0-9a-f]{16}", UNKNOWN, one)
    if isinstance(one, bytes):
        return re.sub(b"s[0-9a-f]{16}", UNKNOWN.encode(), one)
    return json.loads(changed(json.dumps(one)))


def state(server, alice, ids):
    """State that requests of other tenants could change."""
    run = server.service.runs[ids["run_id"]]
    session = server.service.sessions[alice.session]
    saved = server.service.catalog.of_run(ids["run_id"])
    counts = run.order.next_number, run.order.num_waiting, dict(session.num_joined), len(server.service.requests)
    return counts, session.last_seen, list(session.sampler_ids), len(server.service.sessions), saved


# ---- across tenants --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_checkpoint_is_readable_for_others_while_it_is_published(server):
    alice, bob, root = (Tenant(server.url, key) for key in (ALICE, BOB, ROOT))
    run, own = alice.run(), bob.run()
    alice.result("save_weights", {"model_id": run, "seq_id": next(alice.numbers), "path": "shared"})
    path, place = f"tinker://{run}/weights/shared", f"/api/v1/training_runs/{run}/checkpoints/weights/shared"
    counter = itertools.count(1)

    def readings(one: Tenant, own: str) -> list[bool]:
        """Whether ``one`` can read the checkpoint: its description, its files, a sampler, a new run, and into its own run."""
        body = {"session_id": one.session, "sampling_session_seq_id": next(counter), "model_path": path}
        created = {"session_id": one.session, "model_seq_id": next(counter), "path": path}
        loaded = {"model_id": own, "seq_id": next(one.numbers), "path": path}
        # A failed load also fails the next optimizer step, so there must be no step after it.
        return [
            one.send("POST", "/api/v1/weights_info", {"tinker_path": path}).status_code == 200,
            one.send("GET", f"{place}/external_weights_urls").status_code == 200,
            one.send("POST", "/api/v1/create_sampling_session", body).status_code == 200,
            *("error" not in one.result("load_weights", asked) for asked in (created, loaded)),
        ]

    assert readings(bob, own) == [False] * 5
    assert bob.send("POST", f"{place}/publish").status_code == 404
    assert alice.send("POST", f"{place}/publish").status_code == 204
    assert readings(bob, own) == [True] * 5
    # Readable is not writable, and no other object of alice is.
    assert bob.send("DELETE", place).status_code == bob.send("DELETE", f"{place}/publish").status_code == 404
    assert bob.send("GET", f"/api/v1/training_runs/{run}").status_code == 404
    assert path not in bob.send("GET", "/api/v1/checkpoints").text
    assert alice.send("DELETE", f"{place}/publish").status_code == 204
    assert readings(bob, own) == [False] * 5
    assert readings(root, root.run()) == [True] * 5


def test_an_idempotency_key_is_of_one_api_key(server):
    alice, bob = Tenant(server.url, ALICE), Tenant(server.url, BOB)
    made = [one.post("create_session", {}, X_Idempotency_Key="same")["session_id"] for one in (alice, bob, alice, bob)]
    assert made[:2] == made[2:] and made[0] != made[1]


def test_a_silent_session_is_not_restored_for_others(server):
    alice, bob = Tenant(server.url, ALICE), Tenant(server.url, BOB)
    run = alice.run()
    silent = server.service.silent
    others = [one for one in server.service.sessions if one != alice.session]
    for session in others:
        server.call(lambda session=session: server.service.end_session(session))
    be_silent(server, alice.session)
    for path, body in (("session_heartbeat", {"session_id": alice.session}), ("retrieve_future", {"request_id": f"{run}/1"})):
        assert bob.send("POST", f"/api/v1/{path}", body).status_code == 404
        assert bob.send("POST", f"/api/v1/sessions/{alice.session}/finish").status_code == 204
        assert alice.session in silent and not server.service.moving
    assert alice.send("POST", "/api/v1/session_heartbeat", {"session_id": alice.session}).status_code == 429


# ---- quotas ----------------------------------------------------------------------------------------------------------


def test_quotas_count_everything_of_a_name(tiny_folder, tmp_path):
    """Tokens of training, of samples and of the endpoint; runs that are loaded; logs of sessions."""
    (tmp_path / "keys").write_text(f"alice: {ALICE} max_runs=1 max_tokens=30 max_disk_gb=0.001\n")
    options = {"names": ["tiny"], "keys_file": str(tmp_path / "keys"), "durability": "written"}
    with servertools.running(tiny_folder, tmp_path / "out", **options) as server:
        service = server.service
        session = service.sessions[Tenant(server.url, ALICE).open()]
        # A request that exceeds the quota alone runs alone.
        assert quotas.exceeded_quota(service, "alice", 31) is None
        for counter, name in (
            (session, "pending_tokens"),
            (session, "training_tokens"),
            (service.endpoint.callers["alice"], "pending_tokens"),
        ):
            setattr(counter, name, 10)
            assert quotas.exceeded_quota(service, "alice", 20) is None
            assert "10 tokens of alice are pending, and 21 more exceed" in quotas.exceeded_quota(service, "alice", 21)
            setattr(counter, name, 0)
        quotas.check_runs(service, session)
        run = f"{session.session_id}:train:0"
        service.loading_runs.add(run)
        with pytest.raises(ConfigError, match="1 training runs of alice are in memory"):
            quotas.check_runs(service, session)
        service.loading_runs.discard(run)
        quotas.check_disk(service, session.session_id, "save_weights")
        folder = service.durability.session_folder(session.session_id) / "log"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "part").write_bytes(bytes(1_000_000))
        with pytest.raises(ConfigError, match="checkpoints and logs of alice take"):
            quotas.check_disk(service, session.session_id, "save_weights")


@pytest.mark.slow
def test_quotas_are_of_a_name_and_their_errors_name_it(tiny_folder, tmp_path):
    (tmp_path / "keys").write_text(f"alice: {ALICE} max_runs=1 max_tokens=30\nbob: {BOB} max_disk_gb=0.00002\n")
    options = {"names": ["tiny"], "keys_file": str(tmp_path / "keys"), "durability": "written"}
    with servertools.running(tiny_folder, tmp_path / "out", **options) as server:
        alice, bob = Tenant(server.url, ALICE), Tenant(server.url, BOB)
        run = alice.run()
        # A second session counts for the same name, and another name has a quota of its own.
        second = Tenant(server.url, ALICE)
        asked = {"session_id": second.open(), "model_seq_id": 0, "base_model": "tiny"}
        assert (
            "1 training runs of alice are in memory, and its quota is max_runs=1"
            in second.result("create_model", asked)["error"]
        )
        other = bob.run()
        body = {"model_id": other, "seq_id": next(bob.numbers), "path": "one"}
        assert "error" not in bob.result("save_weights", body)
        refused = bob.result("save_weights", {**body, "seq_id": next(bob.numbers), "path": "two"})
        assert "checkpoints and logs of bob take" in refused["error"] and "its quota is max_disk_gb=2e-05" in refused["error"]
        # 24 tokens of a pass are pending while the worker is busy, and 24 more are above 30. A failed pass counts no longer.
        worker, release = server.service.host.worker, threading.Event()
        worker.submit(release.wait)
        numbers = [next(alice.numbers) for _ in range(3)]
        first = alice.post("forward_backward", passing(run, numbers[0], 1))["request_id"]
        too_many = alice.send("POST", "/api/v1/forward_backward", passing(run, numbers[1], 1))
        assert too_many.status_code == 429 and "24 tokens of alice are pending, and 24 more exceed its quota" in too_many.text
        # Accepted: a later request waits for it.
        alice.post("optim_step", {"model_id": run, "seq_id": numbers[2], "adam_params": {"learning_rate": 0.01}})
        last = alice.post("forward_backward", passing(run, numbers[1], 1))["request_id"]
        release.set()
        for request in (first, last):
            assert alice.send("POST", "/api/v1/retrieve_future", {"request_id": request}).status_code == 200
        session = server.service.sessions[alice.session]
        assert (session.training_tokens, session.pending_tokens) == (0, 0)
        base = {"session_id": alice.session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler = alice.post("create_sampling_session", base)["sampling_session_id"]
        release.clear()
        worker.submit(release.wait)
        alice.post("asample", sample(sampler, 1, num_samples=20))
        assert alice.send("POST", "/api/v1/asample", sample(sampler, 2)).status_code == 429
        release.set()


# ---- restarts and changes of the keys --------------------------------------------------------------------------------


@pytest.mark.slow
def test_owners_survive_a_restart_and_the_rotation_of_keys(tiny_folder, tmp_path, caplog):
    file, out = tmp_path / "keys", tmp_path / "out"
    file.write_text(KEYS)
    options = {"names": ["tiny"], "keys_file": str(file), "durability": "written"}
    with servertools.running(tiny_folder, out, **options) as server:
        alice, bob = Tenant(server.url, ALICE), Tenant(server.url, BOB)
        run = alice.run()
        alice.result("save_weights", {"model_id": run, "seq_id": next(alice.numbers), "path": "one"})
    assert not [path for path in out.rglob("*") if path.is_file() and ALICE.encode() in path.read_bytes()]
    with servertools.running(tiny_folder, out, **options) as server:
        alice, bob, root, new = (Tenant(server.url, key) for key in (ALICE, BOB, ROOT, "tml-new"))

        def statuses() -> list[int]:
            """Of the run and of its checkpoint, for each tenant."""
            asked = {"model_id": run}, {"tinker_path": f"tinker://{run}/weights/one"}
            paths = "/api/v1/get_info", "/api/v1/weights_info"
            seen = [{one.send("POST", *pair).status_code for pair in zip(paths, asked, strict=True)} for one in tenants]
            return [status for one in seen for status in one]

        tenants = alice, bob, root, new
        assert statuses() == [200, 404, 200, 401]
        file.write_text(KEYS + "alice: tml-new\n")
        assert statuses() == [200, 404, 200, 200]
        file.write_text(KEYS.replace(ALICE, "tml-new"))
        assert statuses() == [401, 404, 200, 200]
        # A mistake in the file does not change the keys, and the warning shows no key.
        file.write_text("alice: tml-new owner\n")
        assert statuses() == statuses() == [401, 404, 200, 200]
        (warning,) = [record.getMessage() for record in caplog.records if "keys_file" in record.getMessage()]
        assert ":1: invalid option of alice; choose from admin" in warning and "tml-new" not in warning
        file.unlink()
        assert statuses() == [401, 404, 200, 200]


@pytest.mark.parametrize(("text", "statuses"), [(f"{ALICE}\n", [200, 401, 401]), (KEYS, [404, 404, 200])])
def test_a_session_without_an_owner_belongs_to_the_only_key_or_to_admins(text, statuses, tiny_folder, tmp_path, monkeypatch):
    monkeypatch.delenv("COOKBOOK_API_KEYS", raising=False)
    with servertools.running(tiny_folder, tmp_path / "out", names=["tiny"], durability="written") as server:
        session = Tenant(server.url, None).open()
    (tmp_path / "keys").write_text(text)
    with servertools.running(tiny_folder, tmp_path / "out", names=["tiny"], keys_file=str(tmp_path / "keys")) as server:
        body = {"session_id": session}
        seen = [
            Tenant(server.url, key).send("POST", "/api/v1/session_heartbeat", body).status_code for key in (ALICE, BOB, ROOT)
        ]
        assert seen == statuses


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("two words\n", r"keys:1: invalid line; write KEY, or NAME: KEY"),
        ("a: tml-1 max_runs=many", r"keys:1: invalid option of a; choose from admin, max_runs=NUMBER"),
        ("a: tml-1\nb: tml-1", "a and b have the same key; replace one"),
        ("a: tml-1 admin\na: tml-2", "the keys of a have different options; repeat the same ones"),
        ("# nothing\n", "contains no key; write one key per line"),
    ],
)
def test_a_mistake_in_the_file_of_keys(text, problem, tmp_path):
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError, match=problem) as error:
        KeyRing(tmp_path / "keys")
    assert "tml-" not in str(error.value)


# ---- other machines --------------------------------------------------------------------------------------------------

# Programs of users, with the unmodified client: the facts of the model that it receives, and its tokenizer.
CONNECT = """
import sys, tinker
service = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
sampler = service.create_sampling_client(base_model="tiny").result()
print(sampler.get_base_model())
"""
LOAD = """
training = service.create_lora_training_client("tiny", rank=2).result()
print(training.get_info())
print([one.get_tokenizer()("35+27=").input_ids for one in (training, sampler)])
"""


CERTIFICATE = (
    "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 "
    # The client refuses a certificate that may sign others, which is the default of -x509.
    "-addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=critical,CA:FALSE"
)


def program(text: str, url: str, key: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in an empty folder, with an empty cache."""
    here = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    folder.mkdir()
    return subprocess.run(
        [sys.executable, "-c", text, url, key],
        cwd=folder,
        env={**here, "HF_HOME": str(folder / "cache"), "HF_ENDPOINT": f"{url}/hub", "TINKER_TELEMETRY": "0", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_client_without_the_folder_of_the_model_gets_its_tokenizer(server, tmp_path):
    told = program(CONNECT + LOAD, server.url, ALICE, tmp_path / "elsewhere", HF_TOKEN=ALICE)
    assert told.returncode == 0, told.stderr
    ids = tiny.tokenizer()("35+27=").input_ids
    assert told.stdout.endswith(f"{[ids, ids]}\n") and "model_name='cookbook/tiny'" in told.stdout
    assert "pytest-of" not in told.stdout


def test_files_of_the_hub_are_those_of_the_tokenizer_without_paths(server, tiny_folder):
    alice = Tenant(server.url, ALICE)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert alice.send("GET", f"/hub/cookbook/tiny/resolve/main/{name}").content == (tiny_folder / name).read_bytes()
    text = (tiny_folder / "config.json").read_text()
    (tiny_folder / "config.json").write_text(json.dumps({**json.loads(text), "_name_or_path": str(tiny_folder)}))
    try:
        assert alice.send("GET", "/hub/cookbook/tiny/resolve/main/config.json").json() == json.loads(text)
    finally:
        (tiny_folder / "config.json").write_text(text)
    for place in ("cookbook/tiny/resolve/main/model.safetensors", "other/tiny/resolve/main/tokenizer.json"):
        assert alice.send("GET", f"/hub/{place}").status_code == 404


def test_the_log_of_requests_is_private_and_has_no_addresses_of_downloads(server, tmp_path, monkeypatch):
    file = tmp_path / "requests.jsonl"
    file.touch(0o644)
    monkeypatch.setattr(metrics, "LOG", logging.Logger("alone"))
    metrics.log_to(file)
    HTTP.get(f"{server.url}/api/v1/download/claim~signature/adapter_config.json")
    HTTP.get(f"{server.url}/api/v1/healthz")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    # The line is written after the response. Events of earlier tests may be among the lines.
    wait_until(lambda: "/api/v1/healthz" in file.read_text())
    assert '"/api/v1/download/***/adapter_config.json"' in file.read_text() and "signature" not in file.read_text()


@pytest.mark.slow
def test_a_server_with_a_certificate_speaks_https(tiny_folder, tmp_path):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [*CERTIFICATE.split(), "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )
    server = servertools.Mortal()
    try:
        server.start(tiny_folder, tmp_path / "out", tls_cert=str(certificate), tls_key=str(key))
        url = server.url.replace("http:", "https:")
        trusting = ssl.create_default_context(cafile=str(certificate))
        assert httpx.get(f"{url}/api/v1/healthz", verify=trusting, timeout=WAIT_S).status_code == 200
        for wrong in (url, server.url):
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{wrong}/api/v1/healthz", timeout=WAIT_S)
        told = program(CONNECT, url, ALICE, tmp_path / "client", SSL_CERT_FILE=str(certificate))
        assert (told.returncode, told.stdout) == (0, "tiny\n"), told.stderr
    finally:
        server.close()


def test_mistakes_in_the_certificate():
    with pytest.raises(ConfigError, match=r"server.tls_key: not set; set server.tls_cert and server.tls_key"):
        ServerConfig(tls_cert="cert.pem")
    with pytest.raises(ConfigError, match=r"server.tls_cert: cannot load 'cert.pem' with the key 'key.pem': No such file"):
        ServerConfig(tls_cert="cert.pem", tls_key="key.pem").check_tls()
