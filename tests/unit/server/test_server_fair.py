"""Clients that share a server: turns on its worker, stopped work, limits of a request, requests that end the process."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import servertools
import tiny
from fairness import LARGE, Client, held, is_idle
from marks import rest_nightly
from preloaded import Forked
from servertools import wait_until
from waiting import WAIT_S

from cookbook.backends import worker as backend_worker
from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.backends.local.sample_queue import SampleQueue
from cookbook.backends.worker import HEAD_START_S, SLICE_S, Account, Worker
from cookbook.engine.model import ModelConfig
from cookbook.errors import BackendError
from cookbook.server.journal.attempts import Attempts
from cookbook.server.serve import drain
from cookbook.types import AdamParams, Datum, ModelInput

# ---- turns -----------------------------------------------------------------------------------------------------------


def test_a_short_job_does_not_wait_for_the_end_of_a_long_one(turns):
    queue, order = turns
    worker = Worker(1)
    go = held(worker)
    long = queue(worker.lane(Account()), "long", 1000, 0.01)
    short = queue(worker.lane(Account()), "short", 3, 0.01)
    go.set()
    short.result(WAIT_S), long.result(WAIT_S)
    worker.close()
    assert order.index("short") <= 4 and len(order) - 1 - order[::-1].index("short") < 20


def test_owners_get_equal_seconds_whatever_their_queues_and_steps_are(turns):
    """One owner has two queues and short steps, the other one queue and long steps."""
    queue, order = turns
    worker, many = Worker(1), Account()
    go = held(worker)
    lanes = [worker.lane(many), worker.lane(many), worker.lane(Account())]
    jobs = [queue(lanes[0], "a", 400, 0.01), queue(lanes[1], "b", 400, 0.01), queue(lanes[2], "c", 200, 0.04)]
    go.set()
    for job in jobs:
        job.result(WAIT_S)
    worker.close()
    seconds = {"a": 0.01, "b": 0.01, "c": 0.04}
    used = {name: sum(seconds[one] for one in order[:300] if one == name) for name in "abc"}
    # A turn is at most SLICE_S and a step; the first turns also spend the head start.
    slack = 2 * (SLICE_S + 0.04)
    assert abs(used["a"] + used["b"] - used["c"]) <= slack and abs(used["a"] - used["b"]) <= slack


def test_sixteen_clients_of_one_key_take_the_turns_of_one(turns):
    """The clients of one key share its turns equally, and the only client of another key gets as many as all of them."""
    queue, order = turns
    worker, crowd, single = Worker(1), Account(), Account()
    go = held(worker)
    jobs = [queue(worker.lane(Account(parent=crowd)), str(number), 40, 0.01) for number in range(16)]
    jobs.append(queue(worker.lane(Account(parent=single)), "single", 400, 0.01))
    go.set()
    for job in jobs:
        job.result(WAIT_S)
    worker.close()
    assert order[:400].count("single") == pytest.approx(200, abs=6)
    assert all(order[:400].count(str(number)) == pytest.approx(12.5, abs=4) for number in range(16))


def test_clients_and_the_endpoint_share_the_account_of_their_key(server):
    def accounts():
        service = server.service
        headers = [{"what": "session", "owner": owner} for owner in "aab"]
        sessions = [service.new_session(f"s{number}", header) for number, header in enumerate(headers)]
        found = [one.account.parent for one in sessions] + [service.endpoint.callers[name].account.parent for name in "ab"]
        for one in sessions:
            service.end_session(one.session_id)
        return found, service.new_session("s3", {"what": "session", "owner": None})

    (first, second, other, chats, other_chats), keyless = server.call(accounts)
    assert first is second is chats is not None and other is other_chats is not first
    assert keyless.account.parent is None
    server.call(lambda: server.service.end_session("s3"))


def test_a_queue_with_half_the_charge_gets_twice_the_seconds(turns):
    queue, order = turns
    worker = Worker(1)
    go = held(worker)
    jobs = [queue(worker.lane(Account(), share), str(share), 400, 0.01) for share in (1.0, 0.5)]
    go.set()
    for job in jobs:
        job.result(WAIT_S)
    worker.close()
    assert order[:300].count("0.5") == pytest.approx(200, abs=10)


def test_idle_time_is_not_saved_up(turns, clock):
    """An owner that comes late gets its head start, not all the seconds that it did not use before."""
    queue, order = turns
    worker = Worker(1)
    first, late = worker.lane(Account()), worker.lane(Account())
    queue(first, "first", 500, 0.1).result(WAIT_S)
    go = held(worker)
    jobs = [queue(first, "again", 60, 0.1), queue(late, "late", 60, 0.1)]
    go.set()
    for job in jobs:
        job.result(WAIT_S)
    worker.close()
    assert order[500:560].count("late") <= 30 + HEAD_START_S / 0.1 + 2


def test_dropped_jobs_end_at_their_next_step_with_an_error(turns):
    order = turns[1]
    worker = Worker(1)
    lane, other = worker.lane(Account()), worker.lane(Account())
    endless = itertools.repeat(None)
    running = lane.submit_steps(lambda: (yield from endless))
    waiting = lane.submit(lambda: order.append("never"))
    lane.drop()
    for job in (running, waiting):
        with pytest.raises(BackendError, match="was dropped"):
            job.result(WAIT_S)
    assert other.submit(lambda: "continues").result(WAIT_S) == "continues" and order == []
    with pytest.raises(BackendError, match="has ended"):
        lane.submit(lambda: None)
    worker.close()


def test_jobs_that_have_not_begun_can_be_dropped_alone():
    worker = Worker(1)
    lane, begun, go = worker.lane(Account()), threading.Event(), threading.Event()
    running = lane.submit(lambda: (begun.set(), go.wait(WAIT_S), "done")[-1])
    waiting = lane.submit(lambda: None)
    assert begun.wait(WAIT_S)
    lane.clear()
    go.set()
    assert running.result(WAIT_S) == "done" and isinstance(waiting.exception(WAIT_S), BackendError)
    assert lane.submit(lambda: "open").result(WAIT_S) == "open"
    worker.close()


# ---- pauses in a call ------------------------------------------------------------------------------------------------


def squares(_, logprobs):
    """A loss of the whole batch: all graphs are kept until it is known."""
    return sum((one**2).sum() for one in logprobs), {}


CALLS = {
    "forward": lambda trainer, data: trainer.forward(data, "cross_entropy"),
    "one graph at a time": lambda trainer, data: trainer.forward_backward(data, "cross_entropy"),
    "all graphs": lambda trainer, data: trainer.forward_backward_custom(data, squares),
}


def rows_of(seed, count):
    draw = np.random.default_rng(seed)
    tokens = [draw.integers(0, tiny.VOCABULARY, 33) for _ in range(count)]
    return [Datum(ModelInput.from_ints(one[:-1]), {"target_tokens": one[1:], "weights": np.ones(32)}) for one in tokens]


@pytest.fixture
def trainers(tiny_folder):
    """``trainers(pauses)`` returns a worker and two trainers on it. A pass of the trainers has one row."""
    made = []

    def make(*, pauses):
        worker, config = Worker(1), LocalConfig(micro_batch_tokens=32)
        model = ModelConfig(str(tiny_folder))
        lanes = [worker.lane(Account(), pauses=pauses) for _ in range(2)]
        made.append(worker)
        return worker, *(LocalTrainer(model, config, worker=lane) for lane in lanes)

    yield make
    for worker in made:
        worker.close()


@pytest.mark.parametrize("kind", CALLS)
def test_short_calls_run_in_the_middle_of_a_long_one_and_change_no_bit(trainers, kind, monkeypatch):
    """Two long calls and a short one, which ends first. All three compute what they compute alone."""
    # After every pass, the other client is behind.
    monkeypatch.setattr(backend_worker, "SLICE_S", 0.0)

    def played(worker, long, other, *, together):
        order, go = [], held(worker) if together else None
        calls = [(long, "long", 0, 12), (other, "short", 1, 1), (other, "also long", 2, 12)]
        for trainer in (long, other):
            # The creation of the trainers took different times.
            trainer._worker._queue.account.used_s = 0.0
        futures = []
        for trainer, name, seed, count in calls:
            future = CALLS[kind](trainer, rows_of(seed, count))
            future.add_done_callback(lambda _, name=name: order.append(name))
            futures.append(future)
            if not together:
                future.result()
        if go is not None:
            go.set()
        outputs = [future.result() for future in futures]
        seen = [(one.metrics, [row["logprobs"].to_numpy().tobytes() for row in one.loss_fn_outputs]) for one in outputs]
        if kind != "forward":
            seen += [trainer.optim_step(AdamParams(learning_rate=1e-2)).result().metrics for trainer in (long, other)]
            seen += [trainer.forward(rows_of(3, 2), "cross_entropy").result().metrics for trainer in (long, other)]
        return order, seen

    _, alone = played(*trainers(pauses=False), together=False)
    order, beside = played(*trainers(pauses=True), together=True)
    assert beside == alone
    assert order[0] == "short"


def test_short_calls_run_in_the_middle_of_logprobs_of_prompts_and_change_no_bit(trainers, monkeypatch):
    """The prompts of a batch are scored by one call."""
    monkeypatch.setattr(backend_worker, "SLICE_S", 0.0)

    def played(*, pauses):
        worker, long, other = trainers(pauses=pauses)
        sampler = long.live_sampler(0).result().on(SampleQueue(long._worker, 1000))
        order, go, run = [], held(worker), long.engine.passes.run
        monkeypatch.setattr(long.engine.passes, "run", lambda *args, **more: (order.append("pass"), run(*args, **more)))
        for lane in (long._worker, other._worker):
            # The long call is queued first, and no client has used more than the other, so the long call begins.
            lane._queue.used_s = lane._queue.account.used_s = lane._queue.account.clock_s = 0.0
        scores = [sampler.compute_logprobs(row.model_input) for row in rows_of(0, 40)]
        sampler._queue.flush()
        short = other.forward(rows_of(1, 1), "cross_entropy")
        short.add_done_callback(lambda _: order.append("short"))
        go.set()
        wait_until(lambda: "short" in order)
        return [one.result(WAIT_S) for one in scores], order

    alone, order = played(pauses=False)
    assert order == ["pass"] * 40 + ["short"]
    beside, order = played(pauses=True)
    assert beside == alone
    assert 1 <= order.index("short") < 10 and order.count("pass") == 40


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_call_that_is_dropped_in_a_pause_ends_and_its_thread_is_used_again(trainers, is_alone):
    worker, long, other = trainers(pauses=True)
    dropped = long.forward_backward(rows_of(0, 500), "cross_entropy")
    wait_until(lambda: long.engine._is_accumulating)
    if is_alone:
        long._worker.drop()
    else:
        # The long call pauses for this one, which drops its lane.
        other._worker.submit(long._worker.drop)
    with pytest.raises(BackendError, match="was dropped"):
        dropped.result(WAIT_S)
    assert other.forward(rows_of(1, 2), "cross_entropy").result(WAIT_S).metrics
    assert len(worker._call_threads._idle) == 2 - is_alone and not worker._call_threads.is_held


# ---- the server ------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tiny_folder, tmp_path):
    with servertools.running(tiny_folder, tmp_path, names=["tiny"], max_session_tokens=500_000) as running:
        yield running


def test_another_client_is_answered_while_a_large_request_is_computed(server, endless):
    large, small = Client(server.url), Client(server.url)
    alone = small.result(small.sample()).content
    asked = large.sample(500, **LARGE)
    wait_until(lambda: not is_idle(server))
    assert small.result(small.sample()).content == alone
    unsettled = [one.request_id for one in server.service.requests.unsettled()]
    assert unsettled == [asked.json()["request_id"]]
    endless.set()
    assert large.result(asked).headers["content-type"] == "application/x-protobuf"


@pytest.mark.slow
def test_the_prompts_of_a_session_and_of_the_endpoint_are_scored_in_turns(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(backend_worker, "SLICE_S", 0.0)
    monkeypatch.setattr(backend_worker, "HEAD_START_S", 0.0)
    # Every pass takes a second of this clock.
    seconds = itertools.count()
    monkeypatch.setattr(backend_worker, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))
    backend = LocalConfig(micro_batch_tokens=32)
    with servertools.running(tiny_folder, tmp_path, names=["tiny"], backend=backend) as server, contextlib.ExitStack() as end:
        client, prompts = Client(server.url), [row.model_input.to_ints() for row in rows_of(0, 40)]
        scored = {"model": "tiny", "prompt": prompts[0], "max_tokens": 0, "echo": True, "logprobs": 0}
        # The first request creates the sampler of the endpoint, on the worker.
        httpx.post(f"{server.url}/v1/completions", json=scored, timeout=WAIT_S)
        calls, passes = [], server.service.host._base_trainer.engine.passes
        run = passes.run
        monkeypatch.setattr(passes, "run", lambda data, *args, **more: (calls.append(id(data)), run(data, *args, **more)))
        go = held(server.service.host.worker)
        end.callback(go.set)
        asked = [client.sample(scored=prompt) for prompt in prompts]
        posted = threading.Thread(
            target=httpx.post, args=(f"{server.url}/v1/completions",), kwargs={"json": {**scored, "prompt": prompts}}
        )
        posted.start()
        # The job that holds the worker, and a queue of each owner.
        wait_until(lambda: len(server.service.host.worker._schedule._ready) == 3)
        go.set()
        posted.join()
        for one in asked:
            client.result(one)
    for call in (first := calls[0], next(one for one in calls if one != first)):
        assert calls.count(call) == 40
        assert len(calls) - calls[::-1].index(call) - calls.index(call) > 40, "no pause between its passes"


@pytest.mark.slow
def test_samples_that_pause_are_those_of_an_undisturbed_server(server):
    large, small = Client(server.url), Client(server.url)
    undisturbed = large.result(large.sample(64, **LARGE)).content
    asked = large.sample(64, **LARGE)
    for _ in range(5):
        small.result(small.sample())
    assert large.result(asked).content == undisturbed


@pytest.mark.parametrize("end", ["cancel", "close", "silence"])
def test_work_without_a_waiter_stops(server, endless, end):
    client = Client(server.url)
    asked = client.sample(500, **LARGE)
    wait_until(lambda: not is_idle(server))
    if end == "cancel":
        assert client.post("cancel_future", asked.json()).status_code == 204
        assert "cancelled by the client" in client.result(asked).json()["error"]
        assert server.service.sessions[client.session].pending_tokens == 0
    elif end == "close":
        assert client.post(f"sessions/{client.session}/finish", {}).status_code == 204
    else:
        server.service.config.session_timeout_s = 0.1
    wait_until(lambda: is_idle(server))


def test_a_request_of_a_batch_is_cancelled_and_the_others_continue(server, monkeypatch):
    """The cancelled one waits for its batch, or has begun."""
    client = Client(server.url)
    for number, begins in ((0, False), (2, True)):
        client.post("cookbook/batch", {"sampling_session_id": client.sampler, "count": 2})
        go = held(server.service.host.worker)
        first = client.sample(8, **LARGE)
        if not begins:
            client.post("cancel_future", first.json())
        other = client.sample(2)
        if begins:
            client.post("cancel_future", first.json())
        go.set()
        assert "cancelled" in client.result(first).json()["error"]
        assert client.result(other).headers["content-type"] == "application/x-protobuf", number
        wait_until(lambda: is_idle(server))
        assert server.service.sessions[client.session].pending_tokens == 0


def test_most_likely_tokens_of_cancelled_requests_are_not_computed(server, monkeypatch):
    client = Client(server.url)
    client.result(client.sample())
    computed, passes = [], server.service.host._base_trainer.engine.passes
    top_logprobs = passes.top_logprobs
    monkeypatch.setattr(passes, "top_logprobs", lambda tokens, *rest: (computed.append(tokens), top_logprobs(tokens, *rest))[1])
    go = held(server.service.host.worker)
    body = {"sampling_session_id": client.sampler, "num_samples": 1, "topk_prompt_logprobs": 2, "prompt_logprobs": True}
    asked = []
    for number in range(4):
        prompt = {"chunks": [{"tokens": [5, 6, number]}]}
        one = {**body, "seq_id": next(client.count), "prompt": prompt, "sampling_params": {"max_tokens": 1, "seed": 7}}
        asked.append(client.post("asample", one))
    for one in asked[1:]:
        client.post("cancel_future", one.json())
    go.set()
    assert client.result(asked[0]).headers["content-type"] == "application/x-protobuf"
    wait_until(lambda: is_idle(server))
    assert computed == [[5, 6, 0]]


def test_limits_are_refused_by_their_names(server, endless):
    client, config = Client(server.url), server.service.config
    config.max_request_tokens = 89 * 500
    assert "server.max_request_tokens=44,500" in client.sample(500, **LARGE).text
    config.max_request_tokens, config.max_request_gb = 10**9, 0.001
    refused = client.sample(500, **LARGE)
    assert refused.status_code == 400 and "server.max_request_gb=0.001" in refused.text
    config.max_request_gb = 8.0
    asked = client.sample(4096, **LARGE)
    again = client.sample(4096, **LARGE)
    assert again.status_code == 429 and "server.max_session_tokens=500,000" in again.text
    client.post("cancel_future", asked.json())
    assert client.sample(4096, **LARGE).status_code == 200


# ---- requests that end the process -----------------------------------------------------------------------------------


def test_the_requests_that_were_computed_at_the_end_of_a_process_are_counted(tmp_path):
    for count in range(3):
        attempts = Attempts(tmp_path)
        assert (attempts.count("s:sample:0/1"), attempts.count("s:sample:0/2")) == (count, count)
        attempts.computing("s:sample:0/1\ns:sample:0/2\ns:sample:0/3")
        attempts.computing("s:sample:0/1\ns:sample:0/2")
    attempts = Attempts(tmp_path)
    attempts.forget("s:sample:0/1")
    attempts.computing("s:sample:0/2")
    attempts.end()
    attempts.computing("s:sample:0/2")
    later = Attempts(tmp_path)
    assert (later.count("s:sample:0/1"), later.count("s:sample:0/2"), later.count("s:sample:0/3")) == (0, 3, 0)


def test_of_several_calls_that_had_begun_at_an_end_none_is_blamed_until_it_ends_a_process_alone(tmp_path):
    def ended(*calls):
        """The counts of the requests 1 to 4 after a process ended with these calls."""
        Attempts(tmp_path).computing(*calls)
        return [Attempts(tmp_path).count(name) for name in "1234"]

    def suspects():
        attempts = Attempts(None)
        attempts._counts = Attempts(tmp_path)._counts
        return [name for name in "1234" if attempts.is_suspect(name)]

    # A pass and a batch of two samples, one of which pauses.
    assert ended("1", "2\n3") == [0, 0, 0, 0] and suspects() == ["1", "2", "3"]
    # A suspect and a new request, which becomes a suspect: the end counts against the suspect.
    assert ended("4", "1") == [1, 0, 0, 0] and suspects() == ["1", "2", "3", "4"]
    assert ended("2\n3") == [1, 1, 1, 0]
    assert ended("4", "", "4") == [1, 1, 1, 1]
    assert ended("1") == [2, 1, 1, 1]
    assert ended() == [2, 1, 1, 1]


def test_a_request_with_counted_ends_waits_so_that_others_settle(tmp_path):
    pauses = []
    for _ in range(10):
        Attempts(tmp_path).computing("1")
        pauses.append(Attempts(tmp_path).pause_s(["1", "2"]))
        Attempts(tmp_path).computing()
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60] and Attempts(tmp_path).pause_s(["2"]) == 0


def test_suspects_are_computed_sequentially_and_others_in_their_pauses(turns):
    queue, order = turns
    worker, begun = Worker(1), []
    worker.on_slice(lambda *purposes: begun.append(sorted(purposes)), lambda purpose: purpose.startswith("suspect"))
    go = held(worker)
    jobs = []
    for name in ("suspect 1", "suspect 2", "new"):
        with backend_worker.purpose(name):
            jobs.append(queue(worker.lane(Account()), name, 30, 0.1))
    go.set()
    for job in jobs:
        job.result(WAIT_S)
    worker.close()
    assert ["new", "suspect 1"] in begun and ["new", "suspect 2"] in begun
    assert not any({"suspect 1", "suspect 2"} <= set(purposes) for purposes in begun)
    # The other suspect and the new job have equal turns.
    assert order[:20].count("new") == pytest.approx(10, abs=2) and begun[-1] == []


FATAL = """
import os, sys, time
from pathlib import Path
from cookbook.backends.local import LocalConfig
from cookbook.engine.decoding.decoder import Decoder
from cookbook.engine.engine import Engine
from cookbook.engine.model import ModelConfig
from cookbook.server.config import ServerConfig
from cookbook.server.serve import serve
model, out, port = sys.argv[1:]

