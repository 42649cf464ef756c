"""Asking a server for samples: retries, adaptive concurrency, errors. The server is a real one, of this file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from waiting import WAIT_S

from cookbook.backends.local import LocalConfig
from cookbook.deployments.vllm import http, process, registry
from cookbook.deployments.vllm.deployment import VllmConfig, VllmDeployment
from cookbook.deployments.vllm.http import Client, RequestRefusedError, ServerUnavailableError
from cookbook.deployments.vllm.registry import DeploymentManager, RunningServer
from cookbook.deployments.vllm.sampler import AdaptiveLimit, DeploymentSampler, Pool
from cookbook.engine.model import ModelConfig
from cookbook.errors import ConfigError, RolloutError
from cookbook.server.rank import choose_gpu
from cookbook.types import SamplingParams

VERSION = "step-3-abc"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.answer(json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "null"))

    def do_GET(self) -> None:
        self.answer(None)

    def answer(self, body) -> None:
        status, headers, content = self.server.answer(self.path, body)
        if status is None:  # it hangs up
            self.close_connection = True
            return
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for key, value in {**headers, "content-length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args) -> None:
        """Nothing to stderr."""


class Server(ThreadingHTTPServer):
    """Gives ``answers`` in order, then samples: three tokens that repeat the prompt's first one."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple] = []
        self.asked: list[tuple] = []
        self.version = VERSION
        self.capacity = 10**9  # concurrent requests; further ones get the answer "busy"
        self.at_once = self.most_at_once = self.refused = 0
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def answer(self, path, body):
        with self.lock:
            self.asked.append((path, body))
            if self.answers:
                return self.answers.pop(0)
            if path != "/inference/v1/generate":
                return 200, {}, {"fine": True}
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            full = self.at_once > self.capacity
            self.refused += full
        time.sleep(0.004)
        with self.lock:
            self.at_once -= 1
        return (429, {"retry-after": "0.002"}, {"error": {"message": "full"}}) if full else (200, {}, self.samples(body))

    def samples(self, body):
        token = body["token_ids"][0]
        content = [{"token_id": token, "logprob": -0.5}] * 3
        span = {"version": self.version, "start": 0, "end": 3}
        one = {"finish_reason": "stop", "token_ids": [token] * 3, "weight_versions": [span], "logprobs": {"content": content}}
        prompt = [None, *({str(token): {"logprob": -token / 8}} for token in body["token_ids"][1:])]
        choices = [{"index": index, **one} for index in range(body["sampling_params"].get("n", 1))]
        return {"choices": choices[::-1], "prompt_logprobs": prompt}


@pytest.fixture
def web():
    found = Server()
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


@pytest.fixture
def fast(monkeypatch):
    """The seconds it would have waited."""
    waits: list[float] = []
    monkeypatch.setattr(http.time, "sleep", waits.append)
    return waits


def sampler(web, max_length=64, retries=6, max_requests=32) -> DeploymentSampler:
    pool = Pool([Client(web.url, 10, retries)], max_length, max_requests)
    return DeploymentSampler(pool, 3, VERSION)


# ---- requests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 500, 503, None], ids=str)
def test_what_may_pass_is_tried_again(web, fast, status):
    web.answers = [(status, {}, {"error": "later"})] * 3
    assert Client(web.url).call("/x", {"a": 1}) == {"fine": True}
    assert web.asked == [("/x", {"a": 1})] * 4
    assert len(fast) == 3 and all(0.125 * 2**i <= wait <= 0.25 * 2**i for i, wait in enumerate(fast))


def test_retry_after_is_obeyed(web, fast):
    later = formatdate(time.time() + 7, usegmt=True)
    for value in ("3", later, "100000", "-5", "soon"):
        web.answers.append((503, {"retry-after": value}, {}))
    Client(web.url).call("/x")
    assert fast[0] == 3 and 5 <= fast[1] <= 7.5 and fast[2] == http.MAX_WAIT_S and fast[3] == 0
    assert 2 <= fast[4] <= 4  # not understood: as without


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_request_at_fault_is_not_tried_again(web, fast, status):
    web.answers = [(status, {}, {"error": {"message": "the prompt\nis too long", "code": status}})]
    with pytest.raises(RequestRefusedError, match=rf"/x: {status}: the prompt is too long$") as caught:
        Client(web.url).call("/x", {})
    assert caught.value.status == status and len(web.asked) == 1 and fast == []


