"""Weights & Biases without a login or a network: the run is recorded offline, and never refused or delayed."""

import http.server
import socket
import threading
from types import SimpleNamespace

import pytest

from cookbook.trackers.wandb import START_S, WandbTracker
from cookbook.utils import reachable


def recorded_offline(tmp_path):
    """Return what wandb.init returns offline."""
    settings = SimpleNamespace(mode="offline")
    return SimpleNamespace(id="abc", url=None, settings=settings, dir=str(tmp_path / "wandb" / "offline-run-1" / "files"))


def warning(caplog):
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    return record.getMessage()


def test_a_refused_login_is_recorded_offline(monkeypatch, tmp_path, caplog, capsys):
    wandb = pytest.importorskip("wandb", reason="wandb is an extra")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(reachable, "no_answer", lambda url: None)
    calls = []

    def init(**options):
        calls.append((options["mode"], options["settings"].init_timeout))
        if options["mode"] != "offline":
            raise wandb.errors.AuthenticationError("no API key configured\nsecond line")
        return recorded_offline(tmp_path)

    monkeypatch.setattr(wandb, "init", init)
    WandbTracker().start({}, str(tmp_path), "mine", 0)
    assert calls == [(None, START_S), ("offline", START_S)]
    line = "tracker wandb: no API key configured; the run is recorded offline; log in with `wandb login`"
    assert warning(caplog) == line
    assert f"upload this run with: wandb sync {tmp_path}/wandb/offline-run-1\n" in capsys.readouterr().out


def test_an_unreachable_server_costs_seconds_and_is_named_once(monkeypatch, tmp_path, caplog):
    wandb = pytest.importorskip("wandb", reason="wandb is an extra")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:1")
    modes = []

    def init(**options):
        modes.append(options["mode"])
        return recorded_offline(tmp_path)

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "setup", lambda: SimpleNamespace(settings=SimpleNamespace(base_url="http://127.0.0.1:1")))
    WandbTracker().start({}, str(tmp_path), "mine", 0)
    # The client itself, which would retry, was never asked to reach the server.
    assert modes == ["offline"]
    assert warning(caplog) == (
        "tracker wandb: http://127.0.0.1:1/ does not answer: Connection refused; the run is recorded offline; check the "
        "network and WANDB_BASE_URL"
    )


@pytest.fixture
def server():
    """A function that starts a server with one answer to everything, and returns its URL."""
    servers = []

    def start(status):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self):
                self.send_response(status)
                self.send_header("Location", "http://127.0.0.1:1/login")
                self.end_headers()

            def log_message(self, *_):
                pass

        one = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=one.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(one)
        return f"http://user:secret@127.0.0.1:{one.server_port}/path"

    yield start
    for one in servers:
        one.shutdown()
        one.server_close()


@pytest.mark.parametrize("status", [200, 302, 401, 404, 500])
def test_any_answer_of_the_server_counts(server, status):
    assert reachable.no_answer(server(status)) is None


def test_the_error_of_a_proxy_is_no_answer_of_the_server(server, monkeypatch):
    url = server(503)
    reason = reachable.no_answer(url)
    assert reason.endswith("/ does not answer: its gateway or proxy returned HTTP 503") and "secret" not in reason
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:1")
    assert reachable.no_answer(url) is None


def test_a_silent_server_and_a_name_that_does_not_resolve_cost_a_limited_time(monkeypatch):
    monkeypatch.setattr(reachable, "ANSWER_S", 0.05)
    monkeypatch.setattr(reachable, "RESOLVE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        assert reachable.no_answer(address) == f"{address} does not answer in 0.05 s"
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [released.wait(60)][:0])
    assert reachable.no_answer("http://slow.invalid") == "http://slow.invalid/ does not answer in 0.1 s"
    released.set()
