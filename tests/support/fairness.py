"""A server whose turns a test decides."""

from __future__ import annotations

import itertools
import threading

import httpx
from waiting import WAIT_S, until

LARGE = {"max_tokens": 90, "stop": [], "seed": 1}


def held(worker):
    """Nothing is computed until the event is set. The jobs before have ended, and their times are counted."""
    begun, go = threading.Event(), threading.Event()
    worker.submit(lambda: begun.set() or go.wait(WAIT_S))
    assert begun.wait(WAIT_S)
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
        def found():
            response = self.post("retrieve_future", answer.json())
            return b"try_again" not in response.content and response

        return until(found, limit_s=300)


def is_idle(server):
    return not server.service.host.worker._schedule._ready