def test_after_the_last_retry_it_is_an_error(web, fast):
    web.answers = [(503, {}, b"<html>")] * 9
    with pytest.raises(ServerUnavailableError, match="/x: 503: <html>") as caught:
        Client(web.url, retries=2).call("/x")
    assert caught.value.status == 503 and len(web.asked) == 3


def test_a_server_that_does_not_listen_and_will_not(fast):
    url = f"http://127.0.0.1:{process.free_port()}"
    with pytest.raises(ServerUnavailableError, match=r"/x: no answer \(.*refused.*\); is the server running"):
        Client(url, retries=1).call("/x")
    fast.clear()
    with pytest.raises(ServerUnavailableError, match="its process has ended"):
        Client(url, gone=lambda: "its process has ended").call("/x")
    assert fast == []


def test_what_is_no_json_is_an_error(web, fast):
    web.answers = [(200, {}, b"<html>")]
    with pytest.raises(ServerUnavailableError, match="the response is not JSON"):
        Client(web.url, retries=0).call("/x")


# ---- concurrent requests ---------------------------------------------------------------------------------------------


def test_the_limit_grows_by_one_for_each_limits_worth():
    limit = AdaptiveLimit(4, 6)
    for _ in range(5):
        with limit.slot():
            pass
    assert limit.limit == 5
    for _ in range(100):
        with limit.slot():
            pass
    assert limit.limit == 6  # the highest


def test_one_congestion_halves_it_once():
    limit = AdaptiveLimit(8, 8)
    slots = [limit.slot() for _ in range(8)]
    troubles = [slot.__enter__() for slot in slots]
    for trouble in troubles:
        trouble()
    assert limit.limit == 4
    troubles[0]()  # its second attempt met another one
    assert limit.limit == 2
    for slot in slots:
        slot.__exit__(None, None, None)
    for _ in range(9):
        with limit.slot() as trouble:
            trouble()
    assert limit.limit == 1  # and never none


def test_no_more_than_the_limit_are_under_way():
    limit = AdaptiveLimit(2, 2)
    with limit.slot(), limit.slot():
        entered = threading.Event()

        def enter() -> None:
            with limit.slot():
                entered.set()

        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(0.05)
    assert entered.wait(WAIT_S)
    thread.join()


@pytest.mark.slow
def test_it_finds_out_what_the_server_bears(web):
    web.capacity = 5
    found = sampler(web, retries=1000)
    answers = [found.sample([7], 1, SamplingParams(max_tokens=3)) for _ in range(300)]
    assert all(future.result(WAIT_S).sequences[0].tokens == [7, 7, 7] for future in answers)
    assert 0 < web.refused < 150, "it does not slow down"


# ---- samples ---------------------------------------------------------------------------------------------------------


def test_tokens_in_tokens_and_logprobs_out(web):
    params = SamplingParams(max_tokens=5, seed=11, temperature=0.7, top_k=-1, top_p=0.9, min_p=0.1, stop=[258, "\n"])
    found = sampler(web).sample([9, 8], 2, params).result(WAIT_S).sequences
    assert [(one.tokens, one.logprobs, one.stop_reason, one.step) for one in found] == [([9] * 3, [-0.5] * 3, "stop", 3)] * 2
    asked = web.asked[0][1]
    assert asked["token_ids"] == [9, 8]
    expected = {"n": 2, "seed": 11, "max_tokens": 5, "temperature": 0.7, "top_k": 0, "top_p": 0.9, "min_p": 0.1, "logprobs": 0}
    expected |= {"stop": ["\n"], "stop_token_ids": [258], "ignore_eos": False}
    assert expected.items() <= asked["sampling_params"].items()


