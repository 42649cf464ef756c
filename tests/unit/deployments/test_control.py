"""Weights on their way into servers: the order of the calls, what is left when one fails, and whose samples are whose.

The server is one of this file, with vLLM's routes and real weights behind them, and no model. The real one is in
tests/system/test_vllm.py.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import tiny
from marks import rest_slow
from waiting import WAIT_S

from cookbook.checkpoints import manifest
from cookbook.checkpoints.tensor_digests import Weights
from cookbook.deployments.vllm import api
from cookbook.deployments.vllm.deployment import check_logprobs
from cookbook.deployments.vllm.http import Client
from cookbook.deployments.vllm.replicas import AdapterServers, Servers
from cookbook.deployments.vllm.sampler import Pool
from cookbook.deployments.vllm.weight_store import WeightStore
from cookbook.deployments.weight_sync import ChainSyncer
from cookbook.errors import RolloutError
from cookbook.types import AdamParams, SamplingParams


class Handler(BaseHTTPRequestHandler):
    def answer(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "null")
        status, content = self.server.answer(self.path, body)
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = answer  # noqa: N815 - so BaseHTTPRequestHandler calls them

    def log_message(self, *args) -> None:
        """Nothing to stderr."""


class FakeServer(ThreadingHTTPServer):
    """Holds weights as a vLLM worker does. ``fails`` names calls that are answered with an error."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.holder = WeightStore()
        self.version = "as it came"
        self.paused = False
        self.calls: list[str] = []
        self.fails: set[str] = set()
        self.adapters: dict[str, str] = {}  # name -> folder
        self.max_length = 64
        self.url = f"http://127.0.0.1:{self.server_port}"

    def answer(self, path, body):
        call = body["method"] if path == api.RPC else path
        if call not in ("cookbook_status", "/v1/models"):
            self.calls.append(call)
        if call in self.fails:
            if call == "cookbook_load":  # fails in the middle, so its effect is unknown
                self.holder.begin()
            return 500, {"error": {"message": "out of order"}}
        if path == api.RPC:
            found = getattr(self, call)(*body.get("args", []))
            return 200, {"results": [found]}
        return 200, self.route(path, body)

    def route(self, path, body):
        if path.startswith("/pause") or path == "/resume":
            self.paused = path != "/resume"
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/v1/load_lora_adapter":
            assert body["lora_name"] not in self.adapters and not body.get("load_inplace")
            self.adapters[body["lora_name"]] = body["lora_path"]
            return "Success: it is no JSON."
        elif path == "/v1/unload_lora_adapter":
            self.adapters.pop(body["lora_name"], None)
            return "Success: neither is this."
        elif path == "/v1/models":
            own = {"id": "policy", "parent": None, "max_model_len": self.max_length}
            return {"data": [own, *({"id": name, "parent": "policy", "max_model_len": None} for name in self.adapters)]}
        elif path == "/inference/v1/generate":
            return self.sampled(body)
        return {"success": True}

    def sampled(self, body):
        name = body.get("model", "policy")
        assert name == "policy" or Path(self.adapters[name]).is_dir()
        content = [{"token_id": 1, "logprob": -0.5}]
        span = {"version": self.version, "start": 0, "end": 1}
        one = {
            "index": 0,
            "finish_reason": "stop",
            "token_ids": [1],
            "weight_versions": [span],
            "logprobs": {"content": content},
        }
        return {"model": name, "choices": [one]}

    # ---- what a worker does ------------------------------------------------------------------------------------------

    def cookbook_status(self):
        return self.holder.status()

    def cookbook_prepare(self, folder):
        self.holder.prepare(Path(folder))

    def cookbook_load(self):
        assert self.paused
        self.holder.begin()
        self.holder.finish()
        return self.holder.status()

    def cookbook_add_adapter(self, name, folder):
        self.holder.add_adapter(name)

    def cookbook_drop_adapter(self, name):
        self.holder.drop_adapter(name)


@pytest.fixture
def fakes():
    """Two of them."""
    found = [FakeServer(), FakeServer()]
    threads = [threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.01}) for one in found]
    for thread in threads:
        thread.start()
    yield found
    for one, thread in zip(found, threads, strict=True):
        one.shutdown()
        thread.join()
        one.server_close()


def test_a_sequence_has_to_fit_into_every_server(fakes):
    fakes[1].max_length = 32
    assert api.max_length([Client(one.url) for one in fakes]) == 32


def train(trainer, lr=1e-3):
    trainer.forward_backward(tiny.datums(2, seed=trainer.step), "cross_entropy")
    trainer.optim_step(AdamParams(learning_rate=lr)).result()
    return trainer.step


def servers(kind, fakes, **options):
    clients = [Client(one.url, 10, retries=0) for one in fakes]
    pool = Pool(clients, api.max_length(clients), 8)
    return kind(clients, pool, 0, **options)


