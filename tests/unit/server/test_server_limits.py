"""No body of a request occupies the event loop or the memory: its structure has limits, and large bodies have other threads."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
import time

import httpx
import pytest
import servertools
import zstandard
from waiting import WAIT_S

from cookbook.server.metrics import Metrics
from cookbook.server.state.body_decoder import BodyDecoder
from cookbook.server.wire import bodies, limits
from cookbook.server.wire import messages_pb2 as pb

mutations = pytest.importorskip("mutations", reason="needs the package hypothesis")


def sample_body(num_tokens: int) -> bytes:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5] * num_tokens}]}
    return json.dumps({"sampling_session_id": "s:sample:0", "seq_id": 0, "prompt": prompt, "sampling_params": {}}).encode()


def message(num_datums: int) -> bytes:
    datum = pb.Datum()
    datum.model_input.add().encoded_text.tokens = bytes(40)
    for name in ("target_tokens", "weights"):
        datum.loss_fn_inputs[name].dense = bytes(80)
        datum.loss_fn_inputs[name].shape.append(10)
    request = pb.ForwardBackwardRequest(model_id="s:train:0", seq_id=1, data=[datum] * num_datums)
    return request.SerializeToString()


@pytest.fixture(scope="module")
def server(tiny_folder, tmp_path_factory):
    with servertools.running(tiny_folder, tmp_path_factory.mktemp("limits"), names=["tiny"]) as running:
        yield running


@pytest.mark.parametrize("name", mutations.crowds())
def test_a_body_of_many_values_is_refused_before_it_is_parsed(name):
    check = limits.check_forward_backward if name == "many datums" else limits.check_json
    with pytest.raises(limits.TooComplexError, match=r"send (smaller requests|fewer datums|a flatter one)"):
        check(mutations.crowds()[name])


def test_a_shape_of_many_dimensions_is_refused():
    request = pb.ForwardBackwardRequest()
    request.data.add().loss_fn_inputs["weights"].shape.extend([1] * 1000)
    with pytest.raises(limits.TooComplexError, match="fewer dimensions"):
        limits.check_forward_backward(request.SerializeToString())


@pytest.mark.parametrize(
    "body",
    [
        sample_body(400_000),
        json.dumps({"text": "{[" * 100_000}).encode(),
        json.dumps({"text": '\\"{[' * 50_000 + "\\"}).encode(),
        b'{"text": "' + b"{" * 100_000,
        b'{"text": "' + b"{" * 100_000 + b"\\",
    ],
)
def test_long_prompts_and_brackets_inside_of_texts_pass(body):
    limits.check_json(body)


def test_a_message_of_many_datums_passes():
    limits.check_forward_backward(message(20_000))
    limits.check_forward_backward(message(3)[:-5])


def test_bombs_are_refused_without_an_object(server, monkeypatch):
    """The routes refuse a bomb before any parser sees its bytes, and the server stays in service."""
    parsed = []
    monkeypatch.setattr(bodies, "parse", lambda kind, body: parsed.append(kind))
    routes = {"many texts": "/v1/completions", "many messages": "/v1/chat/completions", "many keys": "/api/v1/create_session"}
    for name, body in mutations.crowds().items():
        route = routes.get(name, "/api/v1/forward_backward" if name == "many datums" else "/api/v1/asample")
        headers = {"Content-Encoding": "zstd"}
        packed = zstandard.ZstdCompressor().compress(body)
        response = httpx.post(f"{server.url}{route}", content=packed, headers=headers, timeout=WAIT_S)
        assert response.status_code == 413, name
    assert not parsed
    assert httpx.get(f"{server.url}/api/v1/healthz", timeout=WAIT_S).status_code == 200


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/api/v1/asample"])
def test_deep_tool_schemas_are_one_line(server, route):
    schema = '{"type":"object","properties":{"x":' * 490 + "{}" + "}}" * 490
    body = '{"model":"tiny","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":'
    body += '{"name":"f","parameters":' + schema + "}}]}"
    response = httpx.post(f"{server.url}{route}", content=body.encode(), timeout=WAIT_S)
    assert response.status_code == 400 and "more than 64 levels of objects and lists" in response.text
    assert len(response.content) < 1000 and "Traceback" not in response.text


def test_other_clients_are_answered_while_a_large_body_is_parsed(server, monkeypatch):
    """The parser of a large body waits for the end of another request, which the event loop must answer meanwhile."""
    parse, began, go = bodies.parse, threading.Event(), threading.Event()

    def waiting(kind, body):
        if kind is bodies.SampleBody:
            began.set()
            assert go.wait(WAIT_S)
        return parse(kind, body)

    monkeypatch.setattr(bodies, "parse", waiting)
    statuses = []

    def ask():
        statuses.append(httpx.post(f"{server.url}/api/v1/asample", content=sample_body(20_000), timeout=WAIT_S).status_code)

    client = threading.Thread(target=ask)
    client.start()
    assert began.wait(WAIT_S)
    try:
        assert httpx.get(f"{server.url}/api/v1/healthz", timeout=WAIT_S).status_code == 200
    finally:
        go.set()
        client.join()
    assert statuses == [404]


def test_small_routes_refuse_large_bodies(server):
    body = json.dumps({"user_metadata": {"a": "x" * (2 << 20)}}).encode()
    response = httpx.post(f"{server.url}/api/v1/create_session", content=body, timeout=WAIT_S)
    assert (response.status_code, "larger than 128 KiB" in response.text) == (413, True)


# Routes of all limits on bodies of JSON.
ROUTES = ("/api/v1/asample", "/api/v1/create_session", "/v1/chat/completions", "/v1/completions")


def largest_bodies() -> dict[str, tuple[str, bytes]]:
    """Route and body of requests that are just within the limits on their structure."""

    def chat(messages: list[object], **fields: object) -> tuple[str, bytes]:
        return "/v1/chat/completions", json.dumps({"model": "tiny", "messages": messages, **fields}).encode()

    def text(prompt: object, **fields: object) -> tuple[str, bytes]:
        return "/v1/completions", json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 1, **fields}).encode()

    turn = {"role": "user", "content": "a"}
    return {
        "tokens": ("/api/v1/asample", sample_body(500_000)),
        "chunks": ("/api/v1/asample", sample_body(1).replace(b'"chunks": [', b'"chunks": [' + b"{}," * 19_900)),
        "tokens of a completion": text([5] * 500_000),
        "lists of tokens": text([[5]] * 19_900),
        "texts": text(["a"] * 190_000),
        "texts in place of tokens": ("/api/v1/asample", sample_body(1).replace(b"[5]", b"[%s5]" % (b'"a",' * 190_000))),
        "numbers in place of texts": text(["a", *[5] * 190_000]),
        "a long text": text("a" * (7 << 20)),
        "characters of four bytes": text("\U0001f600" * 600_000),
        "messages": chat([turn] * 19_000),
        "a long message": chat([{**turn, "content": "a" * (7 << 20)}]),
        "keys of a message": chat([{**turn, **{f"k{number}": number for number in range(90_000)}}]),
        "tools": chat([turn], tools=[{"type": "function", "function": {"name": "f"}}] * 6000),
        "options of the template": chat([turn], chat_template_kwargs={f"k{number}": 1 for number in range(90_000)}),
        "stop sequences": text("a", stop=["x"] * 190_000),
        "escapes": ("/api/v1/create_session", b'{"display_name": "' + b"\\u0061" * 170_000 + b'"}'),
        "datums": ("/api/v1/forward_backward", message(20_000)),
    }


@pytest.mark.slow
def test_no_request_of_the_corpus_occupies_the_event_loop(server, monkeypatch):
    """No step of the loop, and no parser on another thread, computes for half a second: healthz is answered in between.

    A parser holds the interpreter lock until it ends. The walk over the fields of a message does not: it is Python. The seconds
    are those of the thread that computes, so they do not depend on the load of the machine.
    """
    steps: list[tuple[float, str]] = []
    current = "start"

    def timed(call):
        began = time.thread_time()
        try:
            return call()
        finally:
            steps.append((time.thread_time() - began, current))

    run, decode = asyncio.events.Handle._run, BodyDecoder.run
    monkeypatch.setattr(asyncio.events.Handle, "_run", lambda handle: timed(lambda: run(handle)))

    def decoded(decoder, size, call):
        is_walk = current.endswith("forward_backward") and not isinstance(call, functools.partial)
        return decode(decoder, size, call if is_walk else lambda: timed(call))

    monkeypatch.setattr(BodyDecoder, "run", decoded)
    pack = zstandard.ZstdCompressor().compress
    texts = {name: body for name, body in mutations.crowds().items() if name != "many datums"}
    corpus = [(route, name, body, "identity") for name, body in texts.items() for route in ROUTES]
    corpus += [(route, name, body, encoding) for name, (encoding, body) in mutations.bombs().items() for route in ROUTES]
    for name, (route, body) in largest_bodies().items():
        corpus += [(route, name, body, "identity"), (route, name, pack(body), "zstd")]
    with httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
        for route, name, body, encoding in corpus:
            current = f"{name}, {encoding}, {route}"
            status = client.post(route, content=body, headers={"Content-Encoding": encoding}).status_code
            assert 400 <= status < 500 or name in ("escapes",), f"{current}: {status}"
    seconds, worst = max(steps)
    assert seconds < 0.5, worst


def test_the_delay_of_the_event_loop_is_a_metric():
    metrics = Metrics()
    metrics.note_loop_delay(0.75)
    metrics.note_loop_delay(0.25)
    lines = metrics.exposition([]).splitlines()
    assert "cookbook_event_loop_delay_seconds 0.25" in lines
    assert "cookbook_event_loop_delay_max_seconds 0.75" in lines