@pytest.mark.parametrize(("stop", "ignores"), [(None, False), ([], True), ("x", False)])
def test_what_ends_a_completion(web, stop, ignores):
    sampler(web).sample([1], 1, SamplingParams(max_tokens=3, stop=stop)).result(WAIT_S)
    assert web.asked[0][1]["sampling_params"]["ignore_eos"] is ignores


def test_without_a_seed_every_request_has_its_own(web):
    found = sampler(web)
    for _ in range(3):
        found.sample([1], 1, SamplingParams(max_tokens=3)).result(WAIT_S)
    assert len({body["sampling_params"]["seed"] for _, body in web.asked}) == 3


def test_prompt_logprobs(web):
    assert sampler(web).compute_logprobs([4, 8, 16]).result(WAIT_S) == [None, -1.0, -2.0]


def test_a_prompt_that_is_too_long_is_an_error_and_is_not_sent(web):
    found = sampler(web, max_length=10)
    with pytest.raises(RolloutError, match="a prompt of 8 tokens and max_tokens=3 do not fit into the 10"):
        found.sample([1] * 8, 1, SamplingParams(max_tokens=3))
    with pytest.raises(RolloutError, match="a prompt of 10 tokens and max_tokens=None do not fit"):
        found.sample([1] * 10)
    with pytest.raises(RolloutError, match="the prompt is empty"):
        found.sample([])
    assert web.asked == []
    found.sample([1] * 8).result(WAIT_S)
    assert web.asked[0][1]["sampling_params"]["max_tokens"] == 2  # what is left


def change(**changes):
    return lambda answer: answer["choices"][0].update(changes)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            change(weight_versions=[{"version": VERSION}, {"version": "step-4-x"}]),
            "asked for weights step-3-abc, the server has",
        ),
        (change(weight_versions=None), "has sampled from unknown ones"),
        (change(finish_reason="abort"), r"has aborted a completion \(abort\)"),
        (change(token_ids=[7, 7]), "has sent 2 tokens and 3 logprobs"),
        (change(token_ids=[], logprobs={"content": []}), "has sent 0 tokens and 0 logprobs"),
        (change(logprobs=None), "response cannot be read"),
        (lambda answer: answer["choices"].pop(), "asked for 2 samples, the server has sent 1"),
        (lambda answer: answer.clear(), r"response cannot be read \(KeyError 'choices'\)"),
    ],
)
def test_answers_that_are_not_what_was_asked_for(web, damage, message):
    answer = web.samples({"token_ids": [7], "sampling_params": {"n": 2}})
    damage(answer)
    web.answers = [(200, {}, answer)]
    with pytest.raises(RolloutError, match=message):
        sampler(web).sample([7], 2, SamplingParams(max_tokens=3)).result(WAIT_S)


def test_replicas_take_turns(web):
    other = Server()
    thread = threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    found = DeploymentSampler(Pool([Client(web.url), Client(other.url)], 64, 8), 3, VERSION)
    for future in [found.sample([1], 1, SamplingParams(max_tokens=3)) for _ in range(10)]:
        future.result(WAIT_S)
    other.shutdown()
    thread.join()
    other.server_close()
    assert len(web.asked) == len(other.asked) == 5


# ---- deployments -----------------------------------------------------------------------------------------------------


@pytest.fixture
def sleeper():
    """A process in a group of its own, with a child."""
    code = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    yield child
    process.stop(child.pid, process.birth(child.pid) or "")


def written(manager, name, child, born=None):
    """As the manager writes it down."""
    folder = manager.folder / name / "0"
    folder.mkdir(parents=True)
    record = {
        "pid": child.pid,
        "born": born or process.birth(child.pid),
        "url": "http://127.0.0.1:9",
        "options": asdict(options("/none")),
        "log": "/none",
    }
    (folder / "server.json").write_text(json.dumps(record))
    return RunningServer(**{**record, "options": options("/none")})


def test_what_runs_is_listed_and_deleted(tmp_path, sleeper):
    manager = DeploymentManager(tmp_path)
    one = written(manager, "mine", sleeper)
    assert manager.running() == {"mine": [one]} and one.alive
    manager.delete("mine")
    assert manager.running() == {} and not one.alive and list(tmp_path.iterdir()) == []


