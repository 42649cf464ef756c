"""Attacks on a server by the owner of an API key with a small quota, and what a bystander with another key must still get.

``tools/attack_server.py`` runs them beside a victim that trains, and measures the victim's waits. An attack adds faults to
``Attacker.faults``: responses with status 5xx, accepted requests that must be refused, and losses of the bystander.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import zstandard
from mutations import crowds

from cookbook.server.wire import messages_pb2 as pb

API = "/api/v1"
KEY, BYSTANDER = "tml-attacker", "tml-bystander"
IN_TIME_S = 60.0
PROTOBUF = "application/x-protobuf"
JSON = "application/json"
PROMPT = {"chunks": [{"tokens": [5, 6, 7]}]}
MILLION = 1_000_000
# Names that lead out of a folder, or that a file system or a terminal shows as something else.
NAMES = (
    "../../owned",
    "/tmp/owned",
    "..",
    ".",
    "",
    "a/b",
    "..\\owned",
    "%2e%2e%2fowned",
    "x" * 300,
    "a\0b",
    "a\nb",
    "\u202egnp",
    "CON",
    "~root",
    "$(id)",
    "\ud800",
)
NUMBERS = ("1e999", "-1e999", "NaN", "Infinity", "1" + "0" * 400, "1" + "0" * 5000, "-1", "1e308", "9223372036854775808", '""')

Attack = Callable[["Attacker"], None]
ATTACKS: dict[str, Attack] = {}


def attack(name: str) -> Callable[[Attack], Attack]:
    """Enter an attack in the table."""

    def enter(function: Attack) -> Attack:
        ATTACKS[name] = function
        return function

    return enter


def attacker_lines() -> str:
    """Return the lines of the file of keys."""
    return f"attacker: {KEY} max_runs=2 max_tokens=20000 max_disk_gb=0.05\nbystander: {BYSTANDER}\n"


class Tenant:
    """Requests with one API key. Responses with status 5xx are faults."""

    def __init__(self, url: str, key: str, faults: list[str]) -> None:
        self.url, self.key, self.faults = url, key, faults
        self.client = httpx.Client(base_url=url, headers={"X-API-Key": key}, timeout=IN_TIME_S, trust_env=False)

    def send(self, method: str, path: str, content: Any = b"", headers: Any = ()) -> httpx.Response:
        response = self.client.request(method, path, content=content, headers={"Content-Type": JSON, **dict(headers)})
        # 507 is the disk, 503 the end of the server: neither is caused by these attacks.
        if response.status_code >= 500:
            self.faults.append(f"{method} {path[:80]}: {response.status_code} {response.text[:200]}")
        if "Traceback" in response.text:
            self.faults.append(f"{method} {path[:80]}: a traceback of {len(response.text)} characters")
        return response

    def post(self, path: str, body: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send("POST", path if path.startswith("/") else f"{API}/{path}", content)

    def result(self, response: httpx.Response, wait_s: float = IN_TIME_S) -> Any:
        """Return the result of an accepted request; None: it has none in time."""
        end = time.monotonic() + wait_s
        while response.status_code == httpx.codes.OK and time.monotonic() < end:
            found = self.post("retrieve_future", {"request_id": response.json()["request_id"]})
            if found.headers.get("content-type") == PROTOBUF:
                return found.content
            if not found.content.startswith(b'{"type": "try_again"'):
                return found.json()
        return None

    def session(self) -> str:
        response = self.post("create_session", {})
        return str(response.json().get("session_id", "")) if response.status_code == httpx.codes.OK else ""

    def run(self, session_id: str, number: int = 0, **fields: Any) -> Any:
        """Create a training run, and return the result of the request."""
        body = {"session_id": session_id, "model_seq_id": number, "base_model": "tiny", "lora_config": {"rank": 2}}
        return self.result(self.post("create_model", {**body, **fields}))

    def sampler(self, session_id: str, number: int = 0) -> str:
        body = {"session_id": session_id, "sampling_session_seq_id": number, "base_model": "tiny"}
        return str(self.post("create_sampling_session", body).json().get("sampling_session_id", ""))

    def sample(self, sampler_id: str, number: int, **fields: Any) -> httpx.Response:
        body = {"sampling_session_id": sampler_id, "seq_id": number, "prompt": PROMPT, "sampling_params": {"max_tokens": 4}}
        return self.post("asample", {**body, **fields})


class Attacker(Tenant):
    """The attacker, and the bystander, whose objects must survive."""

    def __init__(self, url: str) -> None:
        self.faults: list[str] = []
        super().__init__(url, KEY, self.faults)
        self.bystander = Tenant(url, BYSTANDER, self.faults)
        host = urlsplit(url)
        self._address = (host.hostname or "", host.port or 80)

    def must(self, is_right: object, fault: str) -> None:
        if not is_right:
            self.faults.append(fault)

    def refused(self, response: httpx.Response, *statuses: int) -> None:
        """Add a fault unless the response is one of ``statuses``, and its error one short line."""
        self.must(response.status_code in statuses, f"expected {statuses}, got {response.status_code} {response.text[:200]}")
        self.must(len(response.text) < 2000, f"an error of {len(response.text):,} characters")

    def refused_or_done(self, response: httpx.Response) -> None:
        """Add a fault unless the request is answered, or refused by a limit."""
        self.must(response.status_code in (200, 400, 413, 429), f"got {response.status_code} {response.text[:200]}")

    @contextlib.contextmanager
    def connection(self, data: bytes = b"") -> Iterator[socket.socket]:
        with socket.create_connection(self._address, timeout=IN_TIME_S) as one:
            with contextlib.suppress(OSError):
                one.sendall(data)
            yield one

    def open_connections(self, count: int, data: bytes) -> Iterator[socket.socket]:
        for _ in range(count):
            one = socket.create_connection(self._address, timeout=IN_TIME_S)
            with contextlib.suppress(OSError):
                one.sendall(data)
            yield one

    def raw(self, data: bytes, wait_s: float = 10.0) -> bytes:
        """Send bytes and an end, and return all that the server sends until it closes the connection."""
        found = b""
        with self.connection(data) as one, contextlib.suppress(OSError):
            one.settimeout(wait_s)
            one.shutdown(socket.SHUT_WR)
            while part := one.recv(1 << 16):
                found += part
        if b" 50" in found[:13]:
            self.faults.append(f"{data[:60]!r}: {found[:200]!r}")
        return found

    def head(self, method: str = "POST", path: str = f"{API}/create_session", *lines: str) -> bytes:
        fixed = [f"{method} {path} HTTP/1.1", f"Host: {self._address[0]}", f"X-API-Key: {self.key}", f"Content-Type: {JSON}"]
        return "\r\n".join([*fixed, *lines, "", ""]).encode()

    def clean_up(self) -> None:
        for tenant in (self, self.bystander):
            with contextlib.suppress(httpx.HTTPError):
                for session_id in tenant.client.get(f"{API}/sessions").json().get("sessions", []):
                    tenant.client.post(f"{API}/sessions/{session_id}/finish")
            tenant.client.close()


def zstd(data: bytes) -> bytes:
    return bytes(zstandard.ZstdCompressor().compress(data))


def passed(model_id: str, number: int, datums: int = 1, tokens: int = 8) -> pb.ForwardBackwardRequest:
    """Return a valid forward and backward pass."""
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=number, loss_fn="cross_entropy")
    for _ in range(datums):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = struct.pack(f"<{tokens}i", *[5] * tokens)
        targets, weights = datum.loss_fn_inputs["target_tokens"], datum.loss_fn_inputs["weights"]
        targets.dense, targets.dtype = struct.pack(f"<{tokens}q", *[6] * tokens), pb.DTYPE_INT64
        weights.dense, weights.dtype = struct.pack(f"<{tokens}f", *[1.0] * tokens), pb.DTYPE_FLOAT32
        targets.shape.append(tokens)
        weights.shape.append(tokens)
    return message


def send_pass(c: Tenant, message: pb.ForwardBackwardRequest, **headers: str) -> httpx.Response:
    return c.send("POST", f"{API}/forward_backward", message.SerializeToString(), {"Content-Type": PROTOBUF, **headers})


def listed(part: str, count: int) -> str:
    return f"[{','.join([part] * count)}]"


# ---- bodies ----------------------------------------------------------------------------------------------------------


@attack("zstd bomb of 2 million chunks, asample")
def chunks(c: Attacker) -> None:
    head = '{"sampling_session_id":"s:sample:0","seq_id":0,"sampling_params":{},"prompt":{"chunks":'
    body = f"{head}{listed('{}', 2 * MILLION)}}}}}"
    for _ in range(3):
        c.refused(c.send("POST", f"{API}/asample", zstd(body.encode()), {"Content-Encoding": "zstd"}), 413)


@attack("zstd bomb of 8 million chunks, asample")
def more_chunks(c: Attacker) -> None:
    body = f'{{"prompt":{{"chunks":{listed("{}", 8 * MILLION)}}}}}'
    c.refused(c.send("POST", f"{API}/asample", zstd(body.encode()), {"Content-Encoding": "zstd"}), 413)


@attack("12 million tokens, /v1/completions")
def tokens(c: Attacker) -> None:
    body = zstd(f'{{"model":"tiny","prompt":{listed("1", 12 * MILLION)}}}'.encode())
    c.refused(c.send("POST", "/v1/completions", body, {"Content-Encoding": "zstd"}), 413)


@attack("1.5 million messages, /v1/chat/completions")
def messages(c: Attacker) -> None:
    body = zstd(f'{{"model":"tiny","messages":{listed("{}", 3 * MILLION // 2)}}}'.encode())
    c.refused(c.send("POST", "/v1/chat/completions", body, {"Content-Encoding": "zstd"}), 413)


@attack("500,000 tokens within all limits, 8 at the same time")
def long_prompts(c: Attacker) -> None:
    sampler_id = c.sampler(c.session())
    body = json.dumps({"sampling_session_id": sampler_id, "seq_id": 0, "sampling_params": {"max_tokens": 1}}).encode()[:-1]
    body += b', "prompt": {"chunks": [{"tokens": %s}]}}' % listed("5", 500_000).encode()
    at_once(lambda: c.refused(c.post("asample", body), 400, 413, 429), 8)


@attack("valid JSON and protobuf of many values, on every route, packed and not")
def corpus(c: Attacker) -> None:
    routes = [f"{API}/{name}" for name in ("asample", "create_session", "create_custom_loss", "optim_step", "forward_backward")]
    for body in crowds().values():
        for path in (*routes, "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"):
            for content, headers in ((zstd(body), {"Content-Encoding": "zstd"}), (body, {})):
                response = c.send("POST", path, content, headers)
                c.must(400 <= response.status_code < 500, f"{path}: {response.status_code}")


@attack("gzip, deflate, brotli and nested zstd bombs")
def packed(c: Attacker) -> None:
    zeros = bytes(1 << 26)
    bodies = {"gzip": gzip.compress(zeros, 1), "deflate": zlib.compress(zeros, 1), "br": bytes(64), "zstd": zstd(zstd(zeros))}
    for encoding, body in (*bodies.items(), ("zstd", zstd(zeros) * 64), ("zstd", b"\x28\xb5\x2f\xfd\x00\xff" + bytes(16))):
        for path in (f"{API}/forward_backward", f"{API}/asample", "/v1/completions"):
            c.refused(c.send("POST", path, body, {"Content-Encoding": encoding}), 413, 415, 422, 400)


@attack("JSON nested 100,000 levels deep")
def deep(c: Attacker) -> None:
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        body = f'{{"user_metadata":{opening * 100_000}1{closing * 100_000}}}'.encode()
        for path in (f"{API}/create_session", "/v1/chat/completions", f"{API}/create_custom_loss"):
            c.refused(c.post(path, body), 413)


@attack("tool schemas nested 490 levels deep")
def deep_tools(c: Attacker) -> None:
    for levels in (490, 30):
        nested: Any = {"type": "string"}
        for _ in range(levels):
            nested = {"type": "object", "properties": {"a": nested}}
        tools = [{"type": "function", "function": {"name": "f", "parameters": nested}}]
        body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "tools": tools, "max_tokens": 1}
        response = c.post("/v1/chat/completions", body)
        c.must(response.status_code in (200, 400, 413), f"{levels} levels: {response.status_code}")


@attack("numbers without a value: NaN, infinities, 5,000 digits")
def numbers(c: Attacker) -> None:
    session_id = c.session()
    c.run(session_id)
    run_id, sampler_id = f"{session_id}:train:0", c.sampler(session_id)
    count = 0
    for number in NUMBERS:
        for field in ("learning_rate", "beta1", "eps", "weight_decay"):
            count += 1
            body = f'{{"model_id":"{run_id}","seq_id":{count},"adam_params":{{"{field}":{number}}}}}'
            c.result(c.post("optim_step", body.encode()))
        for template in (
            f'{{"sampling_session_id":"{sampler_id}","seq_id":%s,"prompt":{{"chunks":[{{"tokens":[5]}}]}},"sampling_params":{{}}}}',
            f'{{"sampling_session_id":"{sampler_id}","seq_id":7,"prompt":{{"chunks":[{{"tokens":[%s]}}]}},"sampling_params":{{}}}}',
            f'{{"sampling_session_id":"{sampler_id}","seq_id":8,"num_samples":%s,"prompt":{{"chunks":[{{"tokens":[5]}}]}},'
            '"sampling_params":{"max_tokens":1}}',
        ):
            c.post("asample", (template % number).encode())
        for field in ("temperature", "top_p", "top_k", "n", "max_tokens", "seed", "min_p", "logprobs"):
            c.post("/v1/completions", f'{{"model":"tiny","prompt":"a","{field}":{number}}}'.encode())


@attack("duplicate keys, a byte-order mark, UTF-16 and UTF-32")
def duplicates(c: Attacker) -> None:
    c.post("create_session", b'{"display_name":"a","display_name":{"x":1},"user_metadata":{"k":1,"k":2}}')
    c.post("/v1/completions", b'{"model":"tiny","prompt":"a","max_tokens":1,"max_tokens":2,"stop":["x"],"stop":"y"}')
    for encoding in ("utf-16", "utf-32", "utf-8-sig"):
        for path in (f"{API}/create_session", "/v1/completions"):
            c.refused(c.post(path, '{"model":"tiny","prompt":"a"}'.encode(encoding)), 400, 422)


@attack("damaged protobuf: 2 million empty datums, shapes of 2^62, groups")
def protobuf(c: Attacker) -> None:
    session_id = c.session()
    c.run(session_id)
    path, headers = f"{API}/forward_backward", {"Content-Type": PROTOBUF}
    for body in (b"\x1a\x00" * 2 * MILLION, b"\x0b" * 100_000, b"\xff" * 1000, b"\x1a\xff\xff\xff\xff\x0f"):
        c.refused(c.send("POST", path, body, headers), 413, 422)
    for number, shape in enumerate(([1 << 62], [1 << 31, 1 << 31], [0] * 30, [-1]), 1):
        message = passed(f"{session_id}:train:0", number)
        del message.data[0].loss_fn_inputs["weights"].shape[:]
        message.data[0].loss_fn_inputs["weights"].shape.extend(shape)
        result = c.result(send_pass(c, message))
        c.must(isinstance(result, dict) and "error" in result, f"shape {shape}: {str(result)[:100]}")


@attack("sparse tensors that expand to 8 TB")
def sparse(c: Attacker) -> None:
    session_id = c.session()
    c.run(session_id)
    message = passed(f"{session_id}:train:0", 1)
    tensor = message.data[0].loss_fn_inputs["target_tokens"]
    tensor.sparse_csr.crow_indices = bytes(8 * 1_000_001)
    tensor.sparse_csr.col_indices = tensor.sparse_csr.values = b""
    del tensor.shape[:]
    tensor.shape.extend((MILLION, MILLION))
    result = c.result(send_pass(c, message))
    c.must(isinstance(result, dict) and "error" in result, f"{str(result)[:100]}")


@attack("user_metadata of 7 times 16 MB")
def metadata(c: Attacker) -> None:
    body = json.dumps({"user_metadata": {"a": "x" * (16 * MILLION)}}).encode()
    for _ in range(7):
        c.refused(c.post("create_session", body), 413)
        c.refused(c.send("POST", f"{API}/create_session", zstd(body), {"Content-Encoding": "zstd"}), 413)


@attack("custom losses of 10 MB, 2,000 nodes, and without an end")
def losses(c: Attacker) -> None:
    session_id = c.session()

    def create(number: int, nodes: list[Any], name: str = "x") -> httpx.Response:
        head = {"session_id": session_id, "custom_loss_seq_id": number, "name": name}
        return c.post("create_custom_loss", {**head, "inputs": [{"name": "logprobs", "rank": 1}], "graph": {"nodes": nodes}})

    c.refused(create(0, [], "x" * 10 * MILLION), 413)
    inputs = {"op": "placeholder", "name": "p", "target": "logprobs"}
    chain = [
        {"op": "call_function", "name": f"n{i}", "target": "torch.mul", "args": [{"ref": f"n{i - 1}" if i else "p"}, 2.0]}
        for i in range(1900)
    ]
    output = {"op": "output", "name": "o", "target": "output", "args": [{"tuple": [{"ref": "n1899"}, {"dict": {}}]}]}
    c.result(create(1, [inputs, *chain, output]))
    big = {"op": "call_function", "name": "b", "target": "operator.pow", "args": [10, 10**18]}
    c.result(create(2, [inputs, big, {**output, "args": [{"tuple": [{"ref": "b"}, {"dict": {}}]}]}]))
    for target in ("os.system", "builtins.eval", "torch.load", "torch.utils.cpp_extension.load"):
        bad = {"op": "call_function", "name": "b", "target": target, "args": ["id"]}
        result = c.result(create(3, [inputs, bad, {**output, "args": [{"tuple": [{"ref": "b"}, {"dict": {}}]}]}]))
        c.must(result is None or "error" in result, f"{target} was accepted")


@attack("losses that grow tensors: getitem, expand, repeat, outer products")
def growing(c: Attacker) -> None:
    session_id = c.session()
    c.run(session_id)
    p, number = {"ref": "p"}, 0
    index = {"op": "call_function", "name": "i", "target": "operator.getitem", "args": [p, {"tuple": [[0] * 8] * 1}]}
    steps = [
        [{"op": "call_function", "name": "b", "target": "operator.getitem", "args": [p, [0] * 40_000]}],
        [{"op": "call_method", "name": "b", "target": "expand", "args": [p, 1 << 20, 8]}],
        [{"op": "call_method", "name": "b", "target": "repeat", "args": [p, 1 << 30]}],
        [{"op": "call_function", "name": "b", "target": "torch.outer", "args": [p, p]}],
        [index, {"op": "call_function", "name": "b", "target": "torch.stack", "args": [[{"ref": "i"}] * 10_000]}],
    ]
    for seq, nodes in enumerate(steps):
        inputs = {"op": "placeholder", "name": "p", "target": "logprobs"}
        total = {"op": "call_method", "name": "t", "target": "sum", "args": [{"ref": "b"}]}
        output = {"op": "output", "name": "o", "target": "output", "args": [{"tuple": [{"ref": "t"}, {"dict": {}}]}]}
        head = {"session_id": session_id, "custom_loss_seq_id": seq, "name": "x"}
        graph = {"nodes": [inputs, *nodes, total, output]}
        created = c.result(c.post("create_custom_loss", {**head, "inputs": [{"name": "logprobs", "rank": 1}], "graph": graph}))
        if created is None or "error" in created:
            continue
        number += 1
        message = passed(f"{session_id}:train:0", number)
        message.loss_fn = "custom"
        message.loss_fn_config_v2["loss_id"].text = created["loss_id"]
        c.result(send_pass(c, message))


# ---- limits that keys share ------------------------------------------------------------------------------------------


@attack("256 sessions of one key")
def sessions(c: Attacker) -> None:
    opened = [c.post("create_session", {}).status_code for _ in range(256)]
    c.must(429 in opened, "256 sessions were accepted")
    c.must(c.bystander.session(), "another key gets no session")


@attack("1,030 samplers of the base model")
def samplers(c: Attacker) -> None:
    sampler_id = c.bystander.sampler(c.bystander.session())
    session_id = c.session()
    for number in range(1030):
        c.sampler(session_id, number)
    result = c.bystander.result(c.bystander.sample(sampler_id, 0))
    c.must(isinstance(result, bytes), f"the sampler of another key is gone: {str(result)[:200]}")


@attack("41 results of 1 MB that are not fetched")
def results(c: Attacker) -> None:
    bystander = c.bystander
    waiting = bystander.sample(bystander.sampler(bystander.session()), 0)
    bystander_done = bystander.result(waiting)
    sampler_id = c.sampler(c.session())
    sent = [c.sample(sampler_id, number, num_samples=4000, sampling_params={"max_tokens": 5}) for number in range(8)]
    sent += [c.sample(sampler_id, 8 + number, topk_prompt_logprobs=200) for number in range(33)]
    for one in sent:
        if one.status_code == httpx.codes.OK:
            last = one
    with contextlib.suppress(UnboundLocalError):
        c.result(last)
    again = bystander.post("retrieve_future", {"request_id": waiting.json()["request_id"]})
    c.must(bystander_done is not None and again.status_code == httpx.codes.OK, f"the result of another key: {again.text[:200]}")


@attack("requests 2 to N of a run without number 1")
def gaps(c: Attacker) -> None:
    bystander, session_id = c.bystander, c.session()
    own = bystander.session()
    bystander.run(own)
    c.run(session_id)
    statuses = [
        send_pass(c, passed(f"{session_id}:train:0", number, datums=400, tokens=90)).status_code for number in range(2, 120)
    ]
    c.must(429 in statuses or sum(one == 200 for one in statuses) < 118, "118 requests without their predecessor were accepted")
    result = bystander.result(send_pass(bystander, passed(f"{own}:train:0", 1)))
    c.must(isinstance(result, bytes), f"another key gets {str(result)[:200]}")


@attack("16 sessions that sample without an end")
def turns(c: Attacker) -> None:
    for _ in range(16):
        session_id = c.session()
        if session_id:
            sampler_id = c.sampler(session_id)
            for number in range(4):
                c.sample(sampler_id, number, num_samples=16, sampling_params={"max_tokens": 60, "stop": []})
    time.sleep(3)


@attack("60 open long polls and streams that are never read")
def polls(c: Attacker) -> None:
    session_id = c.session()
    c.run(session_id)
    body = json.dumps({"request_id": f"{session_id}:train:0/9"}).encode()
    send_pass(c, passed(f"{session_id}:train:0", 9))
    poll = c.head("POST", f"{API}/retrieve_future", f"Content-Length: {len(body)}") + body
    chat = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 60, "n": 16, "stream": True}).encode()
    stream = c.head("POST", "/v1/completions", f"Content-Length: {len(chat)}") + chat
    with contextlib.ExitStack() as stack:
        for data in (poll, stream):
            for one in c.open_connections(60, data):
                stack.callback(one.close)
        time.sleep(1)
        fresh = Tenant(c.url, BYSTANDER, c.faults)
        c.must(reachable(fresh), "another key gets no connection")


@attack("300 connections that send nothing")
def idle(c: Attacker) -> None:
    with contextlib.ExitStack() as stack:
        for one in c.open_connections(300, b""):
            stack.callback(one.close)
        c.must(reachable(Tenant(c.url, BYSTANDER, c.faults)), "another key gets no connection")


@attack("bodies of one byte a second, on 60 connections")
def slow(c: Attacker) -> None:
    with contextlib.ExitStack() as stack:
        head = c.head("POST", f"{API}/asample", "Content-Length: 1000000")
        opened = [stack.enter_context(contextlib.closing(one)) for one in c.open_connections(60, head)]
        for _ in range(3):
            for one in opened:
                with contextlib.suppress(OSError):
                    one.sendall(b"{")
            time.sleep(1)
        c.must(reachable(Tenant(c.url, BYSTANDER, c.faults)), "another key gets no connection")


@attack("half-open connections: 200 requests without a reader")
def half_open(c: Attacker) -> None:
    for _ in range(200):
        with c.connection(c.head("GET", f"{API}/training_runs")):
            pass


@attack("uploads of 16 MB that stop before their end")
def uploads(c: Attacker) -> None:
    with contextlib.ExitStack() as stack:
        head = c.head("POST", f"{API}/forward_backward", f"Content-Length: {15 << 20}")
        for one in c.open_connections(12, head + bytes(14 << 20)):
            stack.callback(one.close)
        bystander = c.bystander
        own = bystander.session()
        bystander.run(own)
        result = bystander.result(send_pass(bystander, passed(f"{own}:train:0", 1, datums=300, tokens=90)))
        c.must(isinstance(result, bytes), f"another key gets {str(result)[:200]}")


@attack("zstd uploads that wait for their turn to be decoded")
def waiting_bodies(c: Attacker) -> None:
    body = zstd(passed("s:train:0", 1, datums=400, tokens=90).SerializeToString() * 30)
    headers = {"Content-Encoding": "zstd", "Content-Type": PROTOBUF}
    at_once(lambda: c.must(c.send("POST", f"{API}/forward_backward", body, headers).status_code < 500, "5xx"), 24)


@attack("runs and tokens above the quota")
def quota(c: Attacker) -> None:
    made = [c.run(session_id) for session_id in (c.session(), c.session(), c.session(), c.session())]
    c.must(sum("error" in (one or {}) for one in made) >= 2, "a quota of 2 runs allows more")
    sampler_id = c.sampler(c.session())
    params = {"max_tokens": 80, "stop": []}
    sent = [c.sample(sampler_id, i, num_samples=64, sampling_params=params).status_code for i in range(30)]
    c.must(429 in sent, "a quota of 20,000 tokens allows more")


@attack("a LoRA adapter of rank 4096, and full fine-tuning")
def ranks(c: Attacker) -> None:
    session_id = c.session()
    c.run(session_id, 0, lora_config={"rank": 4096})
    c.run(session_id, 1, lora_config={"rank": 1 << 20})
    c.run(session_id, 2, lora_config={"rank": 0})


@attack("checkpoints above the quota of the disk")
def disk(c: Attacker) -> None:
    session_id = c.session()
    c.run(session_id, 0, lora_config={"rank": 64})
    saved = 0
    for number in range(1, 60):
        result = c.result(c.post("save_weights", {"model_id": f"{session_id}:train:0", "seq_id": number, "path": f"n{number}"}))
        if "error" in (result or {}):
            break
        saved += 1
    c.must(saved < 59, "a quota of 50 MB allows 59 checkpoints")
    listing = c.send("GET", f"{API}/checkpoints?limit=1000").json()["checkpoints"]
    for one in listing:
        run_id, _, name = one["tinker_path"].removeprefix("tinker://").partition("/")
        c.send("DELETE", f"{API}/training_runs/{run_id}/checkpoints/{name}")


# ---- HTTP ------------------------------------------------------------------------------------------------------------


@attack("2,000 headers, and one of 1 MB")
def headers(c: Attacker) -> None:
    many = [f"X-{i}: {'y' * 20}" for i in range(2000)]
    for data in (c.head("GET", f"{API}/sessions", *many), c.head("GET", f"{API}/sessions", "X: " + "y" * MILLION)):
        c.raw(data)


@attack("chunked oddities: huge, negative and damaged sizes, extensions, trailers")
def chunked(c: Attacker) -> None:
    head = c.head("POST", f"{API}/create_session", "Transfer-Encoding: chunked")
    for body in (
        b"ffffffffffffffff\r\n{}",
        b"-1\r\n{}\r\n0\r\n\r\n",
        b"2;" + b"x" * MILLION + b"\r\n{}\r\n0\r\n\r\n",
        b"2\r\n{}\r\n0\r\n" + b"T: x\r\n" * 100_000 + b"\r\n",
        b"1\r\n{\r\n" * 50_000 + b"0\r\n\r\n",
        b"0x2\r\n{}\r\n0\r\n\r\n",
        b"2\n{}\n0\n\n",
    ):
        c.raw(head + body)


@attack("request smuggling: two lengths, a length and chunks, obsolete folding")
def smuggling(c: Attacker) -> None:
    hidden = c.head("GET", f"{API}/sessions").replace(KEY.encode(), BYSTANDER.encode())
    for lines in (
        ("Content-Length: 2", f"Content-Length: {len(hidden)}"),
        ("Content-Length: 2", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked, identity",),
        ("Transfer-Encoding : chunked",),
        ("X: a\r\n b",),
        ("Content-Length: +2",),
    ):
        found = c.raw(c.head("POST", f"{API}/session_heartbeat", *lines) + b"{}" + hidden)
        c.must(found.count(b"HTTP/1.1 ") <= 2, f"{lines}: {found[:300]!r}")


@attack("200 pipelined requests on one connection")
def pipelined(c: Attacker) -> None:
    found = c.raw(c.head("GET", f"{API}/sessions") * 200)
    c.must(found.count(b"HTTP/1.1 200") in (200, 0, 1), f"{found.count(b'HTTP/1.1 200')} of 200 were answered")


@attack("upgrades: websockets, HTTP/2, TLS on a plain port, CONNECT and TRACE")
def upgrades(c: Attacker) -> None:
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
    upgrade = ("Upgrade: websocket", "Connection: Upgrade", key, "Sec-WebSocket-Version: 13")
    c.raw(c.head("GET", f"{API}/sessions", *upgrade))
    c.raw(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(1000))
    c.raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500))
    for method in ("CONNECT", "TRACE", "OPTIONS", "HEAD", "X" * 1000):
        c.raw(c.head(method, f"{API}/sessions"))


@attack("addresses of 1 MB, empty parts, escapes and queries of 10,000 fields")
def addresses(c: Attacker) -> None:
    outside = (f"{API}/%2e%2e/%2e%2e/etc/passwd", f"{API}/sessions/%00", "/api/v1/../../x")
    for path in ("/" + "a" * MILLION, "/" * 10_000, *outside):
        c.raw(c.head("GET", path))
    c.raw(c.head("GET", f"{API}/checkpoints?" + "&".join(f"limit={i}" for i in range(10_000))))
    for limit in ("-1", "1" + "0" * 30, "nan", "1e9"):
        c.send("GET", f"{API}/checkpoints?limit={limit}&offset={limit}")


@attack("Expect: 100-continue without a body, 50 times")
def expect(c: Attacker) -> None:
    with contextlib.ExitStack() as stack:
        for one in c.open_connections(50, c.head("POST", f"{API}/asample", "Expect: 100-continue", "Content-Length: 100000")):
            stack.callback(one.close)
        c.must(reachable(Tenant(c.url, BYSTANDER, c.faults)), "another key gets no connection")


@attack("requests of web pages, and two hosts")
def pages(c: Attacker) -> None:
    for line, status in (
        ("Origin: http://evil.example", b"403"),
        ("Sec-Fetch-Site: cross-site", b"403"),
        ("Origin: null", b"403"),
        ("Host: evil.example", b"400"),
    ):
        found = c.raw(c.head("POST", f"{API}/create_session", line, "Content-Length: 2") + b"{}")
        c.must(found[9:12] == status, f"{line}: {found[:60]!r}")


@attack("500 requests with wrong keys, and keys of 60 KB")
def wrong_keys(c: Attacker) -> None:
    with httpx.Client(base_url=c.url, timeout=IN_TIME_S, trust_env=False) as client:
        for number in range(500):
            c.must(client.get(f"{API}/sessions", headers={"X-API-Key": f"tml-{number}"}).status_code == 401, "a wrong key")
        long = ({"X-API-Key": "x" * 60_000}, {"Authorization": "Bearer " + "y" * 60_000})
        for headers in (*long, {"Authorization": "Basic eDp5"}):
            with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
                c.must(client.get(f"{API}/sessions", headers=headers).status_code in (400, 401, 431), f"{list(headers)}")


@attack("200 requests that are cancelled immediately, with their connections")
def cancelled(c: Attacker) -> None:
    session_id = c.session()
    sampler_id = c.sampler(session_id)
    for number in range(200):
        fields = {"sampling_session_id": sampler_id, "seq_id": number, "prompt": PROMPT}
        body = json.dumps({**fields, "sampling_params": {"max_tokens": 50}}).encode()
        with c.connection(c.head("POST", f"{API}/asample", f"Content-Length: {len(body)}") + body):
            pass
        c.post("cancel_future", {"request_id": f"{sampler_id}/{number}"})


@attack("cancelled chats: 60 of 16 answers each")
def cancelled_chats(c: Attacker) -> None:
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 80, "n": 16}).encode()
    for _ in range(60):
        with c.connection(c.head("POST", "/v1/completions", f"Content-Length: {len(body)}") + body):
            time.sleep(0.01)


# ---- the API ---------------------------------------------------------------------------------------------------------


@attack("1,000 retries of one request")
def retries(c: Attacker) -> None:
    session_id = c.session()
    c.run(session_id)
    message = passed(f"{session_id}:train:0", 1)
    ids = {send_pass(c, message).json().get("request_id") for _ in range(1000)}
    c.must(len(ids) == 1, f"retries have the ids {ids}")
    message.loss_fn = "dft"
    c.refused(send_pass(c, message), 400)


@attack("numbers of requests out of order, repeated, negative and of 10 digits")
def order(c: Attacker) -> None:
    session_id = c.session()
    c.run(session_id)
    for number in (0, -1, 2**31 - 1, 2**31, 10**10, 5, 5, 3):
        c.post("optim_step", {"model_id": f"{session_id}:train:0", "seq_id": number, "adam_params": {}})
    for number in (-1, 10**9, 2**64):
        c.refused(c.post("create_model", {"session_id": session_id, "model_seq_id": number, "base_model": "tiny"}), 422)


@attack("n, best_of, logprobs and stop lists far too large")
def large_fields(c: Attacker) -> None:
    for fields in (
        {"n": 10**6},
        {"best_of": 10**6},
        {"logprobs": 10**6},
        {"max_tokens": 10**12},
        {"stop": ["x" * 5000]},
        {"stop": ["x"] * 100_000},
        {"stop": ""},
        {"stop": [""]},
        {"logit_bias": {str(i): 1 for i in range(5000)}},
        {"top_k": 2**40},
        {"seed": 2**70},
    ):
        c.refused(c.post("/v1/completions", {"model": "tiny", "prompt": "a", **fields}), 400)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "top_logprobs": 10**6, "logprobs": True}
    c.refused(c.post("/v1/chat/completions", body), 400)


@attack("128 answers with 20 logprobs and 16 long stops each")
def heavy(c: Attacker) -> None:
    stops = [f"{i:02d}" + "ab" * 90 for i in range(16)]
    body = {"model": "tiny", "prompt": "a" * 50, "n": 128, "logprobs": 20, "stop": stops, "max_tokens": 60}
    at_once(lambda: c.refused_or_done(c.post("/v1/completions", body)), 3)


@attack("4,096 stop sequences of a sampling request")
def many_stops(c: Attacker) -> None:
    sampler_id = c.sampler(c.session())
    for stop in ([f"stop {i}" for i in range(4096)], ["x" * 100_000], list(range(259)), ["a" * i for i in range(1, 1000)]):
        c.result(c.sample(sampler_id, len(str(stop)), num_samples=8, sampling_params={"max_tokens": 60, "stop": stop}), 30)


@attack("texts that are not text: lone surrogates, NUL, right-to-left marks, 4-byte characters")
def unicode(c: Attacker) -> None:
    for text in ("\ud800", "a\0b", "\u202e\u2066x", "\U0010ffff" * 30, "e" + "\u0301" * 400, "ﷺ" * 30):
        message = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 2})
        c.must(c.post("/v1/chat/completions", message.encode()).status_code in (200, 400), repr(text))
        c.post("create_session", json.dumps({"display_name": text, "user_metadata": {text: text}}).encode())
        c.post("/v1/completions", json.dumps({"model": text, "prompt": text, "stop": text}).encode())


@attack("names of checkpoints that lead out of the folder")
def names(c: Attacker) -> None:
    session_id = c.session()
    c.run(session_id)
    for number, name in enumerate(NAMES, 1):
        body = {"model_id": f"{session_id}:train:0", "seq_id": number, "path": name}
        kind = ("save_weights", "save_weights_for_sampler", "save_weights_external")[number % 3]
        c.result(c.post(kind, body))
        path = f"tinker://{session_id}:train:0/weights/{name}"
        c.post("weights_info", {"tinker_path": path})
        c.post("create_sampling_session", {"session_id": session_id, "sampling_session_seq_id": number, "model_path": path})


@attack("objects of another key: sessions, runs, samplers, checkpoints, results")
def foreign(c: Attacker) -> None:
    bystander, own = c.bystander, c.session()
    session_id = bystander.session()
    bystander.run(session_id)
    sampler_id = bystander.sampler(session_id)
    run_id = f"{session_id}:train:0"
    saved = bystander.result(bystander.post("save_weights", {"model_id": run_id, "seq_id": 1, "path": "mine"}))["path"]
    for path, body in (
        ("session_heartbeat", {"session_id": session_id}),
        ("create_model", {"session_id": session_id, "model_seq_id": 5, "base_model": "tiny"}),
        ("optim_step", {"model_id": run_id, "seq_id": 2, "adam_params": {}}),
        ("save_weights", {"model_id": run_id, "seq_id": 2, "path": "theirs"}),
        ("load_weights", {"session_id": own, "model_seq_id": 0, "path": saved}),
        ("create_sampling_session", {"session_id": own, "sampling_session_seq_id": 0, "model_path": saved}),
        ("asample", {"sampling_session_id": sampler_id, "seq_id": 0, "prompt": PROMPT, "sampling_params": {}}),
        ("retrieve_future", {"request_id": f"{run_id}/1"}),
        ("retrieve_futures", {"target": {"sampling_session_id": sampler_id}, "timeout": 0}),
        ("join_sampling_session", {"sampling_session_id": sampler_id}),
        ("weights_info", {"tinker_path": saved}),
        ("cookbook/batch", {"sampling_session_id": sampler_id, "count": 4}),
    ):
        response = c.post(path, body)
        result = c.result(response, 5) if response.status_code == httpx.codes.OK and "request_id" in response.json() else None
        is_hidden = response.status_code == 404 or (isinstance(result, dict) and "error" in result)
        c.must(is_hidden, f"{path}: {response.status_code} {response.text[:100]} {str(result)[:100]}")
    for method in ("GET", "DELETE", "POST", "PUT"):
        for suffix in ("", "/publish", "/ttl", "/external_weights_urls"):
            response = c.send(method, f"{API}/training_runs/{run_id}/checkpoints/weights/mine{suffix}", b"{}")
            c.must(response.status_code in (404, 405, 422), f"{method} {suffix}: {response.status_code}")
    c.send("POST", f"{API}/sessions/{session_id}/finish")
    c.send("POST", f"{API}/cancel_future", json.dumps({"request_id": f"{sampler_id}/0"}).encode())
    result = bystander.result(bystander.post("save_weights", {"model_id": run_id, "seq_id": 2, "path": "still"}))
    c.must("path" in (result or {}), f"the run of another key: {result}")


@attack("batches of 4,096 requests that never arrive")
def batches(c: Attacker) -> None:
    sampler_id = c.sampler(c.session())
    for number in range(50):
        c.post("cookbook/batch", {"sampling_session_id": sampler_id, "count": 4096})
        c.sample(sampler_id, number)


@attack("feeds with 20,000 acknowledged ids, and cursors of any size")
def feeds(c: Attacker) -> None:
    sampler_id = c.sampler(c.session())
    for cursor in (0, 2**62, 10**30):
        ids = [f"{sampler_id}/{i}" for i in range(20_000)]
        target = {"sampling_session_id": sampler_id, "cloned_sampler_id": 0}
        c.post("retrieve_futures", {"target": target, "prev_cursor": cursor, "timeout": 0, "retrieved_request_ids": ids})


@attack("10,000 cloned samplers, each with a feed of its own")
def clones(c: Attacker) -> None:
    sampler_id = c.sampler(c.session())
    for number in range(2000):
        target = {"sampling_session_id": sampler_id, "cloned_sampler_id": number * 10**6}
        c.post("retrieve_futures", {"target": target, "timeout": 0})


@attack("telemetry and heartbeats of 1 MB")
def telemetry(c: Attacker) -> None:
    body = json.dumps({"events": ["x" * 1000] * 1000}).encode()
    for _ in range(50):
        c.send("POST", f"{API}/telemetry", body)
        c.send("POST", f"{API}/session_heartbeat", body)


@attack("1,000 idempotency keys of 60 KB")
def idempotency(c: Attacker) -> None:
    for number in range(40):
        with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
            c.send("POST", f"{API}/create_session", b"{}", {"X-Idempotency-Key": str(number) + "k" * 60_000})


@attack("prompts to score: 65,536 tokens with 20 logprobs each")
def scored(c: Attacker) -> None:
    body = {"model": "tiny", "prompt": [[5] * 1000] * 64, "echo": True, "logprobs": 20, "max_tokens": 0}
    at_once(lambda: c.refused_or_done(c.post("/v1/completions", body)), 3)


@attack("optimizer steps with absurd numbers, and losses with absurd options")
def absurd(c: Attacker) -> None:
    session_id = c.session()
    c.run(session_id)
    run_id, number = f"{session_id}:train:0", 0
    for fields in ({"learning_rate": 1e308}, {"beta1": 2.0}, {"eps": -1.0}, {"grad_clip_norm": -1}, {"__class__": 1}):
        for request in ("pass", "step"):
            number += 1
            if request == "pass":
                c.result(send_pass(c, passed(run_id, number)))
            else:
                c.result(c.post("optim_step", {"model_id": run_id, "seq_id": number, "adam_params": fields}))


@attack("lists of everything, 200 times")
def lists(c: Attacker) -> None:
    for _ in range(50):
        for path in (f"{API}/training_runs?limit=1000000", f"{API}/checkpoints?limit=1000000", f"{API}/sessions", "/v1/models"):
            c.send("GET", path)


@attack("forged addresses of downloads")
def downloads(c: Attacker) -> None:
    for token in ("x", "e30", "A" * 60_000, "../..", "%00"):
        for file in ("adapter_model.safetensors", "../../keys", "%2e%2e/%2e%2e/keys"):
            found = c.raw(c.head("GET", f"{API}/download/{token}/{file}"))
            c.must(b" 200 " not in found[:20], f"{token[:20]} {file}: {found[:60]!r}")


@attack("templates and conversations that grow: 64 levels, 20,000 messages")
def conversations(c: Attacker) -> None:
    turn = {"role": "user", "content": "a"}
    for rows in ([turn] * 9000, [{**turn, "role": "x" * 1000}], [{"role": "assistant"}] * 3):
        c.refused(c.post("/v1/chat/completions", {"model": "tiny", "messages": rows}), 400, 413)
    options = {f"k{i}": "x" * 100 for i in range(2000)}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": options, "max_tokens": 1}
    c.post("/v1/chat/completions", body)


# ---- helpers ---------------------------------------------------------------------------------------------------------


def reachable(tenant: Tenant) -> bool:
    """Whether a client gets an answer on a new connection. Clients try again, because busy servers close connections."""
    for _ in range(5):
        try:
            return tenant.client.get(f"{API}/sessions", timeout=5).status_code == httpx.codes.OK
        except httpx.HTTPError:
            time.sleep(0.1)
    return False


def at_once(call: Callable[[], object], count: int) -> None:
    """Call a function on ``count`` threads."""
    threads = [threading.Thread(target=_quiet, args=(call,)) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _quiet(call: Callable[[], object]) -> None:
    with contextlib.suppress(httpx.HTTPError):
        call()
