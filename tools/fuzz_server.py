"""Hostile requests against ``cookbook serve``: ``python tools/fuzz_server.py --requests 20000``.

What the unmodified client sends is recorded once, then sent changed: JSON by its structure and by the server's own OpenAPI
schema, protobuf by its fields and by its bytes, addresses, encodings, broken HTTP. Every request must be answered in time with
2xx or 4xx, every promise be kept, with a result or a failure; afterwards an honest client must get bit by bit what it gets of a
server that was never attacked, and nothing may lie outside the server's folder.

The attacker has an API key, and the victim another. A fifth of the requests name the victim's session, run, samplers and
checkpoints: no response may reveal them, and the victim's run continues afterwards bit by bit. The memory must not grow.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import mutations
import tiny
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyStrategyDefinition
from recording import API, IN_TIME_S, SESSION, Answer, Recorded, Wire, honest, honest_in_two_parts, recorded
from servertools import KEY

from cookbook.server.wire import encode
from cookbook.server.wire import messages_pb2 as pb

A_SESSION = 400  # requests; then its client goes, and another comes
A_RUN = 40
OF_VICTIM = 0.2  # share of the requests that name what is the victim's
ATTACKER = "tml-attacker"
GROWTH = 1.15  # of the memory, from the fourth tenth of the requests to the end

_seeds = st.binary(min_size=16, max_size=16)

# ---- the attack ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attempt:
    """A request to send. ``raw``: all its bytes; if None, the other fields make the HTTP request."""

    kind: str
    method: str = "POST"
    path: str = ""
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "application/json"),)
    raw: bytes | None = None


@dataclass
class Counts:
    """Results of the attempts, by kind."""

    by_kind: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    def table(self) -> str:
        columns = ("requests", "2xx", "4xx", "closed", "5xx", "hangs", "results", "failed futures")
        total = sum(self.by_kind.values(), Counter())
        lines = ["| kind | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
        for kind, found in [*sorted(self.by_kind.items()), ("all", total)]:
            lines.append(f"| {kind} | " + " | ".join(f"{found[one]:,}" for one in columns) + " |")
        return "\n".join(lines)


names = st.one_of(st.sampled_from(mutations.NAMES), st.text(max_size=8))
PROTOBUF = (("Content-Type", encode.PROTOBUF),)
HEADERS = (
    ("X-API-Key", "x" * 5000),
    ("X-Request-ID", "../" * 20),
    ("X-Idempotency-Key", "k" * 5000),
    ("Accept", "\xff"),
    ("Expect", "100-continue"),
    ("Range", "bytes=0-99999999999"),
    ("Host", "evil.example"),
)
_START = f"POST {API}/optim_step HTTP/1.1\r\nHost: x\r\n".encode()
BROKEN = (  # hardly HTTP
    _START + b"Content-Length: 1000000\r\n\r\n{",
    _START + b"Content-Length: -5\r\n\r\n{}",
    _START + b"Content-Length: 99999999999999999999\r\n\r\n{}",
    _START + b"Content-Length: 2\r\nContent-Length: 7\r\n\r\n{}",
    _START + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{}",
    _START + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
    _START + b"X: " + b"y" * 200_000 + b"\r\n\r\n",
    _START + b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    _START.replace(b"HTTP/1.1", b"HTTP/9.9") + b"\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET " + b"/" * 100_000 + b" HTTP/1.1\r\n\r\n",
)


class Campaign:
    """Attacks the server at ``url`` with variants of ``templates``, and ``victim``, the session of another key."""

    def __init__(
        self, url: str, templates: Sequence[Recorded], openapi: dict[str, Any], key: str = KEY, victim: str = ""
    ) -> None:
        self.wire, self.url, self.key, self.victim = Wire(url, key), url, key, victim.encode()
        self.counts = Counts()
        self.recorded_id = next(found[0] for one in templates if (found := SESSION.search(one.body)))
        self.templates = templates
        self.described = list(_operations(openapi))
        self.bombs = list(mutations.bombs().values())
        self._pool = ThreadPoolExecutor(8)
        self._watched: list[Future[None]] = []
        self.recent: deque[Attempt] = deque(maxlen=12)
        self._fresh = itertools.count(1000)
        self._sent = self._of_run = 0
        self.requests_of_session: list[Recorded] = []
        self.passes: list[Recorded] = []
        self.texts: list[Recorded] = []
        self.session_id = self.run_id = ""
        self.number = 1
        self.promised: list[str] = ["unknown/1"]

    def __enter__(self) -> Campaign:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self.wire.close()

    def run(self, count: int, seed_: int) -> None:
        """Sends ``count`` requests and waits for all that was promised. What was wrong is in ``counts.wrong``."""
        end = self._sent + count
        for part in itertools.count():
            if self._sent >= end:
                return
            self._new_session()
            # It gives up where what it draws depends on more than it has drawn, as here on the server: then with another seed.
            try:
                self._session(min(A_SESSION, end - self._sent), seed_ * 1_000_003 + part)
            # Alone, or in a group with the exceptions of the replay.
            except* FlakyStrategyDefinition:
                pass
            self._settle()
            self.wire.post(f"sessions/{self.session_id}/finish", {})

    def _session(self, count: int, seed_: int) -> None:
        @seed(seed_)
        @settings(
            max_examples=count,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.data())
        def attack(data: st.DataObject) -> None:
            self._send(self._attempt(data.draw, random.Random(data.draw(_seeds))))

        attack()

    # ---- what is sent ----

    def _attempt(self, draw: mutations.Draw, rng: random.Random) -> Attempt:
        make = rng.choices(list(SHARES), list(SHARES.values()))[0]
        attempt = make(self, draw, rng)
        if not self.victim or rng.random() > OF_VICTIM:
            return attempt
        own, other = self.session_id.encode(), self.victim
        path = attempt.path.replace(own.decode(), other.decode())
        return replace(attempt, path=path, body=attempt.body.replace(own, other))

    def _json(self, draw: mutations.Draw, rng: random.Random) -> Attempt:
        one = rng.choice(self.texts)
        body = mutations.changed(self._live(json.loads(one.body)), draw, rng)
        return Attempt("JSON, fields changed", one.method, one.path, body)

    def _schema(self, draw: mutations.Draw, rng: random.Random) -> Attempt:
        method, path, described = rng.choice(self.described)
        path = re.sub(r"{(\w+)(:path)?}", lambda found: self._known(found[1], method), path)
        value = draw(described)
        return Attempt("JSON, by schema", method, path, mutations.dumped(self._live(value) if rng.random() < 0.8 else value))

    def _json_bytes(self, _: mutations.Draw, rng: random.Random) -> Attempt:
        one = rng.choice(self.texts)
        body = mutations.damaged(json.dumps(self._live(json.loads(one.body))).encode(), rng)
        return Attempt("JSON, bytes changed", one.method, one.path, body)

    def _pass(self, _: mutations.Draw, rng: random.Random) -> Attempt:
        one = rng.choice(self.passes)
        body = mutations.passed(one.body, self.run_id, self.number, rng)
        return Attempt("protobuf, fields changed", "POST", one.path, body, PROTOBUF)

    def _pass_bytes(self, _: mutations.Draw, rng: random.Random) -> Attempt:
        one = rng.choice(self.passes)
        message = pb.ForwardBackwardRequest.FromString(one.body)
        message.model_id, message.seq_id = self.run_id, self.number
        return Attempt(
            "protobuf, bytes changed", "POST", one.path, mutations.damaged(message.SerializeToString(), rng), PROTOBUF
        )

    def _nonsense(self, draw: mutations.Draw, rng: random.Random) -> Attempt:
        body = draw(st.binary(max_size=300)) if rng.random() < 0.5 else rng.randbytes(rng.choice((1, 20, 2000)))
        return Attempt("protobuf, random bytes", "POST", self.passes[0].path, body, PROTOBUF)

    def _address(self, draw: mutations.Draw, rng: random.Random) -> Attempt:
        """A part of the path, the query or the method is something else."""
        one = rng.choice([known for known in self.requests_of_session if not known.path.endswith("/finish")])
        parts, query = one.path.partition("?")[0].split("/"), ""
        if rng.random() < 0.7:
            parts[rng.randrange(min(3, len(parts) - 1), len(parts))] = quote(draw(names)[:2000], safe="")
        if rng.random() < 0.3:
            query = "?" + "&".join(f"{key}={quote(str(draw(mutations.numbers)))[:500]}" for key in ("limit", "offset"))
        method = rng.choice((*[one.method] * 6, "GET", "DELETE", "PUT", "POST", "PATCH", "OPTIONS", "HEAD", "TRACE"))
        if method == "DELETE" and parts[-2:] == ["weights", "one"]:
            parts[-1] = "two"
        return Attempt("addresses and methods", method, "/".join(parts) + query, one.body)

    def _encoding(self, _: mutations.Draw, rng: random.Random) -> Attempt:
        one = rng.choice([known for known in self.requests_of_session if known.body])
        encoding, body = rng.choice(self.bombs)
        headers = (("Content-Type", one.content_type), ("Content-Encoding", encoding), rng.choice(HEADERS))
        return Attempt("packed bombs, odd headers", one.method, one.path, body, headers)

    def _broken(self, draw: mutations.Draw, rng: random.Random) -> Attempt:
        data = rng.choice(BROKEN) if rng.random() < 0.7 else draw(st.binary(max_size=200))
        return Attempt("broken HTTP", raw=data)

    def _known(self, name: str, method: str) -> str:
        """Existing objects by the name of a part of an address. Objects that later attempts need are not deleted."""
        known = {
            "session_id": self.session_id,
            "run_id": f"{self.session_id}:train:0",
            "sampler_id": f"{self.session_id}:sample:0",
            "kind": "external_weights" if method == "DELETE" else "weights",
            "name": "exported" if method == "DELETE" else "one",
        }
        return known.get(name, "x")

    def _live(self, value: Any) -> Any:
        """Return a body with existing ids and the next sequence numbers, so that it passes the first checks."""
        if not isinstance(value, dict):
            return value
        known: dict[str, Any] = {
            "session_id": self.session_id,
            "model_id": self.run_id,
            "sampling_session_id": f"{self.session_id}:sample:0",
            "request_id": self.promised[-1],
            "base_model": "tiny",
            "seq_id": self.number if "model_id" in value else next(self._fresh),
        }
        known |= {name: next(self._fresh) for name in ("model_seq_id", "custom_loss_seq_id", "sampling_session_seq_id")}
        if value.get("path") in ("one", "sampled", "exported"):
            known["path"] = f"n{next(self._fresh)}"
        return {key: known.get(key, one) for key, one in value.items()}

    # ---- sending a request, and checking its result ----

    def _send(self, attempt: Attempt) -> None:
        self.recent.append(attempt)
        self._sent += 1
        if not attempt.raw and attempt.path.endswith(("/retrieve_future", "/retrieve_futures")):
            self._watched.append(self._pool.submit(self._alone, attempt))  # it may be held, rightly
            return
        self._note(attempt, self._answered(self.wire, attempt))
        self._of_run += 1
        if self._of_run >= A_RUN:
            self._new_run()

    def _alone(self, attempt: Attempt) -> None:
        with contextlib.closing(Wire(self.url, self.key)) as wire:
            self._note(attempt, self._answered(wire, attempt))

    def _answered(self, wire: Wire, attempt: Attempt) -> Answer | None:
        try:
            if attempt.raw is not None:
                return wire.raw(attempt.raw)
            path = attempt.path.encode("ascii", "replace").decode()
            return wire.ask(attempt.method, re.sub(r"[\x00-\x20\x7f]", "", path), attempt.body, attempt.headers)
        except TimeoutError:
            return None

    def _note(self, attempt: Attempt, answer: Answer | None) -> None:
        found = self.counts.by_kind[attempt.kind]
        found["requests"] += 1
        if answer is None:
            self._is_wrong(attempt, "hangs", "no answer in time")
            return
        self.counts.statuses[answer.status] += 1
        self.counts.slowest_s = max(self.counts.slowest_s, answer.seconds)
        group = "closed" if not answer.status else f"{answer.status // 100}xx"
        if group == "5xx" or (group == "closed" and attempt.raw is None and len(attempt.body) < 1 << 20):
            self._is_wrong(attempt, group, f"{answer.status}: {answer.body[:300]!r}")
            return
        found[group] += 1
        # Every session that is unknown to the caller ends with 204, so that clients can retry.
        is_named = self.victim in attempt.path.encode() and not (answer.status == 204 and "/finish" in attempt.path)
        if self.victim and group == "2xx" and (self.victim in answer.body or is_named):
            self._is_wrong(attempt, "leaks", f"{answer.status}: {answer.body[:300]!r}")
        told = answer.json()
        if group == "2xx" and isinstance(told, dict) and isinstance(told.get("request_id"), str) and "type" not in told:
            self._promised(attempt, told["request_id"])

    def _promised(self, attempt: Attempt, request_id: str) -> None:
        scope, _, number = request_id.rpartition("/")
        self.promised.append(request_id)
        self._watched.append(self._pool.submit(self._watch, attempt, request_id))
        if scope == self.run_id and int(number) == self.number:
            self.number += 1
        elif scope == self.run_id and int(number) > self.number:
            self._new_run()  # what comes after waits for what never comes

    def _watch(self, attempt: Attempt, request_id: str) -> None:
        """Poll a promised result until it exists."""
        end = time.monotonic() + IN_TIME_S
        with contextlib.closing(Wire(self.url, self.key)) as wire:
            while time.monotonic() < end:
                answer = wire.post("retrieve_future", {"request_id": request_id})
                told = answer.json()
                if isinstance(told, dict) and told.get("type") == "try_again":
                    continue
                if answer.status // 100 == 5:
                    self._is_wrong(attempt, "5xx", f"its result: {answer.status}: {answer.body[:300]!r}")
                failed = answer.status != 200 or (isinstance(told, dict) and "error" in told)
                if failed and isinstance(told, dict) and told.get("category") == "server":
                    self.counts.by_kind[attempt.kind]["server's fault"] += 1
                    self.counts.wrong.append(f"{attempt}: {told['error']}") if _is_bug(told["error"]) else None
                self.counts.by_kind[attempt.kind]["failed futures" if failed else "results"] += 1
                return
        self._is_wrong(attempt, "hangs", f"{request_id}: no result in time")

    def _is_wrong(self, attempt: Attempt, what: str, told: str) -> None:
        self.counts.by_kind[attempt.kind][what] += 1
        self.counts.wrong.append(
            f"{what}: {attempt.kind} {attempt.method} {attempt.path} {(attempt.raw or attempt.body)[:2000]!r}: {told}"
        )

    # ---- its own session ----

    def _new_session(self) -> None:
        """All that the honest client sent, sent again."""
        made = self.wire.post("create_session", {"tags": []})
        self.session_id = made.json()["session_id"]
        self.requests_of_session = [one.of(self.session_id, self.recorded_id) for one in self.templates]
        self.passes = [one for one in self.requests_of_session if one.is_proto]
        self.texts = [one for one in self.requests_of_session if one.body and not one.is_proto]
        for one in self.requests_of_session:
            if "/retrieve" in one.path or one.path.endswith(("/create_session", "/finish")):
                continue
            answer = self.wire.ask(one.method, one.path, one.body, [("Content-Type", one.content_type)])
            told = answer.json() if answer.status == 200 else None
            if isinstance(told, dict) and "request_id" in told:
                self.wire.post("retrieve_future", {"request_id": told["request_id"]})
        self._new_run()

    def _new_run(self) -> None:
        number = next(self._fresh)
        rank = 0 if number % 5 == 0 else 1
        body = {"session_id": self.session_id, "model_seq_id": number, "base_model": "tiny", "lora_config": {"rank": rank}}
        answer = self.wire.post("create_model", body)
        if answer.status != 200:  # an attempt has ended the session
            self._new_session()
            return
        self.wire.post("retrieve_future", answer.json())
        self.run_id, self.number, self._of_run = f"{self.session_id}:train:{number}", 1, 0

    def _settle(self) -> None:
        for one in self._watched:
            one.result()
        self._watched.clear()


def _operations(openapi: dict[str, Any]) -> Iterator[tuple[str, str, st.SearchStrategy[Any]]]:
    """Method, address and bodies of all that the server says it answers."""
    for path, methods in openapi["paths"].items():
        for method, told in methods.items():
            content = told.get("requestBody", {}).get("content", {})
            yield method.upper(), path, mutations.from_schema(content.get("application/json", {}).get("schema", {}))


def _is_bug(error: str) -> bool:
    """Whether a failed call reports an error that the server does not handle."""
    return re.match(r"[A-Z]\w+(Error|Exception)\b", error) is not None


SHARES = {
    Campaign._json: 6,
    Campaign._schema: 4,
    Campaign._json_bytes: 2,
    Campaign._pass: 5,
    Campaign._pass_bytes: 3,
    Campaign._nonsense: 1,
    Campaign._address: 2,
    Campaign._encoding: 1,
    Campaign._broken: 1,
}


# ---- a whole attack --------------------------------------------------------------------------------------------------


def escaped(root: Path, known: Sequence[Path]) -> list[Path]:
    """Files where the tricks lead, and those below ``root`` that are not in ``known`` folders."""
    tricks = [Path("/tmp") / mutations.TRICK, Path.cwd() / mutations.TRICK]
    files = [path for path in root.rglob("*") if path.is_file()]
    inside = [path for path in files if not any(one in path.parents for one in known) or mutations.TRICK in str(path)]
    return [path for path in tricks if path.exists()] + inside


@contextlib.contextmanager
def serving(model: Path, out: Path, keys: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The command itself, with limits low enough to be met."""
    limits = ("max_request_mb=4", "gap_timeout_s=0.5", "checkpoint_s=5", "log_mb=1", "port=0", "names=[tiny]")
    overrides = [f"model.name={model}", f"out={out}", f"server.keys_file={keys}", *(f"server.{one}" for one in limits)]
    here = out.parent
    here.mkdir(parents=True)
    command = [sys.executable, "-m", "cookbook", "serve", *overrides]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["PYTHONFAULTHANDLER"] = "1"
    with subprocess.Popen(command, cwd=here, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        found = re.search(r"http://\S+?:\d+", server.stdout.readline())
        assert found is not None, "the server did not start"
        try:
            yield found[0], server
        finally:
            server.terminate()


def rss_mb(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def attack(root: Path, requests: int, seed_: int) -> list[str]:
    """Attack a server and return all errors. Prints counts, and the server's memory over time."""
    model, out, keys = tiny.save(root / "model"), root / "a" / "b" / "out", root / "keys"
    keys.write_text(f"victim: {KEY}\nattacker: {ATTACKER}\n")
    templates, openapi, seen = recorded(model, root / "calm")
    began, memory = time.monotonic(), []
    with serving(model, out, keys) as (url, server), contextlib.ExitStack() as ended:
        assert honest(url) == seen, "two servers differ without an attack"
        victim = ended.enter_context(contextlib.closing(honest_in_two_parts(url)))
        campaign = Campaign(url, templates, openapi, ATTACKER, next(victim))
        parts = range(0, requests, math.ceil(requests / 10))
        with campaign:
            for part, start in enumerate(parts):
                campaign.run(min(parts.step, requests - start), seed_ + part)
                wrong = len(campaign.counts.wrong)
                sent, took = min(start + parts.step, requests), time.monotonic() - began
                memory.append(rss_mb(server.pid))
                print(f"{sent:,} requests, {took:.0f} s, RSS {memory[-1]:.0f} MB, {wrong} wrong", flush=True)
        found = campaign.counts.wrong
        if server.poll() is not None:
            found.append(f"the server has ended, {server.returncode}")
        elif next(victim) != seen:
            found.append("the victim gets other numbers than without the attack")
        elif honest(url) != seen:
            found.append("an honest client gets other numbers than before the attack")
        if memory[-1] > GROWTH * memory[min(3, len(memory) - 1)]:
            found.append(f"the memory grows: {', '.join(f'{one:.0f}' for one in memory)} MB")
    found += [f"outside of the server's folder: {path}" for path in escaped(root, [out, root / "calm", model]) if path != keys]
    print(campaign.counts.table())
    told = ", ".join(f"{status} {count:,}" for status, count in sorted(campaign.counts.statuses.items()))
    print(f"statuses: {told}; slowest answer {campaign.counts.slowest_s:.1f} s")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        wrong = attack(Path(root), arguments.requests, arguments.seed)
    print(f"{len(wrong)} wrong")
    raise SystemExit("\n".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
