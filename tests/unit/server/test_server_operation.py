"""Operation of a server: many concurrent samples, cancellation, its command line, metrics, log, and its end."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time

import httpx
import pytest
import servertools
from waiting import WAIT_S

from cookbook.server import metrics, serve
from cookbook.server.serve import drain

tinker = pytest.importorskip("tinker")
testing = pytest.importorskip("click.testing")
main_cli = pytest.importorskip("tinker.cli.__main__").main_cli

TOKENS = list(range(40, 60))
DATUM = tinker.Datum(
    model_input=tinker.ModelInput.from_ints(TOKENS[:-1]),
    loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * 19},
)
PROMPT = tinker.ModelInput.from_ints([5, 6, 7, 8])
STEP = tinker.AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def server(tiny_folder, folder):
    with servertools.running(tiny_folder, folder, names=["tiny"]) as found:
        yield found


@pytest.fixture(scope="module")
def service(server):
    with tinker.ServiceClient(base_url=server.url, api_key=servertools.KEY) as client:
        yield client


@pytest.fixture(scope="module")
def training(service):
    client = service.create_lora_training_client("tiny", rank=4).result()
    learn(client)
    return client


def learn(client, steps=1):
    for _ in range(steps):
        client.forward_backward([DATUM], "cross_entropy")
        client.optim_step(STEP).result()


@pytest.fixture
def post(server):
    def send(path, **body):
        return httpx.post(f"{server.url}/api/v1/{path}", timeout=WAIT_S, **body)

    return send


# ---- many samples ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_five_hundred_concurrent_samples_are_all_answered_and_reported_in_few_requests(server, service):
    sampler = service.create_sampling_client(base_model="tiny").result()
    counted = server.service.metrics.http_requests
    before = sum(counted.values())
    params = tinker.SamplingParams(max_tokens=2, stop=[])
    answers = [future.result() for future in [sampler.sample(PROMPT, 1, params) for _ in range(500)]]
    assert all(len(answer.sequences[0].tokens) == 2 for answer in answers)
    # One to ask, one to fetch; the rest are heartbeats and looks at what is new, far fewer than one for each.
    assert 1000 <= sum(counted.values()) - before < 1250
    feed = server.service.requests.completions.after
    told, _ = asyncio.run_coroutine_threadsafe(feed(sampler._sampling_session_id, 0, 10**6, 0.0), server.loop).result()
    assert told == []


def test_new_results_are_reported_in_order_once_and_as_soon_as_they_exist(server, service, post):
    sampler_id = service.create_sampling_client(base_model="tiny").result()._sampling_session_id
    target = {"sampling_session_id": sampler_id}

    def look(cursor, **more):
        return post("retrieve_futures", json={"target": target, "prev_cursor": cursor, **more}).json()

    def ask(number, **params):
        prompt = {"chunks": [{"tokens": [5, 6]}]}
        sampling = {"max_tokens": 2, **params}
        body = {"sampling_session_id": sampler_id, "seq_id": number, "prompt": prompt, "sampling_params": sampling}
        return post("asample", json=body).json()["request_id"]

    assert look(0, timeout=0.0)["completions"] == []
    asked = ask(0)
    found = look(0)
    assert [(one["request_id"], one["state"]) for one in found["completions"]] == [(asked, "finished")]
    assert look(0)["completions"] == found["completions"]  # it was not acknowledged
    failing = ask(1, temperature=-1.0)
    later = look(found["cursor"], retrieved_request_ids=[asked, "another/1"])
    assert [(one["request_id"], one["state"]) for one in later["completions"]] == [(failing, "failed")]
    assert post("retrieve_future", json={"request_id": asked}).status_code == 410
    clone = ask(10**9)
    assert look(later["cursor"], timeout=0.0)["completions"] == []
    target["cloned_sampler_id"] = 1
    assert look(0)["completions"][0]["request_id"] == clone
    assert post("join_sampling_session", json=target).json() == {"client_counter": 1}


def test_a_cancelled_request_fails_immediately_and_its_late_result_is_dropped(server, service, post):
    sampler_id = service.create_sampling_client(base_model="tiny").result()._sampling_session_id
    prompt = {"chunks": [{"tokens": [5, 6]}]}
    body = {"sampling_session_id": sampler_id, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 2}}
    gate = threading.Event()
    server.service.host.worker.submit(gate.wait)
    asked = post("asample", json=body).json()
    assert post("cancel_future", json=asked).status_code == 204
    answer = post("retrieve_future", json=asked).json()
    gate.set()
    server.service.host.worker.submit(lambda: None).result()
    assert "cancelled by the client" in answer["error"]
    assert post("retrieve_future", json=asked).json() == answer
    assert post("cancel_future", json={"request_id": "unknown/1"}).status_code == 204


# ---- the command line of the client ----------------------------------------------------------------------------------


@pytest.fixture
def cli(server, monkeypatch):
    """``cli(words...)``: what the client's command prints, without starting it in a process of its own."""
    for name, value in {"BASE_URL": server.url, "API_KEY": servertools.KEY, "TELEMETRY": "0"}.items():
        monkeypatch.setenv(f"TINKER_{name}", value)

    def run(*words):
        result = testing.CliRunner().invoke(main_cli, words)
        assert result.exit_code == 0, (result.output, result.exception)
        return result.output

    return run