def end():
    # The client gets its answer first.
    while not Path(out).with_name("go").exists():
        time.sleep(0.01)
    os._exit(9)

admit = Decoder._admit
Decoder._admit = lambda self: end() if len(self.waiting) == 13 else admit(self)
step = Engine.optim_step
Engine.optim_step = lambda self, adam, *rest: end() if adam.learning_rate == 13 else step(self, adam, *rest)
serve(ModelConfig(model), LocalConfig(), ServerConfig(port=int(port), max_attempts=2, names=["tiny"]), seed=0, out=Path(out))
"""


@pytest.mark.parametrize("kind", rest_nightly(["sample", "optim_step"]))
def test_a_request_that_ends_the_process_fails_after_two_attempts(tiny_folder, tmp_path, kind):
    port = servertools.free_port()

    def start():
        server = Forked(str(tiny_folder), str(tmp_path / "out"), str(port), code=FATAL, errors="inherited")
        assert "serving" in server.stdout.readline()
        return server

    server = start()
    client = Client(f"http://127.0.0.1:{port}")
    lora = {"rank": 2, "seed": 1}
    asked = {"session_id": client.session, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
    run = client.result(client.post("create_model", asked)).json()["model_id"]
    if kind == "sample":
        answer = client.sample(13)
    else:
        answer = client.post("optim_step", {"model_id": run, "seq_id": 1, "adam_params": {"learning_rate": 13}})
    for _ in range(2):
        (tmp_path / "go").touch()
        assert server.wait(WAIT_S) == 9
        (tmp_path / "go").unlink()
        server = start()
    assert "2 processes of the server ended while they computed this request" in client.result(answer).json()["error"]
    assert client.result(client.sample()).status_code == 200
    number = 1 if kind == "sample" else 2
    step = client.post("optim_step", {"model_id": run, "seq_id": number, "adam_params": {"learning_rate": 0.1}})
    assert "error" not in client.result(step).json()
    server.kill()
    server.wait()


# A pass of 13 rows needs memory that is there for 12 passes through the model, and not beside a sample.
PAUSED = """
import os, signal, sys, time
from pathlib import Path
from cookbook.backends.local import LocalConfig
from cookbook.backends.pausable import CallThread
from cookbook.engine.decoding.decoder import Decoder
from cookbook.engine.engine import Engine
from cookbook.engine.model import ModelConfig
from cookbook.server.config import ServerConfig
from cookbook.server.serve import serve
model, out, port = sys.argv[1:]
passes = []

