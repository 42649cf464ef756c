"""Recorded requests of the unmodified client, and a connection that sends arbitrary requests."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import servertools
import tinker
import tiny
from tinker.types.optimizer import OptimParamsBase

from cookbook.server.wire import encode

API = "/api/v1"
IN_TIME_S = 60.0  # an answer, and a promised result; the server holds a question for 30 s
STEP = tinker.AdamParams(learning_rate=1e-2)
PROMPT = tinker.ModelInput.from_ints([5, 6, 7, 8])
JSON = [("Content-Type", "application/json")]
SESSION = re.compile(rb"s[0-9a-f]{16}")


# ---- what honest clients send ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded:
    method: str
    path: str  # with its query
    content_type: str
    body: bytes

    @property
    def is_proto(self) -> bool:
        return self.content_type == encode.PROTOBUF

    @property
    def shape(self) -> Any:
        """The same for requests that say the same of other things."""
        keys = sorted(json.loads(self.body)) if self.body and not self.is_proto else len(self.body)
        return self.method, re.sub(r"[0-9]+", "", SESSION.sub(b"", self.path.encode()).decode()), str(keys)

    def of(self, session_id: str, recorded_id: bytes) -> Recorded:
        """As the client of another session would have sent it."""
        own = session_id.encode()
        path = self.path.encode().replace(recorded_id, own).decode()
        return Recorded(self.method, path, self.content_type, self.body.replace(recorded_id, own))


class Recorder:
    """Around an application: keeps one request of every shape, in their order."""

    def __init__(self, app: Any, into: dict[Any, Recorded]) -> None:
        self.app, self.into = app, into

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = bytearray()

        async def heard() -> Any:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        await self.app(scope, heard, send)
        query = scope["query_string"].decode()
        headers = dict(scope["headers"])
        path = scope["raw_path"].decode() + (f"?{query}" if query else "")
        found = Recorded(scope["method"], path, headers.get(b"content-type", b"").decode(), bytes(body))
        self.into.setdefault(found.shape, found)


def rows(seed_: int = 0, count: int = 2) -> list[tinker.Datum]:
    draw = np.random.default_rng(seed_)
    found = []
    for _ in range(count):
        tokens = draw.integers(0, tiny.VOCABULARY, 9).tolist()
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 8, "advantages": [0.5] * 8, "logprobs": [-5.0] * 8}
        found.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return found


def everything(url: str) -> None:
    """All that the client can ask, once."""
    with tinker.ServiceClient(base_url=url, api_key=servertools.KEY, user_metadata={"k": "v"}) as service:
        training = service.create_lora_training_client("tiny", rank=1, seed=3, user_metadata={"k": "v"}).result()
        training.forward(rows(), "cross_entropy").result()
        training.forward_backward(rows(), "ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})
        training.optim_step(STEP).result()
        training.forward_backward_custom(rows(), lambda _, logprobs: (sum(one.sum() for one in logprobs), {})).result()
        squares = service.create_custom_loss(_squares, {"logprobs": 1, "advantages": 1}).result()
        training.forward_backward_custom(rows(), squares).result()
        training.optim_step(OptimParamsBase(type="adamw", learning_rate=1e-2, grad_accumulation_normalization="num_sequences"))
        state = training.save_state("one", ttl_seconds=3600, user_metadata={"k": "v"}).result().path
        training.load_state_with_optimizer(state).result()
        service.create_training_client_from_state(state).result()
        named = training.save_weights_for_sampler("sampled").result().path
        exported = training.save_weights_external("exported").result().path
        samplers = [service.create_sampling_client(base_model="tiny").result()]
        samplers.append(service.create_sampling_client(model_path=named).result())
        samplers.append(training.save_weights_and_get_sampling_client().result())
        samplers.append(training.save_weights_and_get_sampling_client(kind="inflight").result())
        params = tinker.SamplingParams(max_tokens=4, seed=3, stop=["e"], temperature=0.9, top_k=50, top_p=0.9)
        samplers[0].sample(PROMPT, 2, params, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
        samplers[-1].compute_logprobs(PROMPT).result()
        rest = service.create_rest_client()
        rest.get_weights_info_by_tinker_path(state).result()
        rest.list_training_runs().result()
        rest.list_user_checkpoints().result()
        rest.set_checkpoint_ttl_from_tinker_path(state, 7200).result()
        rest.publish_checkpoint_from_tinker_path(state).result()
        rest.get_external_weights_urls(exported).result()
        session_id = training.model_id.partition(":")[0]
        sampler_id = f"{session_id}:sample:0"
        # Requests that the client sends only sometimes.
        with contextlib.closing(Wire(url)) as wire:
            for path, body in (
                ("cancel_future", {"request_id": f"{sampler_id}/0"}),
                ("join_sampling_session", {"sampling_session_id": sampler_id}),
                ("cookbook/batch", {"sampling_session_id": sampler_id, "count": 1}),
                ("session_heartbeat", {"session_id": session_id}),
                ("telemetry", {"events": [], "session_id": session_id}),
            ):
                wire.post(path, body)
            target = {"sampling_session_id": sampler_id, "cloned_sampler_id": 0}
            wire.post("retrieve_futures", {"target": target, "prev_cursor": 0, "timeout": 0.0, "retrieved_request_ids": []})
            messages = [{"role": "user", "content": "a"}]
            for path, body in (
                ("chat/completions", {"model": "tiny", "messages": messages, "max_tokens": 2, "logprobs": True}),
                ("completions", {"model": f"runs/{training.model_id}", "prompt": "ab", "max_tokens": 2, "stop": ["e"]}),
            ):
                wire.ask("POST", f"/v1/{path}", json.dumps(body).encode(), JSON)
            body = {"model": "tiny", "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2}}
            wire.ask("POST", "/inference/v1/generate", json.dumps(body).encode(), JSON)
            wire.ask("GET", "/v1/models")
            for path in (f"samplers/{sampler_id}", f"sessions/{session_id}", "sessions", "cookbook", "get_server_capabilities"):
                wire.ask("GET", f"{API}/{path}")
        rest.delete_checkpoint_from_tinker_path(named).result()


def _squares(logprobs, advantages):
    return (logprobs**2 * advantages).sum(), {"custom/mean:mean": logprobs.mean()}


def honest(url: str) -> list[Any]:
    """All that a client sees of a small run: numbers that must not depend on what else the server was asked."""
    with contextlib.closing(honest_in_two_parts(url)) as play:
        next(play)
        return next(play)


def honest_in_two_parts(url: str) -> Iterator[Any]:
    """The play of :func:`honest`. Yield the id of its session after the first step, and all that it has seen at the end."""
    with tinker.ServiceClient(base_url=url, api_key=servertools.KEY) as service:
        client, seen = service.create_lora_training_client("tiny", rank=2, seed=5).result(), []
        for step in range(3):
            if step == 1:
                yield client.model_id.partition(":")[0]
            output = client.forward_backward(rows(step), "cross_entropy").result()
            metrics = client.optim_step(STEP).result().metrics
            seen.append((output.metrics, [row["logprobs"].to_numpy().tobytes() for row in output.loss_fn_outputs], metrics))
        sampler = client.save_weights_and_get_sampling_client().result()
        answer = sampler.sample(PROMPT, 2, tinker.SamplingParams(max_tokens=6)).result()
        seen.append([(one.tokens, list(one.logprobs)) for one in answer.sequences])
        yield seen


# ---- sending ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """``status`` 0: the connection was closed without one."""

    status: int
    body: bytes
    seconds: float

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            return None


class Wire:
    """A connection that sends whatever it is told, and the API key ``key``, if the headers have none."""

    def __init__(self, url: str, key: str = servertools.KEY) -> None:
        self.key = key
        self.host, self.port = urlsplit(url).hostname or "", urlsplit(url).port
        self._connection = http.client.HTTPConnection(self.host, self.port, timeout=IN_TIME_S)

    def ask(self, method: str, path: str, body: bytes = b"", headers: Sequence[tuple[str, str]] = ()) -> Answer:
        """Raises TimeoutError: no answer in time."""
        began = time.monotonic()
        for again in (True, False):
            try:
                self._send(method, path, body, headers)
                response = self._connection.getresponse()
                found = response.read()
                return Answer(response.status, found, time.monotonic() - began)
            except TimeoutError:
                self._connection.close()
                raise
            except (http.client.HTTPException, OSError):  # kept alive for too long, or closed upon us
                self._connection.close()
                if not again:
                    return Answer(0, b"", time.monotonic() - began)
        raise AssertionError

    def _send(self, method: str, path: str, body: bytes, headers: Sequence[tuple[str, str]]) -> None:
        self._connection.putrequest(method, path, skip_accept_encoding=True)
        for name, value in headers:
            self._connection.putheader(name, value)
        if not any(name.lower() == "x-api-key" for name, _ in headers):
            self._connection.putheader("X-API-Key", self.key)
        self._connection.putheader("Content-Length", str(len(body)))
        self._connection.endheaders()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before it was whole: there is an answer
            self._connection.send(body)

    def post(self, path: str, body: Any) -> Answer:
        return self.ask("POST", f"{API}/{path}", json.dumps(body).encode(), JSON)

    def raw(self, data: bytes) -> Answer:
        """Bytes that need not be HTTP, and an end."""
        began = time.monotonic()
        with socket.create_connection((self.host, self.port), timeout=IN_TIME_S) as one:
            with contextlib.suppress(OSError):
                one.sendall(data)
                one.shutdown(socket.SHUT_WR)
            found = b""
            with contextlib.suppress(ConnectionResetError):
                while part := one.recv(1 << 16):
                    found += part
        status = re.match(rb"HTTP/1\.1 (\d+)", found)
        return Answer(int(status[1]) if status else 0, found, time.monotonic() - began)

    def close(self) -> None:
        self._connection.close()


def recorded(model: Path, folder: Path) -> tuple[list[Recorded], dict[str, Any], list[Any]]:
    """Requests of the client, the server's description of itself, and the results of an honest client without an attack."""
    kept: dict[Any, Recorded] = {}
    with servertools.running(model, folder, around=lambda app: Recorder(app, kept), names=["tiny"]) as server:
        seen = honest(server.url)
        kept.clear()
        everything(server.url)
        found = list(kept.values())
        with contextlib.closing(Wire(server.url)) as wire:
            openapi = wire.ask("GET", f"{API}/openapi.json").json()
    return found, openapi, seen
