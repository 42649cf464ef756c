"""The endpoint for agents in front of real vLLM servers: ``cookbook serve deployment=vllm``, and a run with ``env=agent``."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from http.client import HTTPConnection

import httpx
import numpy as np
import pytest
from places import ROOT
from servertools import wait_until
from vllmtools import PYTHON, has_vllm, pytestmark  # noqa: F401 - has_vllm is used by the mark
from waiting import WAIT_S

from cookbook.data import Renderer
from cookbook.deployments.vllm.registry import DeploymentManager
from cookbook.engine.model import ModelConfig, load_tokenizer
from cookbook.utils import paths

TINY = paths.packaged("data") / "tiny"
DEPLOYMENT = ["deployment=vllm", f"deployment.python={PYTHON}", "deployment.max_length=512"]
SERVES = r"serving .* on (http://\S+)"
# Of float32 through two programs.
CLOSE = 1e-4
BODY = {"prompt": "3+4=", "max_tokens": 12, "seed": 5, "logprobs": 0}
IDS = {"token_ids": [10, 20, 30, 40], "sampling_params": {"max_tokens": 12, "seed": 5, "logprobs": 0, "ignore_eos": True}}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "XDG_STATE_HOME": str(tmp_path_factory.mktemp("state")),
    }


def serving(folder, environment, *words):
    """A server in a process of its own."""
    command = [sys.executable, "-m", "cookbook", "serve", *DEPLOYMENT, "server.port=0", f"out={folder / 'out'}", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)


def read_until(server, pattern):
    """The match of the first line of the server's output that has one."""
    lines = []
    for line in server.stdout:
        lines.append(line)
        if found := re.search(pattern, line):
            return found
    pytest.fail("".join(lines))


@pytest.fixture(scope="module")
def url(environment, tmp_path_factory):
    """A server with two keys. Its vLLM server ends with it."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "keys").write_text("one: tml-one\ntwo: tml-two\n")
    with serving(folder, environment, f"server.keys_file={folder / 'keys'}") as server:
        try:
            yield read_until(server, SERVES)[1]
        finally:
            server.terminate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", environment["XDG_STATE_HOME"])
        assert DeploymentManager().running() == {}


@pytest.fixture
def http(url):
    with httpx.Client(base_url=url, timeout=120, headers={"X-API-Key": "tml-one"}) as client:
        yield client


@pytest.fixture
def trained(url):
    """A LoRA run with two steps, whose weights were saved by name after the first and are published after the second."""
    tinker = pytest.importorskip("tinker", reason="needs the package tinker")
    with tinker.ServiceClient(base_url=url, api_key="tml-one") as service:
        client = service.create_lora_training_client("tiny", rank=4, seed=3).result()

        def step():
            tokens = list(range(30, 60))
            datum = tinker.Datum(
                model_input=tinker.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 29},
            )
            client.forward_backward([datum], "cross_entropy").result()
            client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()

        step()
        named = client.save_weights_for_sampler("first").result().path
        step()
        sampler = client.save_weights_and_get_sampling_client().result()
        yield client, named
        del sampler


def scored(http, model, prompt, choice):
    """The embedded engine's log-probabilities of the tokens that vLLM has sampled."""
    tokens = [*prompt, *choice["token_ids"]]
    body = {"model": model, "token_ids": tokens, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}
    rows = http.post("/inference/v1/generate", json=body).raise_for_status().json()["prompt_logprobs"]
    return [row[str(token)]["logprob"] for token, row in zip(tokens, rows, strict=True) if row][len(prompt) - 1 :]


def test_samples_are_those_of_the_named_weights(http, trained):
    """Base, checkpoint and newest sampler, alternately and at the same time. Each answer has the logprobs of its weights."""
    client, named = trained
    models, found = ["tiny", named, f"runs/{client.model_id}"], {}

    def ask(model):
        response = http.post("/inference/v1/generate", json={"model": model, **IDS}).raise_for_status().json()
        found.setdefault(model, []).append(response["choices"][0])

    threads = [threading.Thread(target=ask, args=(model,)) for model in models * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for model in models:
        assert len(found[model]) == 3
        assert len({str(one["token_ids"]) for one in found[model]}) == 1, "the same seed draws the same tokens"
        drawn = [one["logprob"] for one in found[model][0]["logprobs"]["content"]]
        assert len(drawn) == 12
        assert np.abs(np.subtract(drawn, scored(http, model, IDS["token_ids"], found[model][0]))).max() < CLOSE
    values = [found[model][0]["logprobs"]["content"][0]["logprob"] for model in models]
    assert len({round(value, 3) for value in values}) == 3, "three versions of the weights differ"


def test_chats_streams_and_echo(http):
    """The other routes: what OpenAI's clients send."""
    question = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "3+4="}],
        "max_tokens": 8,
        "seed": 1,
        "logprobs": True,
    }
    chat = http.post("/v1/chat/completions", json=question).raise_for_status().json()["choices"][0]
    with http.stream("POST", "/v1/chat/completions", json={**question, "stream": True}) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    streamed = "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
    assert streamed == chat["message"]["content"]
    assert chat["finish_reason"] in ("stop", "length") and chat["logprobs"]["content"]
    text = http.post("/v1/completions", json={"model": "tiny", **BODY, "logprobs": 2, "echo": True}).raise_for_status().json()
    [choice] = text["choices"]
    renderer = Renderer(load_tokenizer(ModelConfig(str(TINY))))
    length = len(renderer.prompt_tokens(BODY["prompt"]))
    assert choice["text"].startswith("3+4=") and choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["token_logprobs"]) == length + text["usage"]["completion_tokens"]
    several = http.post("/v1/completions", json={"model": "tiny", **BODY, "prompt": ["1+1=", "2+2="], "n": 2}).json()
    assert [one["index"] for one in several["choices"]] == [0, 1, 2, 3]
    refused = http.post("/v1/completions", json={"model": "tiny", **BODY, "max_tokens": 800})
    assert refused.status_code == 400 and "deployment.max_length" in refused.json()["error"]["message"]


