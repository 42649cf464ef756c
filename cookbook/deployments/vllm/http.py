"""Client for JSON over HTTP, with retries and exponential back-off, for servers that may be busy, starting or down."""

from __future__ import annotations

import email.utils
import http.client
import ipaddress
import json
import math
import random
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cookbook.errors import RolloutError, SamplerUnavailableError

RETRIED_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
BUSY_STATUSES = frozenset({429, 503})
FIRST_WAIT_S, MAX_WAIT_S = 0.25, 30.0


class RequestRefusedError(RolloutError):
    """The server refuses a request, and would refuse it again. ``status`` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerUnavailableError(SamplerUnavailableError):
    """The server does not respond, is busy or fails. ``status`` is the HTTP status; None: there was no response."""

    def __init__(self, message: str, status: int | None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


# This uses urllib, because httpx needs a third more CPU time per request, measured with 2,000 logprobs in the response.
@dataclass
class Client:
    """Client of the server at ``url``.

    Args:
        timeout_s: read timeout of a request.
        retries: number of retries of a failed request.
        gone: returns why retries are pointless, for example that the server's process has ended, or None.
    """

    url: str
    timeout_s: float = 600.0
    retries: int = 6
    gone: Callable[[], str | None] = lambda: None
    _opener: urllib.request.OpenerDirector = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Do not use the proxy of the environment for this machine: a proxy cannot reach it.
        handlers = [urllib.request.ProxyHandler({})] if _is_local(self.url) else []
        self._opener = urllib.request.build_opener(*handlers)

    def call(self, path: str, body: object = None, *, method: str = "POST", busy: Callable[[], None] = lambda: None) -> Any:
        """Send a request, and retry it if the server is unavailable. Returns the response's JSON, None for an empty response.

        Args:
            busy: called after each attempt to which the server was too busy to respond, or did not respond.

        Raises:
            RequestRefusedError: the server refuses the request.
            ServerUnavailableError: the last attempt failed too, or retries are pointless.
        """
        for attempt in range(self.retries + 1):
            try:
                return self.once(path, body, method=method)
            except ServerUnavailableError as error:
                if error.status is None or error.status in BUSY_STATUSES:
                    busy()
                if reason := self.gone():
                    raise ServerUnavailableError(f"{self.url}: {reason}", None) from None
                if attempt == self.retries:
                    raise
                time.sleep(_wait_s(attempt, error.retry_after_s))
        raise AssertionError("unreachable")

    def once(
        self, path: str, body: object = None, *, method: str = "POST", timeout_s: float | None = None, text: bool = False
    ) -> Any:
        """Send a request once; see :meth:`call`. ``text``: the response body is not JSON and is ignored."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"}, method=method)
        try:
            with self._opener.open(request, timeout=timeout_s or self.timeout_s) as response:
                content = response.read()
        except urllib.error.HTTPError as error:
            raise self._refusal(path, error) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or str(error) or type(error).__name__
            raise ServerUnavailableError(f"{self.url}{path}: no answer ({reason}); is the server running?", None) from None
        try:
            return json.loads(content) if content and not text else None
        except ValueError:
            raise ServerUnavailableError(f"{self.url}{path}: the response is not JSON; is this a vLLM server?", None) from None

    def _refusal(self, path: str, error: urllib.error.HTTPError) -> RolloutError:
        with error:
            reason = _reason(error.read())
        message = f"{self.url}{path}: {error.code}: {reason}"
        if error.code in RETRIED_STATUSES:
            return ServerUnavailableError(message, error.code, _retry_after_s(error.headers.get("retry-after")))
        return RequestRefusedError(message, error.code)


def _is_local(url: str) -> bool:
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _reason(content: bytes) -> str:
    """Return the server's error message, in one line."""
    text = content.decode(errors="replace")
    try:
        body = json.loads(text)
        error = body.get("error", body.get("detail", text))
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:500] or "no reason given"


def _retry_after_s(value: str | None) -> float | None:
    """Convert a Retry-After header, which is a number of seconds or a date, to seconds from now."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        parsed = email.utils.parsedate_tz(value)
        if parsed is None:
            return None
        seconds = email.utils.mktime_tz(parsed) - time.time()
    # float() accepts "nan".
    return None if math.isnan(seconds) else max(0.0, seconds)


def _wait_s(attempt: int, retry_after_s: float | None) -> float:
    """Return the wait before the next attempt: the server's Retry-After, else exponential back-off with jitter."""
    if retry_after_s is not None:
        return min(retry_after_s, MAX_WAIT_S)
    longest: float = min(FIRST_WAIT_S * 2**attempt, MAX_WAIT_S)
    return longest * random.uniform(0.5, 1.0)
