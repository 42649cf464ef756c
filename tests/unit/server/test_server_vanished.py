"""Clients that vanish while they wait for samples: their sampling pauses, and a client that returns gets the same tokens."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import re
import subprocess
import sys
import threading
import weakref
from http.client import HTTPConnection
from urllib.parse import urlsplit

import httpx
import pytest
import servertools
from fairness import LARGE, Client, held, is_idle
from servertools import wait_until
from waiting import WAIT_S

from cookbook.backends.worker import Account, Worker
from cookbook.errors import BackendError, ConfigError
from cookbook.server.handlers import silence, training
from cookbook.server.routes import requests
from cookbook.server.serve import drain
from cookbook.server.state import presence
from cookbook.server.wire import messages_pb2 as pb

tinker = pytest.importorskip("tinker")


# ---- the worker ------------------------------------------------------------------------------------------------------


def test_a_paused_lane_keeps_its_jobs_and_starts_them_again(turns):
    """One job has begun, one waits, and one comes during the pause."""
    queue, order = turns
    worker = Worker(1)
    lane, other = worker.lane(Account()), worker.lane(Account())
    begun, go = threading.Event(), threading.Event()

    def job():
        order.append("begun")
        begun.set()
        yield
        go.wait(WAIT_S)
        yield
        order.append("done")

    jobs = [lane.submit_steps(job), queue(lane, "waiting", 1, 0.01)]
    assert begun.wait(WAIT_S)
    lane.pause()
    go.set()
    jobs.append(queue(lane, "late", 1, 0.01))
    queue(other, "other", 3, 0.01).result(WAIT_S)
    wait_until(lambda: not worker._schedule._ready)
    assert order == ["begun", *["other"] * 3] and not any(one.done() for one in jobs)
    lane.resume()
    for one in jobs:
        one.result(WAIT_S)
    worker.close()
    assert order[4:] == ["begun", "done", "waiting", "late"]


def test_a_lane_that_resumes_before_the_worker_noticed_its_pause_continues():
    worker = Worker(1)
    lane, steps, begun, go = worker.lane(Account()), itertools.count(), threading.Event(), threading.Event()

    def job():
        next(steps)
        begun.set()
        go.wait(WAIT_S)
        yield

    running = lane.submit_steps(job)
    assert begun.wait(WAIT_S)
    lane.pause()
    lane.resume()
    go.set()
    running.result(WAIT_S)
    worker.close()
    assert next(steps) == 1


def test_a_lane_that_resumes_while_its_job_is_dropped_starts_it_again():
    worker = Worker(1)
    lane, begun, go, dropped = worker.lane(Account()), threading.Event(), threading.Event(), []

    def job():
        begun.set()
        try:
            go.wait(WAIT_S)
            yield
        except GeneratorExit:
            dropped.append("once")
            lane.resume()
            raise

    running = lane.submit_steps(job)
    assert begun.wait(WAIT_S)
    lane.pause()
    go.set()
    running.result(WAIT_S)
    worker.close()
    assert dropped == ["once"]


def test_jobs_of_a_paused_lane_can_be_dropped():
    worker = Worker(1)
    for end, has_ended in (("drop", True), ("clear", False)):
        lane = worker.lane(Account())
        lane.pause()
        waiting = lane.submit(lambda: None)
        getattr(lane, end)()
        assert isinstance(waiting.exception(WAIT_S), BackendError)
        lane.resume()
        if not has_ended:
            assert lane.submit(lambda: "open").result(WAIT_S) == "open"
    worker.close()


@pytest.mark.parametrize("is_set_aside", [True, False])
@pytest.mark.parametrize("end", ["close", "drop_all", "close of the lane"])
def test_the_end_of_a_worker_settles_the_jobs_of_its_paused_lanes(end, is_set_aside):
    worker = Worker(1)
    lane, go = worker.lane(Account()), held(worker)
    waiting = lane.submit(lambda: "done")
    lane.pause()
    if is_set_aside:
        go.set()
        wait_until(lambda: not worker._schedule._ready)
    if end == "drop_all":
        worker.drop_all()
        go.set()
        assert isinstance(waiting.exception(WAIT_S), BackendError)
    else:
        # In a thread of its own, because without the repair it would wait forever.
        closing = threading.Thread(target=worker.close if end == "close" else lane.close, daemon=True)
        closing.start()
        if end == "close":
            wait_until(lambda: worker._schedule._closed)
            lane.pause()
        go.set()
        assert waiting.result(WAIT_S) == "done"
        closing.join(WAIT_S)
        assert not closing.is_alive()
    worker.close()


def test_a_job_that_is_dropped_while_the_pause_restarts_it_is_settled():
    worker = Worker(1)
    lane, begun, go = worker.lane(Account()), threading.Event(), threading.Event()

    def job():
        begun.set()
        try:
            go.wait(WAIT_S)
            yield
        finally:
            lane.clear()

    running = lane.submit_steps(job)
    assert begun.wait(WAIT_S)
    lane.pause()
    go.set()
    assert isinstance(running.exception(WAIT_S), BackendError)
    lane.resume()
    assert lane.submit(lambda: "open").result(WAIT_S) == "open"
    worker.close()


# ---- a server in a thread --------------------------------------------------------------------------------------------


@pytest.fixture
def server(tiny_folder, tmp_path):
    with servertools.running(tiny_folder, tmp_path, names=["tiny"]) as running:
        yield running


class Poll:
    """An open poll for a result, whose connection can be closed."""

    def __init__(self, server, path, body):
        presence = presence_of(server, body.get("request_id") or body["target"]["sampling_session_id"])
        before = presence._num_polls
        self._connection = HTTPConnection(urlsplit(server.url).netloc, timeout=WAIT_S)
        self._connection.request("POST", f"/api/v1/{path}", json.dumps(body))
        wait_until(lambda: presence._num_polls == before + 1)

    def close(self):
        self._connection.close()


def presence_of(server, object_id):
    return server.service.sessions[object_id.partition(":")[0]].presence


def vanish(server, client, answer):
    """The client closes the connection of its only poll. Returns when its sampling is paused."""
    poll = Poll(server, "retrieve_future", answer.json())
    wait_until(lambda: not is_idle(server))
    poll.close()
    wait_until(lambda: presence_of(server, client.session).is_paused and is_idle(server))
    assert server.service.sessions[client.session].queue.num_drawn == 0


@pytest.mark.parametrize("sign", ["poll", "feed", "heartbeat", "request", "cancellation"])
def test_the_next_request_of_a_client_draws_its_samples_from_the_start(server, endless, sign):
    client, other = Client(server.url), Client(server.url)
    answer = client.sample(60, seed=None)
    vanish(server, client, answer)
    assert other.result(other.sample()).status_code == 200 and presence_of(server, client.session).is_paused
    endless.set()
    if sign == "feed":
        body = {"target": {"sampling_session_id": client.sampler}}
        assert client.post("retrieve_futures", body).json()["completions"][0]["request_id"] == answer.json()["request_id"]
    elif sign == "heartbeat":
        client.post("session_heartbeat", {"session_id": client.session})
    elif sign == "request":
        client.sample()
    elif sign == "cancellation":
        client.post("cancel_future", {"request_id": f"{client.sampler}/99"})
    if sign != "poll":
        wait_until(lambda: not server.service.requests.unsettled())
    found = client.result(answer).content
    again = Client(server.url)
    assert found == again.result(again.sample(60, seed=None)).content
    assert not presence_of(server, client.session).is_paused


def test_a_client_that_has_another_poll_is_not_paused(server, endless):
    client = Client(server.url)
    answer, presence = client.sample(60), presence_of(server, client.session)
    presence.grace_s = 0.01
    feed = Poll(server, "retrieve_futures", {"target": {"sampling_session_id": client.sampler}})
    poll = Poll(server, "retrieve_future", answer.json())
    lost = []
    original = presence._end_grace
    presence._end_grace = lambda: lost.append(original())
    poll.close()
    wait_until(lambda: lost)
    assert not presence.is_paused and presence.grace_s == 0.01
    feed.close()
    wait_until(lambda: presence.is_paused)
    client.post("session_heartbeat", {"session_id": client.session})
    presence.grace_s = 100.0
    server.call(presence.lost)
    client.post(f"sessions/{client.session}/finish", {})
    assert presence._countdown is None


def test_a_request_after_the_closed_poll_postpones_the_pause_but_does_not_prevent_it(server, endless):
    """A client may be killed while a request of it is in the kernel of the server, which reads it after the poll has ended."""
    client = Client(server.url)
    answer, presence = client.sample(60), presence_of(server, client.session)
    presence.grace_s = 100.0
    Poll(server, "retrieve_future", answer.json()).close()
    wait_until(lambda: presence._countdown is not None)
    before = presence._countdown
    client.post("session_heartbeat", {"session_id": client.session})
    assert presence._countdown not in (None, before) and not presence.is_paused
    presence.grace_s = 0.01
    client.post("session_heartbeat", {"session_id": client.session})
    wait_until(lambda: presence.is_paused)


@pytest.mark.slow
def test_an_ordinary_client_that_polls_repeatedly_is_not_paused(server, endless, monkeypatch):
    """Polls end after their time, and one because a sampling client of the session ends while the other one waits."""
    monkeypatch.setattr(requests, "LONG_POLL_S", 0.05)
    counted = server.service.metrics.http_requests
    with tinker.ServiceClient(base_url=server.url, api_key="tml-any") as service:
        sampler, ending = (service.create_sampling_client(base_model="tiny").result() for _ in range(2))
        params = tinker.SamplingParams(max_tokens=4, stop=[], seed=7)
        asked = [one.sample(tinker.ModelInput.from_ints([5, 6, 7]), 60, params) for one in (sampler, ending)]
        wait_until(lambda: counted["/retrieve_futures", "200"] > 20)
        (session,) = server.service.sessions.values()
        lost, original = [], session.presence.lost
        session.presence.lost = lambda: lost.append(original())
        opened, poll = [], session.presence.poll

        def lengthen():
            """Each of the two clients opens one more poll, which lasts."""
            monkeypatch.setattr(requests, "LONG_POLL_S", 30.0)
            session.presence.poll = lambda: opened.append(None) or poll()

        server.call(lengthen)
        wait_until(lambda: len(opened) == 2)
        ending._futures_poller.close()
        wait_until(lambda: lost and session.presence._countdown is None)
        assert not session.presence.is_paused and session.presence.grace_s == presence.GRACE_S
        endless.set()
        tokens = [one.tokens for one in asked[0].result().sequences]
        assert tokens == [
            one.tokens for one in sampler.sample(tinker.ModelInput.from_ints([5, 6, 7]), 60, params).result().sequences
        ]


def test_work_of_the_server_is_no_sign_of_its_client(server, endless):
    """The training requests of a vanished client are carried out: one publishes weights."""
    client, service = Client(server.url), server.service
    asked = {"session_id": client.session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4, "seed": 1}}
    run = client.result(client.post("create_model", asked)).json()["model_id"]
    sample, go = client.sample(60), held(service.host.worker)
    step = client.post("optim_step", {"model_id": run, "seq_id": 1, "adam_params": {"learning_rate": 1e-2}})
    publish = client.post("save_weights_for_sampler", {"model_id": run, "seq_id": 2, "sampling_session_seq_id": 1})
    create = client.post("create_model", {**asked, "model_seq_id": 1})
    presence = presence_of(server, client.session)
    server.call(presence.lost)
    wait_until(lambda: presence.is_paused)
    go.set()
    wait_until(lambda: len(service.requests.unsettled()) == 1)
    assert presence.is_paused and service.runs[run].trainer.step == 1 and len(service.runs) == 2
    assert f"{client.session}:sample:0.2" in service.samplers
    endless.set()
    for answer in (step, publish, create):
        assert "error" not in client.result(answer).json()
    assert client.result(sample).headers["content-type"] == "application/x-protobuf"


def test_a_queued_request_that_begins_is_no_sign_of_its_client(server, endless):
    client, service = Client(server.url), server.service
    asked = {"session_id": client.session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4, "seed": 1}}
    run = client.result(client.post("create_model", asked)).json()["model_id"]
    saved = client.result(client.post("save_weights", {"model_id": run, "seq_id": 1, "path": "one"})).json()["path"]
    body = json.dumps({"model_id": run, "seq_id": 2, "path": saved, "optimizer": False}).encode()
    work = server.call(lambda: training.read(service, "load_weights", body)).work
    client.sample(60)
    presence = presence_of(server, client.session)
    server.call(presence.lost)
    wait_until(lambda: presence.is_paused)
    server.call(lambda: asyncio.wrap_future(work.begin(service.runs[run].trainer)))
    with pytest.raises(ConfigError, match="unknown custom loss"):
        server.call(lambda: training._custom_loss(service, pb.ForwardBackwardRequest(model_id=run), {"loss_id": "none"}))
    assert presence.is_paused


@pytest.mark.slow
def test_a_client_without_pending_samples_is_not_paused_and_one_that_returns_gets_more_time(server, endless):
    client = Client(server.url)
    presence, small = presence_of(server, client.session), client.sample()
    client.result(small)
    before, lost = presence.grace_s, []
    original = presence._end_grace
    presence._end_grace = lambda: lost.append(original())
    Poll(server, "retrieve_futures", {"target": {"sampling_session_id": client.sampler}, "prev_cursor": 1 << 60}).close()
    wait_until(lambda: lost)
    assert not presence.is_paused
    answer = client.sample(60)
    for number in range(2):
        vanish(server, client, answer)
        client.post("session_heartbeat", {"session_id": client.session})
        assert not presence.is_paused and presence.grace_s == before * 4 ** (number + 1)
    for _ in range(3):
        server.call(presence._end_grace)
        client.post("session_heartbeat", {"session_id": client.session})
    assert not presence.is_paused and presence.grace_s == 30.0


@pytest.mark.slow
def test_requests_of_a_batch_that_failed_alone_do_not_fail_again(server, endless):
    """One has a token that is not in the vocabulary; one is cancelled while the batch is paused."""
    client = Client(server.url)
    client.post("cookbook/batch", {"sampling_session_id": client.sampler, "count": 3})
    prompt = {"chunks": [{"tokens": [5, 9999]}]}
    body = {"sampling_session_id": client.sampler, "seq_id": next(client.count), "prompt": prompt}
    invalid = client.post("asample", {**body, "num_samples": 1, "sampling_params": {"max_tokens": 4}})
    cancelled, other = client.sample(2), client.sample(60, **LARGE)
    vanish(server, client, other)
    client.post("cancel_future", cancelled.json())
    vanish(server, client, other)
    endless.set()
    assert client.result(other).headers["content-type"] == "application/x-protobuf"
    assert "holds token 9999" in client.result(invalid).json()["error"]
    assert "cancelled" in client.result(cancelled).json()["error"]
    assert server.service.sessions[client.session].pending_tokens == 0


@pytest.mark.parametrize("end", ["finish", "silence"])
def test_a_paused_session_can_end_or_leave_memory(server, endless, end):
    client, service = Client(server.url), server.service
    answer = client.sample(60)
    vanish(server, client, answer)
    if end == "finish":
        assert client.post(f"sessions/{client.session}/finish", {}).status_code == 204
        assert client.post("retrieve_future", answer.json()).status_code == 404
    else:
        service.sessions[client.session].last_seen -= service.config.session_timeout_s
        server.call(lambda: silence.unload_silent_sessions(service))
        wait_until(lambda: not service.moving)
    assert not service.requests.unsettled() and not service.sessions and is_idle(server)
    if end == "silence":
        endless.set()
        while (found := client.post("retrieve_future", answer.json())).status_code == 429:
            pass
        again = Client(server.url)
        assert (found if b"try_again" not in found.content else client.result(answer)).content == again.result(
            again.sample(60)
        ).content


def test_an_ended_session_is_freed_without_the_garbage_collector(server):
    client = Client(server.url)
    client.result(client.sample())
    session = weakref.ref(server.service.sessions[client.session])
    gc.collect()
    gc.disable()
    try:
        client.post(f"sessions/{client.session}/finish", {})
        wait_until(lambda: session() is None)
    finally:
        gc.enable()


def test_a_shutdown_does_not_wait_for_paused_samples(server, endless):
    client = Client(server.url)
    answer = client.sample(60)
    vanish(server, client, answer)
    # The limit is longer than a test may take.
    server.call(lambda: drain(server.service, 1000))
    (unsettled,) = server.service.requests.unsettled()
    assert unsettled.request_id == answer.json()["request_id"]


def test_a_shutdown_does_not_wait_for_a_client_that_vanishes_during_it(server, endless):
    client = Client(server.url)
    answer = client.sample(60)
    poll = Poll(server, "retrieve_future", answer.json())
    wait_until(lambda: not is_idle(server))
    ending = asyncio.run_coroutine_threadsafe(drain(server.service, 1000), server.loop)
    wait_until(lambda: server.service.requests.closing)
    assert not ending.done()
    poll.close()
    ending.result(WAIT_S)
    (unsettled,) = server.service.requests.unsettled()
    assert unsettled.request_id == answer.json()["request_id"]


def test_paused_samples_count_towards_the_quota_of_their_key(tiny_folder, tmp_path, endless):
    (tmp_path / "keys").write_text("alice: tml-alice max_tokens=300\n")

    class Keyed(Client):
        def post(self, path, body):
            return httpx.post(f"{self.url}/api/v1/{path}", json=body, headers={"X-API-Key": "tml-alice"}, timeout=WAIT_S)

    options = {"names": ["tiny"], "keys_file": str(tmp_path / "keys")}
    with servertools.running(tiny_folder, tmp_path / "out", **options) as server:
        client, other = Keyed(server.url), Keyed(server.url)
        assert client.sample(60).status_code == 200
        refused = other.sample(60)
        assert refused.status_code == 429 and "max_tokens=300" in refused.text
        presence = presence_of(server, client.session)
        server.call(presence.lost)
        wait_until(lambda: presence.is_paused)
        assert other.sample(60).status_code == 429
        assert client.post(f"sessions/{client.session}/finish", {}).status_code == 204
        assert other.sample(60).status_code == 200


# ---- real processes --------------------------------------------------------------------------------------------------

PROGRAM = """
import sys, tinker
service = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-any")
sampler = service.create_sampling_client(base_model="tiny").result()
training = service.create_lora_training_client("tiny", rank=4, seed=1).result() if sys.argv[2] == "training" else None
prompt, params = tinker.ModelInput.from_ints([5, 6, 7]), tinker.SamplingParams(max_tokens=90, stop=[])
waiting = [sampler.sample(prompt, 4096, params)]
if training is not None:
    row = [number % 250 for number in range(90)]
    inputs = {"target_tokens": row[1:], "weights": [1.0] * 89}
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(row[:-1]), loss_fn_inputs=inputs)
    waiting += [training.forward_backward([datum] * 200, "cross_entropy") for _ in range(8)]
    waiting += [training.optim_step(tinker.AdamParams(learning_rate=1e-2)), training.save_state("last")]