def ask(sampler):
    return sampler.sample([5], 1, SamplingParams(max_tokens=1)).result(WAIT_S).sequences[0]


def kind_of(sampler):
    """Kind of the checkpoint that the last sync has sent."""
    return manifest.read(sampler.checkpoint)["kind"]


PUT = ["cookbook_prepare", "/pause?mode=wait", "/update_weight_version", "cookbook_load", "/reset_prefix_cache", "/resume"]


def test_weights_are_read_before_anything_pauses(make_trainer, fakes):
    trainer = make_trainer()
    syncer = ChainSyncer(trainer, servers(Servers, fakes, live=True))
    for _ in range(2):
        sampler = syncer.sync(trainer.step)
        for one in fakes:
            assert one.calls == PUT and one.version == sampler.version
            one.calls.clear()
        train(trainer)


@pytest.mark.parametrize("call", PUT[1:])
def test_a_server_is_never_left_paused(make_trainer, fakes, call):
    """All servers resume except one that refuses; callers get an error that its weights are unknown."""
    trainer = make_trainer()
    syncer = ChainSyncer(trainer, servers(Servers, fakes, live=True))
    older = syncer.sync(0)
    older_digest = fakes[1].holder.status()["digest"]
    fakes[1].fails = {call}
    match = "out of order" if call == "/resume" else r"may now serve either old or new weights \(.*out of order\)"
    with pytest.raises(RolloutError, match=match):
        syncer.sync(train(trainer))
    assert not fakes[0].paused and fakes[1].paused == (call == "/resume")
    if fakes[1].holder.status()["digest"] != older_digest:  # no older sampler takes what is there for its own weights
        assert fakes[1].version != older.version
    fakes[1].fails.clear()
    assert kind_of(syncer.sync(trainer.step)) == "base" and not fakes[1].paused
    assert fakes[0].holder.status()["digest"] == fakes[1].holder.status()["digest"]


@pytest.mark.slow
def test_of_a_lagging_deployment_older_weights_are_put_back(make_trainer, fakes):
    trainer = make_trainer()
    replicas = servers(Servers, fakes, live=False)
    syncer = ChainSyncer(trainer, replicas)
    samplers = []
    for _ in range(3):
        samplers.append(syncer.sync(trainer.step))
        train(trainer)
    digests = [manifest.read(sampler.checkpoint)["weights"] for sampler in samplers]
    for place in (1, 1, 2, 0):
        assert [ask(samplers[place]).step for _ in fakes] == [place] * 2
        assert {one.holder.status()["digest"] for one in fakes} == {digests[place]}
    assert fakes[0].calls.count("cookbook_load") == 3 + 3  # not where they are served already
    assert kind_of(syncer.sync(trainer.step)) == "base"
    assert replicas.in_use() == {sampler.checkpoint for sampler in samplers} and all(
        one.checkpoint.is_dir() for one in samplers
    )
    del samplers
    syncer.sync(train(trainer))
    assert len(list(trainer.folder.glob("sync-*"))) == 2  # the last base and its delta


def test_a_server_that_lies_when_older_weights_are_put_back(make_trainer, fakes, monkeypatch):
    trainer = make_trainer()
    syncer = ChainSyncer(trainer, servers(Servers, fakes, live=False))
    older = syncer.sync(0)
    newest = syncer.sync(train(trainer))
    monkeypatch.setattr(FakeServer, "cookbook_load", lambda self: None)
    for _ in range(2):  # it is not believed the second time either
        with pytest.raises(
            RolloutError, match=r"should serve step 0 \(\w+\.\.\.\) and serves \w+\.\.\.; do not sample from it"
        ):
            ask(older)
    monkeypatch.undo()
    assert ask(newest).step == 1 and ask(older).step == 0


def test_of_a_live_one_an_older_sampler_is_refused(make_trainer, fakes):
    trainer = make_trainer()
    syncer = ChainSyncer(trainer, servers(Servers, fakes, live=True))
    older = syncer.sync(0)
    syncer.sync(train(trainer))
    with pytest.raises(RolloutError, match=r"asked for weights step-0-\w+, the server has sampled from \['step-1-\w+'\]"):
        ask(older)


def adapter_servers(trainer, fakes):
    number = iter(range(100))
    save = lambda: trainer.save_adapted_weights(f"adapted-{next(number)}").result()  # noqa: E731
    return servers(AdapterServers, fakes, save_adapted=save)


