"""A client of a server without the client package, and what its requests contain."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest
import tiny
import torch
from servertools import wait_until
from waiting import WAIT_S

from cookbook.server.handlers import silence
from cookbook.server.state import endpoint

tinker = pytest.importorskip("tinker")
proto = pytest.importorskip("tinker.proto.request_conv")
RATE = {"learning_rate": 1e-2}


class Client:
    """A client without the client package, so that it can repeat or omit requests, and continue on another server."""

    def __init__(self, server, session=None):
        self.server = server
        self.session = session or self.post("create_session", {})["session_id"]

    def send(self, path, body):
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        return httpx.post(f"{self.server.url}/api/v1/{path}", **content, timeout=WAIT_S)

    def post(self, path, body):
        response = self.send(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def fetch(self, request_id):
        return self.send("retrieve_future", {"request_id": request_id})

    def result(self, path, body):
        """The bytes of the result."""
        return self.fetch(self.post(path, body)["request_id"]).content

    def run(self, rank=4):
        message = {
            "session_id": self.session,
            "model_seq_id": 0,
            "base_model": "tiny",
            "lora_config": {"rank": rank, "seed": 1},
        }
        return json.loads(self.result("create_model", message))["model_id"]

    def sample(self, sampler, number, **params):
        prompt = {"chunks": [{"tokens": [5, 6, 7]}]}
        params = {"sampling_params": {"max_tokens": 6, **params}}
        return self.result("asample", {"sampling_session_id": sampler, "seq_id": number, "prompt": prompt, **params})


def passing(run, number, seed=0, loss="cross_entropy", forward_only=False, count=3):
    """The bytes of a pass."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, tiny.VOCABULARY, 9).tolist() for _ in range(count)]
    data = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": rng.normal(size=8).astype("f4").tolist()},
        )
        for row in rows
    ]
    asked = tinker.types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=None)
    request = tinker.types.ForwardBackwardRequest(forward_backward_input=asked, model_id=run, seq_id=number)
    message = proto.forward_backward_request_to_proto(request)
    message.forward_only = forward_only
    return message.SerializeToString()


def stepping(run, number):
    return {"model_id": run, "seq_id": number, "adam_params": RATE}


def weights(server, run):
    trainer = server.service.runs[run].trainer
    with trainer.in_memory():
        moments = {name: one.clone() for name, one in trainer.engine.optimizer.state().items()}
        return {**{name: one.detach().clone() for name, one in trainer.engine.model.trainable()}, **moments}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def asked(sampler, number):
    prompt = {"chunks": [{"tokens": [5, 6, 7]}]}
    return {"sampling_session_id": sampler, "seq_id": number, "prompt": prompt, "sampling_params": {"max_tokens": 6}}


def be_silent(server, session):
    """Returns when the session has left memory."""
    service = server.service
    service.sessions[session].last_seen -= service.config.session_timeout_s
    server.call(lambda: silence.unload_silent_sessions(service))
    wait_until(lambda: session not in service.moving)
    samplers = [one for one in service.samplers.values() if one.session_id != endpoint.OWNER]
    assert not service.sessions and not service.runs and not samplers and not service.snapshots
    assert len(service.requests) == 0 and service.requests.pending_bytes == 0 and service.requests.kept_bytes == 0