def metric(server, name):
    """The value of a metric of the vLLM server."""
    lines = httpx.get(f"{server}/metrics", timeout=WAIT_S).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))


def test_private_weights_and_clients_that_leave(http, url, trained, environment, monkeypatch):
    """Another key gets 404. A client that disconnects stops its work in the vLLM server."""
    client, named = trained
    for model in (named, f"runs/{client.model_id}"):
        refused = http.post("/v1/completions", json={"model": model, **BODY}, headers={"X-API-Key": "tml-two"})
        assert refused.status_code == 404
    monkeypatch.setenv("XDG_STATE_HOME", environment["XDG_STATE_HOME"])
    [[server]] = DeploymentManager().running().values()
    before = metric(server.url, "generation_tokens_total")
    body = {"token_ids": [10, 20, 30], "sampling_params": {"max_tokens": 400, "n": 128, "ignore_eos": True}}
    connection = HTTPConnection(url.removeprefix("http://"), timeout=WAIT_S)
    connection.request("POST", "/inference/v1/generate", json.dumps(body), {"X-API-Key": "tml-one"})
    wait_until(lambda: metric(server.url, "num_requests_running"))
    connection.close()
    wait_until(lambda: metric(server.url, "num_requests_running") + metric(server.url, "num_requests_waiting") == 0)
    assert metric(server.url, "generation_tokens_total") - before < 128 * 400
    http.post("/v1/completions", json={"model": named, **BODY}).raise_for_status()


def test_signals_end_the_servers(tmp_path, environment, monkeypatch):
    """SIGTERM while vLLM starts, and the second Ctrl-C while an answer is computed."""
    state = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    environment = {**environment, "XDG_STATE_HOME": str(state)}
    manager = DeploymentManager()
    with serving(tmp_path, environment) as server:
        read_until(server, "starting vLLM at")
        assert manager.running()
        server.terminate()
        assert server.wait(WAIT_S) == 128 + signal.SIGTERM
    assert not manager.running()
    with serving(tmp_path, environment) as server:
        url = read_until(server, SERVES)[1]
        [[served]] = manager.running().values()
        body = {"token_ids": [10, 20, 30], "sampling_params": {"max_tokens": 400, "n": 128, "ignore_eos": True}}
        connection = HTTPConnection(url.removeprefix("http://"), timeout=WAIT_S)
        connection.request("POST", "/inference/v1/generate", json.dumps(body))
        wait_until(lambda: metric(served.url, "num_requests_running"))
        server.send_signal(signal.SIGINT)
        read_until(server, "press Ctrl-C again")
        server.send_signal(signal.SIGINT)
        assert server.wait(WAIT_S) == 128 + signal.SIGINT
        connection.close()
    wait_until(lambda: not served.alive)
    assert not manager.running()


def test_an_agent_learns_through_it(tmp_path, environment):
    """Token capture in front of vLLM: the agent of the example, whose calls the run records and trains on."""
    pytest.importorskip("openai", reason="needs the package openai")
    command = f"{sys.executable} {ROOT / 'examples' / 'agent.py'} {{row}}"
    words = ["recipe=grpo", "env=agent", f"env.command={command}", *DEPLOYMENT, "recipe.steps=3", "optim.lr=3e-4"]
    words += ["recipe.prompts_per_step=4", "eval.limit=8", f"out={tmp_path / 'run'}"]
    subprocess.run([sys.executable, "-m", "cookbook", "train", *words], check=True, cwd=tmp_path, env=environment)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][1:]
    assert len(rows) == 3 and all(row["rollout/env_errors"] == 0 for row in rows)
    # The recorded tokens and logprobs are the trainer's: a lost token or old weights would give 1e-3 and more.
    assert all(row["kl/sampler_trainer_k3"] < 1e-8 and row["sync/version_lag"] == 0 for row in rows)
    assert any(row["rollout/turns_mean"] > 1 for row in rows)