def test_a_process_that_has_got_an_old_ones_number_is_left_alone(tmp_path, sleeper):
    manager = DeploymentManager(tmp_path)
    written(manager, "mine", sleeper, born="1")
    assert manager.running() == {}
    manager.delete("mine")
    assert sleeper.poll() is None


def test_what_killed_runs_have_left_is_ended(tmp_path, sleeper):
    manager = DeploymentManager(tmp_path)
    one = written(manager, "run-1", sleeper)
    with manager.held("run-1"):
        manager.reap("run-")  # in use
    manager.reap("other-")
    assert one.alive
    manager.reap("run-")
    assert not one.alive


def test_a_deployment_has_one_user(tmp_path):
    manager = DeploymentManager(tmp_path)
    with (
        manager.held("mine"),
        pytest.raises(ConfigError, match=r"deployment\.name: mine is used by process \d+; wait for it, or choose another name"),
        manager.held("mine"),
    ):
        pass
    with pytest.raises(ConfigError, match="expected letters"), manager.held("../mine"):
        pass


def options(python: str) -> process.Options:
    return process.Options(python, "model", "float32", 512, 1 << 20, 1, 0, ())


def test_a_python_without_vllm(tmp_path):
    manager = DeploymentManager(tmp_path)
    with pytest.raises(ConfigError, match=r"deployment\.python: /no/python cannot be started .*; run `make vllm`"):
        manager.create("mine", options("/no/python"), 1, 10)
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(ConfigError, match="has no vLLM"):
        manager.create("mine", options(str(bare)), 1, 10)