print(training.model_id if training else sampler._sampling_session_id, flush=True)
for one in waiting:
    one.result()
print("done", flush=True)
"""


@pytest.fixture
def mortal(tiny_folder, tmp_path):
    server = servertools.Mortal()
    server.start(tiny_folder, tmp_path / "out")
    yield server
    server.close()


def metrics(server):
    text = httpx.get(f"{server.url}/metrics", timeout=WAIT_S).text
    return {name: float(value) for name, value in re.findall(r"^cookbook_(\w+) (\S+)$", text, re.MULTILINE)}


def killed(server, kind, happened):
    """Start the client's program, and kill it when ``happened`` is true of the metrics. Returns what it printed."""
    command = [sys.executable, "-c", PROGRAM, server.url, kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        try:
            printed = client.stdout.readline().strip()
            wait_until(lambda: happened(metrics(server)))
        finally:
            client.kill()
        assert client.stdout.read() == ""
    return printed


@pytest.mark.slow
def test_a_killed_tinker_client_stops_its_work_and_another_one_gets_its_tokens(mortal, tmp_path):
    """The seed of the request is derived from its number, so that of another session draws the same tokens."""
    sampler = killed(mortal, "sampling", lambda now: now["drawn_tokens"] > 0)
    wait_until(lambda: metrics(mortal)["paused_sessions"] == 1)
    wait_until(lambda: metrics(mortal)["drawn_tokens"] == 0)
    other, sampled = Client(mortal.url), 0
    for _ in range(10):
        assert other.result(other.sample(2, stop=[])).headers["content-type"] == "application/x-protobuf"
        sampled += 8
        now = metrics(mortal)
        assert (now["drawn_tokens"], now["calls_pending"], now["sampled_tokens_total"]) == (0, 1, sampled)
    # No request is under way. The server notes the end of the last one after its response.
    wait_until(lambda: (tmp_path / "out" / "computing").read_text().startswith("0\n"))
    undisturbed = Client(mortal.url)
    expected = undisturbed.result(undisturbed.sample(4096, **LARGE | {"seed": None})).content
    assert metrics(mortal)["paused_sessions"] == 1
    promise = httpx.Response(200, json={"request_id": f"{sampler}/0"})
    assert other.result(promise).content == expected
    now = metrics(mortal)
    assert (now["paused_sessions"], now["calls_pending"], now["drawn_tokens"]) == (0, 0, 0)


@pytest.mark.slow
def test_training_requests_of_a_killed_client_are_carried_out(mortal):
    # The run, 4096 samples, 8 passes, the step and the save.
    run = killed(mortal, "training", lambda now: now["answers"] == 12 and now["calls_pending"] > 3)
    wait_until(lambda: metrics(mortal)["paused_sessions"] == 1)
    wait_until(lambda: metrics(mortal)["calls_pending"] == 1)
    assert metrics(mortal)["paused_sessions"] == 1 and metrics(mortal)["trained_tokens_total"] == 8 * 200 * 89
    saved = httpx.get(f"{mortal.url}/api/v1/training_runs/{run}/checkpoints", timeout=WAIT_S).json()["checkpoints"]
    assert [one["checkpoint_id"] for one in saved] == ["weights/last"]
