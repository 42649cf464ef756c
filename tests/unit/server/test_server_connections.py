"""Connections and bodies of clients that send nothing, or slowly: other clients are answered; memory and files are bounded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import resource
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest
import servertools
import uvicorn
from preloaded import COMMAND, Forked
from waiting import WAIT_S, until

from cookbook.server import connections
from cookbook.server.state import uploads

NUM_IDLE, MAX_FILES = 1100, 1024
MB = 1_000_000


def connected(port):
    return socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)


def closed(client):
    """Whether the server has closed the connection."""
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


# ---- connections -----------------------------------------------------------------------------------------------------


@pytest.fixture
def listening(monkeypatch):
    """``listening(limit, app)``: the port of a server of ``connections.BoundedConnection``, which calls ``app``."""
    monkeypatch.setattr(connections, "IDLE_S", 0.5)
    with contextlib.ExitStack() as ends:

        def start(limit, app):
            listener = ends.enter_context(socket.create_server(("127.0.0.1", 0)))
            http = lambda *args, **options: connections.BoundedConnection(*args, limit=limit, **options)  # noqa: E731
            server = uvicorn.Server(uvicorn.Config(app, http=http, log_level="error", lifespan="off"))
            thread = threading.Thread(target=server.run, args=([listener],))
            thread.start()
            ends.callback(thread.join)
            ends.callback(setattr, server, "should_exit", True)
            servertools.wait_until(lambda: server.started)
            return listener.getsockname()[1]

        yield start


GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def answer(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.slow
def test_a_connection_without_a_request_is_closed_also_if_its_header_arrives_slowly(listening):
    port = listening(100, answer)
    with connected(port) as silent, connected(port) as slow, connected(port) as slow_again:
        slow_again.sendall(GET)
        assert b"200" in slow_again.recv(1000)
        for client in (slow, slow_again):
            client.sendall(GET[:-4] + b"\r\n")

        def all_closed():
            for client in (slow, slow_again):
                client.setblocking(True)
                with contextlib.suppress(OSError):
                    client.sendall(b"x: y\r\n")
            return closed(silent) and closed(slow) and closed(slow_again)

        until(all_closed)


def test_a_header_without_an_end_closes_its_connection_and_a_long_body_does_not(listening, monkeypatch):
    monkeypatch.setattr(connections, "IDLE_S", 500.0)

    async def app(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        await answer(scope, receive, send)

    port = listening(100, app)
    chunked = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"
    # A header, one line of a trailer, many lines of a trailer, and an extension of a chunk.
    for first, rest in ((GET[:-4], b"y"), (chunked + b"x: ", b"y"), (chunked, b"x: y\r\n"), (chunked[:-2] + b";", b"y")):
        with connected(port) as endless:
            sent = endless.send(first)
            with pytest.raises(OSError, match=r"reset|Broken"):
                while sent < 50 * MB:
                    endless.sendall(rest * ((1 << 20) // len(rest)))
                    sent += 1 << 20
    body = bytes(4 * MB)
    post = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with connected(port) as busy, busy.makefile("rb") as answers:
        # The next header begins in a read that is longer than a header may be.
        for part in (post + body + post[:20], post[20:] + body):
            busy.sendall(part)
            # Header and body of an answer may arrive separately.
            assert b"200" in b"".join(iter(answers.readline, b"\r\n")) and answers.read(2) == b"ok"


@pytest.mark.slow
def test_a_response_that_its_client_does_not_read_is_dropped_and_a_slow_computation_is_not(listening):
    began, go_on = threading.Event(), threading.Event()

    async def app(scope, receive, send):
        if scope["path"] == "/slow":
            began.set()
            await asyncio.to_thread(go_on.wait, WAIT_S)
            await answer(scope, receive, send)
        else:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": bytes(50 * MB)})

    port = listening(100, app)
    with connected(port) as unread, connected(port) as slow:
        slow.sendall(GET.replace(b"/ ", b"/slow ", 1))
        unread.sendall(GET)
        assert began.wait(WAIT_S)
        # Enough for its connection to be closed if it counted as idle.
        time.sleep(1.5)
        go_on.set()
        assert b"200" in slow.recv(1000)
        unread.settimeout(WAIT_S)
        with contextlib.suppress(ConnectionResetError):
            size = 0
            while part := unread.recv(1 << 20):
                size += len(part)
            assert size < 50 * MB


@pytest.mark.slow
def test_idle_connections_give_way_to_new_ones_and_busy_ones_do_not(listening, monkeypatch, caplog):
    monkeypatch.setattr(connections.BoundedConnection, "_above_limit", connections.Repeats())
    monkeypatch.setattr(connections, "IDLE_S", 500.0)
    go_on, begun = threading.Event(), []

    async def app(scope, receive, send):
        begun.append(scope)
        await asyncio.to_thread(go_on.wait, WAIT_S)
        await answer(scope, receive, send)

    port = listening(3, app)
    with contextlib.ExitStack() as ends:
        clients = [ends.enter_context(connected(port)) for _ in range(3)]
        for client in clients[1:]:
            client.sendall(GET)
        until(lambda: len(begun) == 2)
        newest = ends.enter_context(connected(port))
        newest.sendall(GET)
        servertools.wait_until(lambda: closed(clients[0]))
        until(lambda: len(begun) == 3)
        refused = ends.enter_context(connected(port))
        servertools.wait_until(lambda: closed(refused))
        go_on.set()
        for client in (*clients[1:], newest):
            client.settimeout(WAIT_S)
            assert b"200" in client.recv(1000)
    # Two connections were above the limit, and the log says it once.
    assert caplog.messages == ["more than 3 connections: those without a request are closed; raise server.max_connections"]


def test_a_key_with_many_connections_closes_its_own_for_those_of_another_key(listening, monkeypatch):
    """All connections have a request. Without the rule, the connection of the other key is closed."""
    monkeypatch.setattr(connections, "IDLE_S", 500.0)
    go_on, begun = threading.Event(), []

    async def app(scope, receive, send):
        scope[connections.CONNECTION].owner = dict(scope["headers"])[b"x-api-key"].decode()
        begun.append(scope)
        await asyncio.to_thread(go_on.wait, WAIT_S)
        await answer(scope, receive, send)

    port = listening(3, app)
    with contextlib.ExitStack() as ends:
        crowd = [ends.enter_context(connected(port)) for _ in range(3)]
        for number, client in enumerate(crowd, 1):
            client.sendall(GET.replace(b"\r\n\r\n", b"\r\nX-API-Key: crowd\r\n\r\n"))
            until(lambda number=number: len(begun) == number)
        single = ends.enter_context(connected(port))
        until(lambda: closed(crowd[-1]))
        single.sendall(GET.replace(b"\r\n\r\n", b"\r\nX-API-Key: single\r\n\r\n"))
        until(lambda: len(begun) == 4)
        go_on.set()
        for client in (*crowd[:2], single):
            client.settimeout(WAIT_S)
            assert b"200" in client.recv(1000)


@pytest.mark.slow
def test_more_idle_connections_than_the_server_may_open_files_keep_no_client_out(tiny_folder, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < NUM_IDLE + 200:
        pytest.skip("this process may not open as many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, NUM_IDLE + 200), hard))
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({MAX_FILES}, {MAX_FILES})); {COMMAND}"
    words = ["serve", f"model.name={tiny_folder}", "server.port=0", "out=out"]
    with (
        Forked(*words, code=limited, cwd=tmp_path, errors="inherited") as server,
        contextlib.ExitStack() as ends,
    ):
        ends.callback(server.kill)
        url = re.search(r"http://127.0.0.1:(\d+)", server.stdout.readline())
        for _ in range(NUM_IDLE):
            ends.enter_context(connected(int(url[1])))
        for _ in range(20):
            created = httpx.post(f"{url[0]}/api/v1/create_session", json={}, timeout=WAIT_S)
            assert created.status_code == 200, created.text
        assert len(list(Path(f"/proc/{server.pid}/fd").iterdir())) < MAX_FILES - 200
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_warnings_that_clients_cause_repeatedly_are_counted(monkeypatch, caplog):
    """Invalid requests, and one that upgrades to a protocol that the server does not speak."""

    async def attack():
        configured = uvicorn.Config(answer, log_config=None, ws="none", lifespan="off")
        configured.load()
        state, upgrade = uvicorn.server.ServerState(), b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        loop = asyncio.get_running_loop()
        make = lambda: connections.BoundedConnection(configured, state, {}, limit=100)  # noqa: E731
        async with await loop.create_server(make, "127.0.0.1", 0) as listener:
            for sent in (*[b"?\r\n\r\n"] * 20, upgrade):
                reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
                writer.write(sent)
                assert b"HTTP/1.1" in await reader.read(100)
                writer.close()

    monkeypatch.setattr(connections, "_WARNINGS", connections._RepeatedWarnings())
    logger = logging.getLogger("uvicorn.error")
    monkeypatch.setattr(logger, "filters", [])
    # Whatever a server of an earlier test has configured.
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "level", logging.INFO)
    asyncio.run(attack())
    invalid, upgrade, websockets = caplog.messages
    assert invalid == "Invalid HTTP request received." and upgrade == "Unsupported upgrade request."
    assert websockets.startswith("No supported WebSocket library")
    monkeypatch.setattr(connections, "WARN_EVERY_S", 0.0)
    asyncio.run(attack())
    counted = "Invalid HTTP request received. (20 times since the last such line)"
    assert caplog.messages[3:5] == [counted, invalid]
    # Errors of the server are not counted but printed.
    for _ in range(2):
        logger.error("broken")
    assert caplog.messages[-2:] == ["broken"] * 2


@pytest.mark.slow
def test_invalid_requests_fill_no_log(tiny_folder, tmp_path):
    with Forked("serve", f"model.name={tiny_folder}", "server.port=0", "out=out", cwd=tmp_path) as server:
        try:
            port = int(re.search(r"http://127.0.0.1:(\d+)", server.stdout.readline())[1])
            for _ in range(50):
                with connected(port) as client:
                    client.sendall(b"?\r\n\r\n")
                    assert b"400 Bad Request" in client.recv(1000)
        finally:
            server.kill()
        assert server.stderr.read().count("Invalid HTTP request received") == 1


def test_the_limit_of_connections_leaves_files_for_everything_else(monkeypatch, caplog):
    for limits, expected, raised in (
        ((1024, 1024), 512, None),
        ((1024, 1 << 20), 4096, 5120),
        ((1 << 20, 1 << 20), 4096, None),
        ((resource.RLIM_INFINITY,) * 2, 4096, None),
    ):
        seen = []
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        monkeypatch.setattr(resource, "setrlimit", lambda _, new, seen=seen: seen.append(new[0]))
        assert connections.fit_connections(4096) == expected
        assert seen == ([] if raised is None else [raised])
    # Only the first limit is too low, and the log warns.
    assert len(caplog.messages) == 1 and "512 connections fit" in caplog.text


# ---- uploads ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def uploading(server, num_bytes, length):
    """A request of ``length`` bytes of which only ``num_bytes`` are sent."""
    with connected(int(server.url.rpartition(":")[2])) as client:
        host = "Host: 127.0.0.1\r\nContent-Type: application/json"
        head = f"POST /api/v1/forward_backward HTTP/1.1\r\n{host}\r\nContent-Length: {length}\r\n\r\n"
        client.sendall(head.encode() + b" " * num_bytes)
        yield client


@pytest.mark.slow
def test_incomplete_uploads_are_pending_bytes_with_a_bound_and_a_time_limit(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(uploads, "SMALL_BYTES", 1000)
    with servertools.running(
        tiny_folder, tmp_path, names=["tiny"], max_request_mb=8, max_pending_mb=16, upload_timeout_s=4
    ) as server:
        held = server.service.uploads
        with contextlib.ExitStack() as ends:
            clients = [ends.enter_context(uploading(server, 5 * MB, 6 * MB)) for _ in range(3)]
            servertools.wait_until(lambda: held.num_bytes == 15 * MB)
            pending = re.search(r"\ncookbook_pending_bytes (\d+)", httpx.get(f"{server.url}/metrics", timeout=WAIT_S).text)
            assert int(pending[1]) == 15 * MB
            small = ends.enter_context(uploading(server, 900, 1000))
            servertools.wait_until(lambda: held.num_bytes == 15 * MB + 900)
            clients.append(ends.enter_context(uploading(server, 5 * MB, 6 * MB)))
            # The first one gives way.
            answer = clients[0].recv(1000)
            assert b" 429 " in answer and b"max_pending_mb" in clients[0].recv(1000) + answer
            assert httpx.post(f"{server.url}/api/v1/create_session", json={}, timeout=WAIT_S).status_code == 200
            for client in (*clients[1:], small):
                answer = client.recv(1000)
                assert b" 408 " in answer and b"upload_timeout_s" in client.recv(1000) + answer
        assert held.num_bytes == 0 == server.service.requests.pending_bytes
        with uploading(server, 5 * MB, 6 * MB):
            servertools.wait_until(lambda: held.num_bytes == 5 * MB)
        # A client that is gone holds nothing.
        servertools.wait_until(lambda: held.num_bytes == 0)