@pytest.mark.slow
def test_adapters_lie_beside_each_other_on_the_trainers_weights(make_trainer, fakes):
    trainer = make_trainer(lora_rank=2)
    syncer = ChainSyncer(trainer, adapter_servers(trainer, fakes), deltas=0)
    fakes[0].adapters["of an earlier run"] = "/none"
    samplers = []
    for _ in range(3):
        samplers.append(syncer.sync(trainer.step))
        train(trainer)
    assert fakes[0].calls.count("cookbook_load") == 1 and "/pause?mode=wait" not in fakes[0].calls[6:]
    assert set(fakes[0].adapters) == set(fakes[1].adapters) == {sampler.adapter for sampler in samplers}
    assert [ask(sampler).step for sampler in samplers] == [0, 1, 2]
    kept = [sampler.checkpoint for sampler in samplers]
    assert all(manifest.read(folder)["lora"] for folder in kept)
    assert {path for path in trainer.folder.iterdir() if path.is_dir()} == set(kept)  # the weights under them are gone
    del samplers
    newest = syncer.sync(trainer.step)
    assert list(fakes[1].adapters) == [newest.adapter] and not any(folder.exists() for folder in kept)


def test_of_an_adapter_the_weights_under_it_count_too(make_trainer, fakes):
    """A restarted server has its original weights; the sync sends the trainer's."""
    trainer = make_trainer(lora_rank=2)
    replicas = adapter_servers(trainer, fakes)
    syncer = ChainSyncer(trainer, replicas, deltas=0)
    syncer.sync(0)
    under, fakes[0].holder._serving = fakes[0].holder._serving, Weights({}, {})
    assert [one.digest is None for one in replicas.report()] == [True, False]  # the adapter, on something else
    fakes[0].holder._serving, fakes[1].holder = under, WeightStore()
    assert [one.digest is None for one in replicas.report()] == [False, True]
    syncer.sync(train(trainer))
    assert fakes[1].holder.status()["digest"] == fakes[0].holder.status()["digest"] is not None


@pytest.mark.parametrize("lora_rank", rest_slow([0, 2]))
def test_what_an_older_sampler_answers_with_is_saved_and_served_again(make_trainer, fakes, lora_rank):
    """A run that is stopped between two syncs resumes with the older sampler: deltas are rebuilt, an adapter is loaded."""
    trainer = make_trainer(lora_rank=lora_rank)
    replicas = adapter_servers(trainer, fakes) if lora_rank else servers(Servers, fakes, live=False)
    syncer = ChainSyncer(trainer, replicas, deltas=0 if lora_rank else 50)
    syncer.sync(0)
    older = syncer.sync(train(trainer))
    digest = manifest.read(older.checkpoint)["weights"]
    saving = older.saving()
    del older
    syncer.sync(train(trainer))
    path = saving.args[0]
    assert path.is_dir()  # who is to save it keeps it
    saved = trainer.save_state("two", sampler=Saved(saving)).result()
    trainer.load_state(f"{saved.path}/sampler", optimizer=False).result()
    again = syncer.sync(0)
    assert manifest.read(again.checkpoint)["weights"] == digest
    trainer.load_state(saved).result()
    assert trainer.step == 2 and {one.digest for one in replicas.report()} == {digest}
    assert ask(again).tokens == [1]


class Saved:
    """A lagging sampler of which nothing is left but how to save it."""

    step = 1
    sample = compute_logprobs = None

    def __init__(self, saving) -> None:
        self.saving = lambda: saving


@pytest.mark.parametrize("call", ["/v1/load_lora_adapter", "cookbook_add_adapter"])
def test_an_adapter_that_one_server_does_not_take(make_trainer, fakes, call):
    trainer = make_trainer(lora_rank=2)
    syncer = ChainSyncer(trainer, adapter_servers(trainer, fakes), deltas=0)
    fakes[1].fails = {call}
    with pytest.raises(RolloutError, match=r"has not loaded the adapter \(.*out of order\)"):
        syncer.sync(0)
    fakes[1].fails.clear()
    assert ask(syncer.sync(0)).step == 0  # under the same name


def test_an_answer_from_another_adapter_is_an_error(make_trainer, fakes, monkeypatch):
    trainer = make_trainer(lora_rank=2)
    sampler = ChainSyncer(trainer, adapter_servers(trainer, fakes), deltas=0).sync(0)
    monkeypatch.setattr(
        FakeServer, "sampled", lambda self, body, own=FakeServer.sampled: {**own(self, body), "model": "policy"}
    )
    with pytest.raises(RolloutError, match=r"asked for adapter step-0-\w+, the server has sampled from policy"):
        ask(sampler)


def test_logprobs_that_are_not_the_trainers_stop_the_run(make_trainer):
    trainer = make_trainer()
    older = trainer.snapshot_sampler().result()
    check_logprobs(trainer, older, 1e-5)
    train(trainer)
    with pytest.raises(RolloutError, match=r"differ from the trainer's by [\d.]+, more than 1e-05: it does not compute with"):
        check_logprobs(trainer, older, 1e-5)
    older.compute_logprobs = lambda tokens, own=older.compute_logprobs: nans(own(tokens))
    with pytest.raises(RolloutError, match="differ from the trainer's by nan"):
        check_logprobs(trainer, older, 1e9)


def nans(future):
    found = future.result()
    future.result = lambda: [found[0], *[float("nan")] * (len(found) - 1)]
    return future
