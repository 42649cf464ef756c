"""Clients that were silent: their sessions leave memory, and they find them again, bit for bit."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest
import servertools
from places import ROOT
from servertools import wait_until
from sessions import Client, be_silent, equal, passing, stepping, weights
from waiting import WAIT_S

from cookbook.server import app
from cookbook.server.handlers import recovery, silence
from cookbook.server.state import countdown
from cookbook.server.state.countdown import Countdown

tinker = pytest.importorskip("tinker")


class Returning(Client):
    """Repeats what is refused for now, as the client package does, and sends no heartbeat."""

    def send(self, path, body):
        while (response := super().send(path, body)).status_code == 429:
            time.sleep(0.02)
        return response


@pytest.fixture
def start(tiny_folder, tmp_path):
    def start(name="out", **options):
        return servertools.running(tiny_folder, tmp_path / name, names=["tiny"], **options)

    return start


def played(server, silences):
    """Results of a run and a sampler, with a silence after each request whose number is in ``silences``."""
    client, seen = Returning(server), []
    run = client.run()
    body = {"model_id": run, "seq_id": 3, "sampling_session_seq_id": 1}
    for number, (path, asked) in enumerate(
        [
            ("forward_backward", passing(run, 1, 1)),
            ("optim_step", stepping(run, 2)),
            ("save_weights_for_sampler", body),
            ("forward_backward", passing(run, 4, 4)),
            ("forward_backward", passing(run, 5, 5)),
            ("optim_step", stepping(run, 6)),
        ],
        1,
    ):
        promise = client.post(path, asked)
        # Every second silence begins before the result is fetched, and while it may still be computed.
        if number in silences and number % 2:
            be_silent(server, client.session)
        seen.append(client.fetch(promise["request_id"]).content)
        if number in silences and not number % 2:
            be_silent(server, client.session)
        if number >= 3:
            seen.append(client.sample(json.loads(seen[2])["sampling_session_id"], number))
    # A sampler answers before the run is restored; a pass of the run comes after its last optimizer step.
    seen.append(client.fetch(client.post("forward_backward", passing(run, 7, 7))["request_id"]).content)
    return [one.replace(client.session.encode(), b"session") for one in seen], weights(server, run)


@pytest.mark.slow
def test_a_silent_run_is_unloaded_and_continues_bit_for_bit(start):
    with start("calm") as server:
        expected, state = played(server, ())
    with start("silent") as server:
        seen, after = played(server, (1, 2, 4, 5, 6))
    assert seen == expected and equal(state, after)


@pytest.mark.slow
def test_samples_under_way_are_computed_when_the_client_returns(start):
    with start() as server:
        client = Returning(server)
        asked = {"session_id": client.session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler = client.post("create_sampling_session", asked)["sampling_session_id"]
        params = {"max_tokens": 80, "stop": [], "seed": 1}
        body = {"sampling_session_id": sampler, "num_samples": 200, "sampling_params": params}
        body["prompt"] = {"chunks": [{"tokens": [5, 6, 7]}]}
        promise = client.post("asample", {**body, "seq_id": 1})
        be_silent(server, client.session)
        result = client.fetch(promise["request_id"]).content
        assert result == client.result("asample", {**body, "seq_id": 2})


def test_a_client_that_waits_for_a_result_is_not_silent_and_its_wait_outlives_a_silence(start, endless):
    with start() as server:
        client, service = Returning(server), server.service
        asked = {"session_id": client.session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler = client.post("create_sampling_session", asked)["sampling_session_id"]
        body = {"sampling_session_id": sampler, "num_samples": 60, "sampling_params": {"max_tokens": 2, "seed": 1}, "seq_id": 1}
        request_id = client.post("asample", {**body, "prompt": {"chunks": [{"tokens": [5, 6, 7]}]}})["request_id"]
        (request,) = service.requests.unsettled()
        service.sessions[client.session].last_seen -= 100
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(client.fetch, request_id)
            wait_until(lambda: service.sessions[client.session].last_seen > time.monotonic() - 50)
            # The client waits, and its computer sleeps.
            service.sessions[client.session].last_seen -= service.config.session_timeout_s
            server.call(lambda: silence.unload_silent_sessions(service))
            wait_until(request.settled.is_set)
            endless.set()
            assert waiting.result(WAIT_S).headers["content-type"] == "application/x-protobuf"


def test_a_silent_session_is_kept_for_its_time_and_then_named(start):
    with start(session_timeout_s=40) as server:
        client = Returning(server)
        run, service = client.run(), server.service
        be_silent(server, client.session)
        folder = service.durability.session_folder(client.session)
        service.silent[client.session] -= 3600 * (service.config.keep_silent_h - 1)
        server.call(lambda: silence.unload_silent_sessions(service))
        assert folder.exists()
        service.silent[client.session] -= 3601
        server.call(lambda: silence.unload_silent_sessions(service))
        assert not folder.exists()
        for path, body in (("optim_step", stepping(run, 1)), ("session_heartbeat", {"session_id": client.session})):
            refused = client.send(path, body)
            assert refused.status_code == 404 and "silent for server.keep_silent_h=168 hours" in refused.text


def test_a_silent_session_can_be_ended(start):
    with start() as server:
        client = Returning(server)
        client.run()
        be_silent(server, client.session)
        assert client.send(f"sessions/{client.session}/finish", {}).status_code == 204
        assert not server.service.silent and not server.service.durability.session_folder(client.session).exists()


def test_an_error_of_a_session_that_moves_is_logged_and_its_client_does_not_retry_forever(start, monkeypatch, caplog):
    def rotate():
        raise OSError("the disk cannot sync")

    def fail(*_):
        raise RuntimeError("a bug")

    with start() as server:
        client, service = Returning(server), server.service
        run = client.run()
        monkeypatch.setattr(service.sessions[client.session].log, "rotate", rotate)
        be_silent(server, client.session)
        wait_until(lambda: "a task of the server has failed" in caplog.text and "the disk cannot sync" in caplog.text)
        client.post("session_heartbeat", {"session_id": client.session})
        be_silent(server, client.session)
        monkeypatch.setattr(recovery, "_replay", fail)
        wait_until(lambda: Client.send(client, "optim_step", stepping(run, 1)).status_code == 404)
        assert "a bug" in service.ended[client.session]
        assert not service.sessions and not service.runs and not service.snapshots


@pytest.mark.slow
def test_without_a_log_silent_runs_are_saved_and_the_client_is_told_where(start):
    with start(durability="off") as server:
        client = Returning(server)
        run, service = client.run(), server.service
        client.result("forward_backward", passing(run, 1))
        client.result("optim_step", stepping(run, 2))
        state = weights(server, run)
        service.sessions[client.session].last_seen -= service.config.session_timeout_s
        server.call(lambda: silence.unload_silent_sessions(service))
        wait_until(lambda: not service.sessions)
        refused = client.send("optim_step", stepping(run, 3)).json()["detail"]
        assert "server.session_timeout_s=600 seconds" in refused and f"tinker://{run}/weights/silent" in refused
        other = Returning(server)
        asked = {"session_id": other.session, "model_seq_id": 0, "path": f"tinker://{run}/weights/silent", "optimizer": True}
        again = json.loads(other.result("load_weights", asked))["model_id"]
        assert equal(state, weights(server, again))


# ---- a server that was stopped itself --------------------------------------------------------------------------------


@pytest.mark.slow
def test_clients_get_their_full_time_again_after_a_stop_of_the_server(start, monkeypatch):
    """The stop is a blocked event loop: the server reads nothing while its clock runs, as after SIGSTOP."""
    monkeypatch.setattr(app, "CLEANUP_S", 0.02)
    monkeypatch.setattr(app, "STOPPED_S", 0.5)
    with start() as server:
        client, service = Returning(server), server.service

        def stop():
            service.sessions[client.session].last_seen -= service.config.session_timeout_s - 0.8
            time.sleep(1.5)

        server.call(stop)
        server.call(lambda: asyncio.sleep(0.2))
        assert client.session in service.sessions
        assert service.sessions[client.session].last_seen > time.monotonic() - 60


@pytest.mark.nightly
def test_a_process_that_was_stopped_by_a_signal_keeps_its_clients(tiny_folder, tmp_path):
    """SIGSTOP for longer than a session may be silent."""
    options = ["server.port=0", "server.names=[tiny]", "server.session_timeout_s=30", "out=out"]
    command = [sys.executable, "-m", "cookbook", "serve", f"model.name={tiny_folder}", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = re.search(r"http://127.0.0.1:\d+", server.stdout.readline())[0]
            with tinker.ServiceClient(base_url=url, api_key="tml-any") as service:
                training = service.create_lora_training_client("tiny", rank=2).result()
                training.save_state("before").result()
                server.send_signal(signal.SIGSTOP)
                time.sleep(40)
                server.send_signal(signal.SIGCONT)
                # The cleanup runs several times.
                time.sleep(3)
                metrics = httpx.get(f"{url}/metrics", timeout=WAIT_S).text
                assert "\ncookbook_silent_sessions 0\n" in metrics and "\ncookbook_training_runs 1\n" in metrics
                training.save_state("after").result()
        finally:
            server.kill()


class Clock:
    """The event loop of a countdown, whose time the test sets."""

    def __init__(self):
        self.now, self.timers = 0.0, []

    def time(self):
        return self.now

    def call_later(self, delay_s, callback):
        timer = (self.now + delay_s, callback)
        self.timers.append(timer)
        return SimpleNamespace(cancel=lambda: self.timers.remove(timer))

    def stop_until(self, now):
        """Jump to a time. The timers until then are late."""
        self.now = now
        due = [timer for timer in self.timers if timer[0] <= now]
        self.timers = [timer for timer in self.timers if timer not in due]
        for _, callback in due:
            callback()

    def run_until(self, end):
        """Run every timer at its time."""
        while self.timers and (first := min(at for at, _ in self.timers)) <= end:
            self.stop_until(first)
        self.now = end


def test_a_countdown_starts_again_after_a_stop_of_the_server(monkeypatch):
    clock, fired = Clock(), []
    monkeypatch.setattr(countdown, "asyncio", SimpleNamespace(get_running_loop=lambda: clock))
    Countdown(3.5, lambda: fired.append("late"))
    Countdown(3.5, lambda: fired.append("never")).cancel()
    clock.run_until(3.0)
    clock.stop_until(63.0)
    assert fired == []
    clock.run_until(63.0 + 3.4)
    assert fired == []
    clock.run_until(63.0 + 3.5)
    assert fired == ["late"]