def test_a_server_that_ends_immediately_reports_why(tmp_path):
    """It passes for a Python that has vLLM, and then fails as vLLM does."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n[ $1 = -c ] && echo True && exit\necho 'ValueError: no such model'\necho the end\nexit 1\n")
    python.chmod(0o755)
    manager = DeploymentManager(tmp_path / "state")
    with pytest.raises(RolloutError, match=r"process \d+ has ended; its log says: ValueError: no such model"):
        manager.create("mine", options(str(python)), 1, 30)
    assert manager.running() == {}


@pytest.mark.parametrize(
    ("dtype", "says"), [("float32", "is gone$"), ("bfloat16", r"is gone; .* set deployment\.dtype=float32$")]
)
def test_a_server_that_dies_of_its_first_tokens(tmp_path, web, fast, dtype, says):
    """The error comes before the run starts, and has a remedy if the element type may be the cause."""
    web.answers = [(500, {}, {"error": {"message": "the engine is gone"}})] * 7
    one = RunningServer(1, "0", web.url, replace(options("/none"), dtype=dtype), "/none")
    manager = DeploymentManager(tmp_path)
    manager.client = lambda one: Client(one.url)
    with pytest.raises(RolloutError, match=says):
        manager.warm_up(one)
    assert web.asked[0][1]["sampling_params"]["max_tokens"] > 1


def test_waiting_reports_progress_and_ends(web, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "PROGRESS_S", 0.0)
    monkeypatch.setattr(process, "POLL_S", 0.01)
    log, said = tmp_path / "log", []
    log.write_text("loading\nweights 3/4\n\n")
    web.answers = [(503, {}, {})] * 3
    process.wait_until_healthy(Client(web.url), log, 10, said.append)
    assert len(said) == 3 and all(line.endswith("; weights 3/4") for line in said)
    web.answers = [(503, {}, {})] * 1000
    with pytest.raises(RolloutError, match=r"not ready after 0 s \(.*503.*\); its log ends with: weights 3/4"):
        process.wait_until_healthy(Client(web.url), log, 0.05, said.append)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"on_exit": "stay"}, "on_exit: expected delete or keep"),
        ({"on_exit": "keep"}, r"on_exit=keep needs deployment\.name"),
        ({"replicas": 0}, "replicas must be at least 1"),
        ({"deltas": -1}, "must be at least 0"),
        ({"dtype": "float16"}, "dtype: expected float32 or bfloat16, got 'float16'"),
        ({"url": "http://x", "replicas": 2}, r"leave deployment\.replicas=1"),
    ],
)
def test_configurations_that_make_no_sense(fields, message):
    with pytest.raises(ConfigError, match=message):
        VllmConfig(**fields)


def test_trainers_that_it_cannot_serve(make_trainer):
    with pytest.raises(ConfigError, match="needs backend=local"):
        VllmConfig().deploy(object(), live=True)
    with pytest.raises(ConfigError, match=r"dtype: vLLM serves float32 or bfloat16, and the model is in float64; set one"):
        VllmConfig().deploy(make_trainer(dtype="float64"), live=True)


@pytest.mark.parametrize(
    ("trainer", "config", "servers", "arguments"),
    [
        (2, {"replicas": 1}, ["6"], ""),
        (2, {"replicas": 2}, ["6", "7"], ""),
        (2, {"replicas": 3}, ["6", "7", "6"], "--gpu-memory-utilization 0.01"),
        (2, {"gpus": [3, 2]}, ["7,6"], "--tensor-parallel-size 2"),
        (1, {"replicas": 2, "gpus": [3, 1]}, ["7", "5"], ""),
        (4, {"replicas": 2}, ["4", "5"], "--gpu-memory-utilization 0.01"),
        (2, {"gpus": [1]}, ["5"], "--gpu-memory-utilization 0.01"),
    ],
)
def test_ranks_and_servers_see_their_gpus_only(trainer, config, servers, arguments, monkeypatch, tmp_path):
    """The environment of each process, if the command sees the GPUs 4 to 7 of a machine."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    trainer_gpus = LocalConfig(gpus=trainer).gpu_numbers()
    given = VllmConfig(**config)
    options = given.options_for(ModelConfig(str(tmp_path), dtype="float32"), 512, None, trainer_gpus)
    seen = [process.environment(options, tmp_path / "python", place)["CUDA_VISIBLE_DEVICES"] for place in range(given.replicas)]
    assert seen == servers
    command = " ".join(process.command(options, 1))
    assert arguments in command and ("--gpu-memory" in command) == ("--gpu-memory" in arguments)
    # A record of the registry keeps them.
    one = RunningServer(1, "2", "http://127.0.0.1:3", options, "log")
    assert registry._running(json.loads(json.dumps(asdict(one)))) == one

    for rank in trainer_gpus:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        choose_gpu()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == str(4 + rank)
    # In the rank, torch counts one GPU. The number of GPUs of the group is not refused there.
    monkeypatch.setenv("WORLD_SIZE", str(trainer))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert LocalConfig(gpus=trainer).torch_device().type == "cuda"


def test_what_a_server_is_started_with(make_trainer, tiny_folder):
    """Full weights and adapters; chunked prefill and seeds do not go together, nor do its control routes and other machines."""
    full, adapted = (VllmConfig(max_length=9000).options(make_trainer(lora_rank=rank)) for rank in (0, 9))
    assert (full.model, full.dtype, full.lora_rank, adapted.model) == (str(tiny_folder), "float32", 0, str(tiny_folder))
    plain, with_adapters = (" ".join(process.command(options, 1)) for options in (full, adapted))
    for command in (plain, with_adapters):
        assert "--no-enable-chunked-prefill" in command and "--max-num-batched-tokens 9000" in command
        assert "--host 127.0.0.1" in command
    assert "lora" not in plain and "--enable-lora --max-lora-rank 16 --max-loras 2" in with_adapters
    with pytest.raises(ConfigError, match=r"model\.lora_rank: vLLM takes adapters of rank 512 at most, got 513; lower it"):
        process.command(replace(full, lora_rank=513), 1)


def test_the_tolerance_goes_by_the_element_type(make_trainer):
    trainer = make_trainer()
    for fields, expected in (({}, 1e-3), ({"dtype": "bfloat16"}, 0.3), ({"logprob_tolerance": 0.5}, 0.5)):
        deployment = object.__new__(VllmDeployment)
        deployment._config, deployment._trainer = VllmConfig(**fields), trainer
        assert deployment._tolerance == expected
