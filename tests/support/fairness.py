"""A server whose turns a test decides."""

from __future__ import annotations

import itertools
import threading
import time

import httpx
from waiting import WAIT_S

LARGE = {"max_tokens": 90, "stop": [], "seed": 1}


def held(worker):
    """Nothing is computed until the event is set."""
    go = threading.Event()
    worker.submit(go.wait)
    return go


class Client:
    """A session with a sampler of the base model."""

    def __init__(self, url):
        self.url = url
        self.session = self.post("create_session", {}).json()["session_id"]
        asked = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        self.sampler = self.post("create_sampling_session", asked).json()["sampling_session_id"]
        self.count = itertools.count()

    def post(self, path, body):
        return httpx.post(f"{self.url}/api/v1/{path}", json=body, timeout=WAIT_S)

    def sample(self, num_samples=1, *, scored=None, **params):
        prompt = {"chunks": [{"tokens": scored or [5, 6, 7]}]}
        body = {"sampling_session_id": self.sampler, "seq_id": next(self.count), "num_samples": num_samples}
        body["prompt_logprobs"] = scored is not None
        return self.post("asample", {**body, "prompt": prompt, "sampling_params": {"max_tokens": 4, "seed": 7, **params}})

    def result(self, answer):
        deadline = time.monotonic() + 300
        while b"try_again" in (found := self.post("retrieve_future", answer.json())).content:
            assert time.monotonic() < deadline
        return found


def is_idle(server):
    return not server.service.host.worker._schedule._ready
