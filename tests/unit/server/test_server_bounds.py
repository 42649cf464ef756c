"""Memory that a client can make the server hold: every kind has a limit, and the error at the limit names the remedy."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from contextlib import contextmanager

import httpx
import pytest
import servertools
from servertools import wait_until
from waiting import WAIT_S

from cookbook.server.handlers import sampling
from cookbook.server.handlers import training as requests
from cookbook.server.serve import drain
from cookbook.server.wire.bodies import Refused, SampleBatch, SampleBody, parse

tinker = pytest.importorskip("tinker")

TOKENS = list(range(40, 60))
DATUM = tinker.Datum(
    model_input=tinker.ModelInput.from_ints(TOKENS[:-1]),
    loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * 19},
)
PROMPT = tinker.ModelInput.from_ints([5, 6, 7, 8])
ONE = tinker.SamplingParams(max_tokens=1)


@pytest.fixture
def serve(tiny_folder, tmp_path):
    """``serve(**options)``: a server and its client."""

    def start(**options):
        return servertools.running(tiny_folder, tmp_path, names=["tiny"], **options)

    return start


def gauges(url):
    lines = httpx.get(f"{url}/metrics", timeout=WAIT_S).text.splitlines()
    return {name: float(value) for name, _, value in (one.rpartition(" ") for one in lines if not one.startswith("#"))}


def client_of(server):
    return tinker.ServiceClient(base_url=server.url, api_key=servertools.KEY)


@pytest.mark.slow
def test_unused_snapshots_are_evicted_for_newer_ones_with_an_error(serve):
    with serve() as server, client_of(server) as service:
        training = service.create_lora_training_client("tiny", rank=2).result()
        base = service.create_sampling_client(base_model="tiny").result()

        def snapshot():
            return training.save_weights_and_get_sampling_client().result()

        samplers = [snapshot(), snapshot(), snapshot()]
        limit = server.service.samplers.max_bytes = int(gauges(server.url)["cookbook_sampler_bytes"])
        assert limit > 0 and limit % 3 == 0
        samplers[0].sample(PROMPT, 1, ONE).result()  # it is needed; the two after it are not
        samplers += [snapshot(), snapshot()]
        found = gauges(server.url)
        assert (found["cookbook_sampler_bytes"], found["cookbook_samplers_let_go_total"]) == (limit, 2)
        for gone in samplers[1:3]:
            with pytest.raises(
                tinker.RequestFailedError, match=r"were evicted .*create a new sampling client, or raise server\.samplers_gb"
            ):
                gone.sample(PROMPT, 1, ONE).result()
        for there in (base, samplers[0], *samplers[3:]):
            assert there.sample(PROMPT, 1, ONE).result().sequences
    assert not gauges_left(server)


def gauges_left(server):
    """Objects that ended clients have left behind."""
    return len(server.service.requests) + len(server.service.samplers) + server.service.samplers.num_bytes


@pytest.mark.slow
def test_an_evicted_sampler_stays_evicted_after_a_restart(serve):
    with serve() as server:
        service = client_of(server)
        training = service.create_lora_training_client("tiny", rank=2).result()
        path = training.save_weights_for_sampler("kept").result().path
        first = service.create_sampling_client(model_path=path).result()
        kept = server.service.durability.sampler_weights(first._sampling_session_id)
        assert kept.exists()
        server.service.samplers.max_bytes = 1
        second = service.create_sampling_client(model_path=path).result()
        assert not kept.exists() and server.service.durability.sampler_weights(second._sampling_session_id).exists()
    with serve() as again:
        assert list(again.service.samplers) == [second._sampling_session_id]


def test_runs_and_sessions_have_a_limit_that_says_what_to_do(serve):
    with serve(max_runs=1, max_sessions=2) as server, client_of(server) as service:
        training = service.create_lora_training_client("tiny", rank=2).result()
        with pytest.raises(tinker.RequestFailedError, match=r"1 training runs are in memory; .*raise server\.max_runs"):
            service.create_lora_training_client("tiny", rank=2).result()
        assert training.forward([DATUM], "cross_entropy").result().metrics["loss:sum"] > 0
        asked = [httpx.post(f"{server.url}/api/v1/create_session", json={}, timeout=WAIT_S) for _ in range(2)]
        assert [one.status_code for one in asked] == [200, 429]
        assert "raise server.max_sessions" in asked[1].json()["detail"]


@contextmanager
def computing(server):
    """Until the end of the block nothing is computed."""
    go = threading.Event()
    server.service.host.worker.submit(go.wait)
    try:
        yield
    finally:
        go.set()


def test_two_runs_that_are_requested_concurrently_are_two(serve):
    with serve(max_runs=1) as server, client_of(server) as service:
        with computing(server):
            asked = [service.create_lora_training_client("tiny", rank=2) for _ in range(2)]
            wait_until(lambda: len(server.service.requests) == 2)
        errors = [one.future().exception() for one in asked]
        assert sum(error is None for error in errors) == 1 == len(server.service.runs)
        assert any("raise server.max_runs" in str(error) for error in errors)
        assert not server.service.loading_runs


def test_requests_in_their_order_wait_within_the_bound_and_those_that_others_wait_for_come_in(serve):
    with serve() as server, client_of(server) as service:
        run_id = service.create_lora_training_client("tiny", rank=2).result().model_id

        def ask(number):
            body = json.dumps({"model_id": run_id, "seq_id": number, "adam_params": {"learning_rate": 0.0}}).encode()
            server.service.requests.max_pending = 2 * len(body)
            return server.call(lambda: requests.accept(server.service, "optim_step", body))

        with computing(server):
            answers = [ask(1), ask(3)]
            with pytest.raises(Refused, match="are pending; retry later"):
                ask(4)
            answers.append(ask(2))
            with pytest.raises(Refused, match="are pending; retry later"):
                ask(4)  # it is the next now, and nothing waits for it
        wait_until(lambda: all(one.settled.is_set() for one in answers))
        assert ask(4) and not server.service.runs[run_id].order.num_waiting


def test_the_rest_of_an_announced_batch_comes_in(serve):
    with serve() as server, client_of(server) as service:
        sampler_id = service.create_sampling_client(base_model="tiny").result()._sampling_session_id

        def ask(number):
            prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
            message = {
                "sampling_session_id": sampler_id,
                "seq_id": number,
                "prompt": prompt,
                "sampling_params": {"max_tokens": 1},
            }
            body = json.dumps(message).encode()
            return server.call(lambda: sampling.sample(server.service, parse(SampleBody, body), body))

        server.service.requests.max_pending = 1
        with computing(server):
            batch = parse(SampleBatch, json.dumps({"sampling_session_id": sampler_id, "count": 2}).encode())
            server.call(lambda: sampling.announce(server.service, batch))
            answers = [ask(1), ask(2)]
            with pytest.raises(Refused, match="are pending; retry later"):
                ask(3)
        wait_until(lambda: all(one.settled.is_set() for one in answers))
        # A batch that is not complete when the server ends does not start on the worker that has ended.
        server.call(lambda: sampling.announce(server.service, batch))
        left = ask(4)
        announced = server.service.samplers[sampler_id].batch
        server.call(lambda: drain(server.service, 0.0))
        assert server.service.samplers[sampler_id].batch is None and announced._timer._handle.cancelled()
        assert not left.settled.is_set()


def test_a_client_that_leaves_before_its_sampler_is_there_leaves_nothing(serve):
    with serve() as server:
        with client_of(server) as service:
            training = service.create_lora_training_client("tiny", rank=2).result()
            with computing(server):
                training.save_weights_and_get_sampling_client(kind="inflight")
                wait_until(lambda: len(server.service.requests.unsettled()) == 1)
                run = server.service.runs[training.model_id]
                server.call(lambda: server.service.end_session(run.session_id))
        server.service.host.worker.submit(lambda: None).result()
        server.call(lambda: None)
        assert not gauges_left(server) and not run.inflight and not run.published


def test_runs_that_have_ended_leave_no_tensors(serve):
    with serve() as server:
        with client_of(server) as service:
            training = service.create_lora_training_client("tiny", rank=2).result()
            network = server.engine(training).model.network
            held = [weakref.ref(one) for one in network.parameters() if one.requires_grad]
            assert held
            del network, training
        wait_until(lambda: not server.service.sessions)
        server.service.host.worker.submit(lambda: None).result()
        wait_until(lambda: gc.collect() >= 0 and not any(one() is not None for one in held))