def test_runs_and_checkpoints_from_the_command_line(cli, training, tmp_path):
    path = training.save_state("kept").result().path
    assert training.model_id in cli("-f", "json", "run", "list")
    assert training.model_id in cli("run", "info", training.model_id)
    assert path in cli("-f", "json", "checkpoint", "list")
    assert json.loads(cli("-f", "json", "checkpoint", "info", path))
    cli("checkpoint", "set-ttl", path, "--ttl", "7200")
    cli("checkpoint", "publish", path)
    cli("checkpoint", "unpublish", path)
    cli("checkpoint", "download", path, "--output", str(tmp_path))
    assert list(tmp_path.rglob("adapter_model.safetensors"))
    cli("checkpoint", "delete", "-y", path)
    assert path not in cli("-f", "json", "checkpoint", "list")


# ---- looking at it ---------------------------------------------------------------------------------------------------


def test_metrics_are_what_prometheus_reads_and_tell_what_happened(server, training):
    def read():
        text = httpx.get(f"{server.url}/metrics", timeout=WAIT_S).text
        assert all(re.fullmatch(r"# (HELP|TYPE) \S+ .+|[a-z_]+(\{.*\})? [0-9.e+-]+", line) for line in text.splitlines())
        return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))

    before = read()
    learn(training, steps=2)
    after = read()

    def grown(name):
        return float(after[name]) - float(before.get(name, 0))

    assert grown('cookbook_calls_total{kind="optim_step",outcome="done"}') == 2
    assert grown("cookbook_trained_tokens_total") == 38
    assert grown('cookbook_http_requests_total{route="/optim_step",status="200"}') == 2
    assert float(after["cookbook_training_runs"]) >= 1 and float(after["cookbook_calls_pending"]) == 0


def test_every_request_and_call_is_in_the_log_under_its_id(server, training, tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "LOG", logging.Logger("of the test"))
    metrics.log_to(tmp_path / "log.jsonl")
    answer = httpx.get(f"{server.url}/api/v1/healthz", headers={"X-Request-ID": "mine-1"}, timeout=WAIT_S)
    assert answer.headers["x-request-id"] == "mine-1"
    assert (
        httpx.get(f"{server.url}/api/v1/healthz", headers={"X-Request-ID": "a\tb"}, timeout=WAIT_S).headers["x-request-id"]
        != "a\tb"
    )
    with pytest.raises(tinker.RequestFailedError):
        training.forward_backward([DATUM], "nonsense").result()
    with pytest.raises(tinker.RequestFailedError):
        training.optim_step(STEP).result()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    mine = [one for one in lines if one.get("id") == "mine-1"]  # the client has a heart that beats meanwhile
    assert [(one["path"], one["status"]) for one in mine] == [("/api/v1/healthz", 200)]
    failed = [one for one in lines if one["event"] == "call" and "error" in one]
    assert failed[0]["call"].startswith(training.model_id) and "unknown name" in failed[0]["error"]


def test_the_line_on_the_terminal(server, training):
    assert re.search(
        r"\d+ sessions, \d+ runs \(.*\d steps\), .* 0 requests pending, 1,234 tokens/s",
        server.call(lambda: serve.status_line(server.service, 1234.4)),
    )


# ---- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_that_ends_finishes_accepted_work_takes_no_new_and_saves_its_runs(tiny_folder, tmp_path):
    with (
        servertools.running(tiny_folder, tmp_path, names=["tiny"]) as server,
        tinker.ServiceClient(base_url=server.url, api_key=servertools.KEY) as service,
    ):
        client = service.create_lora_training_client("tiny", rank=4).result()
        learn(client)
        gate = threading.Event()
        server.service.host.worker.submit(gate.wait)
        saved = client.save_state("last")
        while not server.service.requests.unsettled():
            time.sleep(0.01)
        ending = asyncio.run_coroutine_threadsafe(drain(server.service, 30.0), server.loop)
        late = httpx.post(f"{server.url}/api/v1/save_weights", json={"model_id": client.model_id, "seq_id": 99}, timeout=WAIT_S)
        assert late.status_code == 503 and not ending.done()
        gate.set()
        ending.result(timeout=WAIT_S)
        assert saved.result().path.endswith("weights/last")
        model_id = client.model_id
    with (
        servertools.running(tiny_folder, tmp_path, names=["tiny"]) as later,
        tinker.ServiceClient(base_url=later.url, api_key=servertools.KEY) as service,
    ):
        path = f"tinker://{model_id}/weights/shutdown"
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        assert later.engine(resumed).step == 1