def end():
    # The client gets its answers first.
    while not Path(out).with_name("go").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

pause = CallThread._pause
def paused(self, holds_memory):
    if passes:
        time.sleep(0.5)
        passes.append(holds_memory)
        len(passes) > 12 and end()
    pause(self, holds_memory)
CallThread._pause = paused

begin = Engine.forward_backward
def begun(self, data, *rest, **more):
    len(data) == 13 and passes.append(None)
    return begin(self, data, *rest, **more)
Engine.forward_backward = begun

admit = Decoder._admit
Decoder._admit = lambda self: end() if passes else admit(self)
config = LocalConfig(micro_batch_tokens=8)
serve(ModelConfig(model), config, ServerConfig(port=int(port), max_attempts=2, names=["tiny"]), seed=0, out=Path(out))
"""


@pytest.mark.nightly
def test_a_paused_request_that_ends_the_process_fails_and_the_one_that_ran_meanwhile_does_not(tiny_folder, tmp_path):
    """Two ends of the process: at the first, the sample runs and the pass has paused. Each works, or fails, alone."""
    pytest.importorskip("tinker")
    from sessions import passing

    port = servertools.free_port()
    with contextlib.ExitStack() as ends:

        def start():
            arguments = (str(tiny_folder), str(tmp_path / "out"), str(port))
            server = ends.enter_context(Forked(*arguments, code=PAUSED, errors="inherited"))
            ends.callback(server.kill)
            assert "serving" in server.stdout.readline()
            return server

        server = start()
        client, other = (Client(f"http://127.0.0.1:{port}") for _ in range(2))
        lora = {"rank": 2, "seed": 1}
        asked = {"session_id": client.session, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
        run = client.result(client.post("create_model", asked)).json()["model_id"]
        content, kind = passing(run, 1, count=13), {"content-type": "application/x-protobuf"}
        fatal = httpx.post(f"{client.url}/api/v1/forward_backward", content=content, headers=kind, timeout=WAIT_S)
        innocent = other.sample()
        for _ in range(2):
            (tmp_path / "go").touch()
            assert server.wait(300) == -signal.SIGKILL
            (tmp_path / "go").unlink()
            server = start()
        assert "2 processes of the server ended while they computed this request" in client.result(fatal).json()["error"]
        assert other.result(innocent).headers["content-type"] == "application/x-protobuf"
        step = client.post("optim_step", {"model_id": run, "seq_id": 2, "adam_params": {"learning_rate": 0.1}})
        assert "2 processes of the server ended" in client.result(step).json()["error"]


def test_clients_that_wait_for_results_are_answered_when_the_server_ends(server, endless):
    client = Client(server.url)
    asked = client.sample(500, **LARGE)
    polls = {
        "retrieve_future": asked.json(),
        "retrieve_futures": {"target": {"sampling_session_id": client.sampler}, "prev_cursor": 0},
    }
    answers = {}
    threads = [
        threading.Thread(target=lambda one=one, body=body: answers.update({one: client.post(one, body)}))
        for one, body in polls.items()
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(server.service.polls) == 2)
    server.call(lambda: drain(server.service, 0.1))
    for thread in threads:
        thread.join()
    assert {one: answer.status_code for one, answer in answers.items()} == dict.fromkeys(polls, 503)


def busy_server(tiny_folder, tmp_path, *, seconds, drain_s):
    """A server in a process of its own, and a client whose request for 13 samples is a call of ``seconds`` without pauses."""
    code = FATAL.replace("end() if len(self.waiting) == 13", f"(time.sleep({seconds}), ())[1] if len(self.waiting) == 13")
    code = code.replace("names=", f"drain_s={drain_s}, names=")
    port = servertools.free_port()
    server = Forked(str(tiny_folder), str(tmp_path / "out"), str(port), code=code)
    assert "serving" in server.stdout.readline()
    return server, Client(f"http://127.0.0.1:{port}")


@pytest.mark.nightly
def test_a_server_that_has_ended_drops_queued_samples_without_a_trace(tiny_folder, tmp_path):
    """The worker is in the middle of a call until after the event loop has closed."""
    server, client = busy_server(tiny_folder, tmp_path, seconds=3, drain_s=0.1)
    assert [client.sample(count).status_code for count in (13, 1, 1, 1)] == [200] * 4
    server.send_signal(signal.SIGTERM)
    _, errors = server.communicate(timeout=WAIT_S)
    assert server.returncode == 0
    assert "finishing accepted requests" in errors and "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_a_busy_server_ends_when_told(tiny_folder, tmp_path, signals):
    """The worker is in the middle of a call without pauses; a second signal ends the process immediately."""
    server, client = busy_server(tiny_folder, tmp_path, seconds=600, drain_s=0.5 if signals == 1 else 500)
    assert client.sample(13).status_code == 200
    server.send_signal(signal.SIGTERM)
    assert "finishing accepted requests" in server.stderr.readline() + server.stderr.readline()
    if signals == 2:
        server.send_signal(signal.SIGTERM)
    assert server.wait(WAIT_S) == (0 if signals == 1 else 128 + signal.SIGTERM)
    # The signal ended the process, not the request.
    counts = Attempts(tmp_path / "out")
    assert counts.count(f"{client.sampler}/0") == 0
