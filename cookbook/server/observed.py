"""Every request gets an id, a line in the log and a place in the metrics."""

from __future__ import annotations

import json
import logging
import logging.handlers
import re
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cookbook.server.metrics import Metrics

if TYPE_CHECKING:
    from cookbook.server.futures import Answer
    from cookbook.server.results import Result

LOG = logging.getLogger("cookbook.server")
LOG_BYTES = 16 << 20  # then a new file is begun; three old ones stay
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Observed:
    """Around all else: notes what was asked and answered under the id of ``X-Request-ID``, or a new one, and sends it back."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.monotonic(), 500  # what stands when nothing was sent
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _ID.fullmatch(given) else secrets.token_hex(8)

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            route = getattr(scope.get("route"), "path", "other")  # the pattern: paths with ids would be endless labels
            self.metrics.requests[route, str(status)] += 1
            took = round(1000 * (time.monotonic() - start), 1)
            event("request", id=request_id, method=scope["method"], path=scope["path"], status=status, ms=took)


def settled(answer: Answer, result: Result) -> None:
    """Notes that a promised result is there; ``call`` is the id that the client asks for it by."""
    took = round(1000 * (time.monotonic() - answer.asked), 1)
    failure = {"error": result.error} if result.is_failure else {}
    event("call", call=answer.request_id, kind=answer.kind, ms=took, **failure)


def event(what: str, **facts: Any) -> None:
    LOG.info(json.dumps({"time": round(time.time(), 3), "event": what, **facts}))


class _EventFile(logging.handlers.RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - its name in the base class
        """A full disk costs events, and not a trace on the terminal for each."""


def log_to(file: Path) -> None:
    """Writes the events to ``file``, one JSON object a line."""
    LOG.addHandler(_EventFile(file, maxBytes=LOG_BYTES, backupCount=3, encoding="utf-8"))
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
