"""Observability: Prometheus metrics, an event log of JSON lines, and the middleware that records HTTP requests in both."""

from __future__ import annotations

import asyncio
import json
import logging
import logging.handlers
import os
import re
import resource
import secrets
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from io import TextIOWrapper
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cookbook.backends.remote.connection import API

LOG = logging.getLogger("cookbook.server")
# The event log is rotated at this size; three old files are kept.
LOG_BYTES = 16 << 20
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Seconds between two measurements of the event loop's delay.
LOOP_TICK_S = 0.25
# Entry of the scope of a request: context managers to close once the response is complete.
CLOSED_AT_END = "cookbook.closed_at_end"
_TOKEN = re.compile("/download/[^/]*/?")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
# Bytes per unit of ru_maxrss.
_RSS_BYTES = 1 if sys.platform == "darwin" else 1024


def log_event(event: str, **fields: object) -> None:
    """Write one line to the event log; see :func:`log_to`."""
    LOG.info(json.dumps({"time": round(time.time(), 3), "event": event, **fields}))


class _EventFile(logging.handlers.RotatingFileHandler):
    def _open(self) -> TextIOWrapper:
        """Open the file for its owner only: it shows when which client did what."""
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        # The file may exist with another mode.
        os.fchmod(descriptor, 0o600)
        return os.fdopen(descriptor, "a", encoding=self.encoding, errors=self.errors)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - a method of the base class
        """Drop the event. The default would print a traceback for every event while the disk is full."""


def log_to(file: Path) -> None:
    """Write events to ``file``, one JSON object per line."""
    LOG.addHandler(_EventFile(file, maxBytes=LOG_BYTES, backupCount=3, encoding="utf-8"))
    LOG.setLevel(logging.INFO)
    LOG.propagate = False


class Metrics:
    """Counters since the start of the server."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        # HTTP requests by route and status.
        self.http_requests: Counter[tuple[str, ...]] = Counter()
        # Settled requests by kind and outcome ("done" or "failed").
        self.settled: Counter[tuple[str, ...]] = Counter()
        # Seconds from acceptance to result, summed by kind.
        self.seconds: defaultdict[tuple[str, ...], float] = defaultdict(float)
        self.trained_tokens = 0
        self.sampled_tokens = 0
        # Longest delays of the event loop since the start of the server, and in the last measurement.
        self.longest_loop_delay_s = self.loop_delay_s = 0.0

    async def measure_loop_delay(self) -> None:
        """Measure forever by how much the event loop is late. While the loop is late, no client gets a response."""
        while True:
            due = time.monotonic() + LOOP_TICK_S
            await asyncio.sleep(LOOP_TICK_S)
            self.note_loop_delay(time.monotonic() - due)

    def note_loop_delay(self, seconds: float) -> None:
        self.loop_delay_s = max(seconds, 0.0)
        self.longest_loop_delay_s = max(self.longest_loop_delay_s, seconds)

    def count_settled(self, kind: str, seconds: float, *, failed: bool) -> None:
        self.settled[kind, "failed" if failed else "done"] += 1
        self.seconds[kind,] += seconds

    def exposition(self, gauges: Iterable[tuple[str, str, float]]) -> str:
        """Return all counters, and ``gauges`` (name, help text, value), in Prometheus' text format."""
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_BYTES
        uptime = time.monotonic() - self.started
        lines = [
            *_family("http_requests_total", "HTTP requests.", self.http_requests, "route", "status"),
            *_family("calls_total", "Settled requests.", self.settled, "kind", "outcome"),
            *_family("call_seconds_total", "Seconds from the acceptance of requests to their results.", self.seconds, "kind"),
            *_family("trained_tokens_total", "Tokens of forward and backward passes.", {(): self.trained_tokens}),
            *_family("sampled_tokens_total", "Sampled tokens.", {(): self.sampled_tokens}),
        ]
        for name, help_text, value in gauges:
            lines += _family(name, help_text, {(): value})
        delays = ((self.loop_delay_s, "", "newest"), (self.longest_loop_delay_s, "_max", "longest"))
        for seconds, suffix, which in delays:
            help_text = f"Seconds by which the event loop was late, {which} measurement."
            lines += _family(f"event_loop_delay{suffix}_seconds", help_text, {(): seconds})
        lines += _family("memory_peak_bytes", "Peak resident memory of the server process.", {(): memory})
        lines += _family("uptime_seconds", "Seconds since the server started.", {(): uptime})
        return "\n".join(lines) + "\n"


def _family(name: str, help_text: str, samples: Mapping[tuple[str, ...], float], *labels: str) -> Iterator[str]:
    """Yield the lines of one metric, a sample for each combination of label values."""
    yield f"# HELP cookbook_{name} {help_text}"
    yield f"# TYPE cookbook_{name} {'counter' if name.endswith('_total') else 'gauge'}"
    for key, value in sorted(samples.items()):
        label_text = ",".join(f'{label}="{text}"' for label, text in zip(labels, key, strict=True))
        yield f"cookbook_{name}{{{label_text}}} {value}" if label_text else f"cookbook_{name} {value}"


class RequestObserver:
    """ASGI middleware that counts and logs every HTTP request.

    The id of a request is its ``X-Request-ID`` header if that is valid, else a new random id. The response carries it too.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # 500 is the status of a request that fails before its response starts.
        start, status = time.monotonic(), 500
        client_id = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = client_id if _REQUEST_ID.fullmatch(client_id) else secrets.token_hex(8)

        async def observed_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self.app(scope, receive, observed_send)
        finally:
            for resource in scope.get(CLOSED_AT_END, ()):
                resource.close()
            # Count by route pattern: paths contain ids, so their number, and that of the labels, would be unlimited.
            route = getattr(scope.get("route"), "path", "other").removeprefix(API)
            self.metrics.http_requests[route, str(status)] += 1
            milliseconds = round(1000 * (time.monotonic() - start), 1)
            # The address of a download is a credential.
            path = _TOKEN.sub("/download/***/", scope["path"])
            log_event("request", id=request_id, method=scope["method"], path=path, status=status, ms=milliseconds)
