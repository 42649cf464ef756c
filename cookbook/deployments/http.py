"""JSON over HTTP to a server that may be busy, starting or gone: retries, Retry-After, and errors that say which it was."""

from __future__ import annotations

import email.utils
import http.client
import ipaddress
import json
import random
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cookbook.errors import RolloutError, SamplerUnavailableError

RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
BUSY = frozenset({429, 503})
FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 30.0


class RequestRefusedError(RolloutError):
    """The server has understood and says no: asking again would change nothing. ``status`` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerUnavailableError(SamplerUnavailableError):
    """It does not answer, is busy or fails, after all retries. ``status`` is HTTP's, None without an answer."""

    def __init__(self, message: str, status: int | None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass
class Client:
    """Requests to the server at ``url``.

    ``timeout_s`` bounds the silence of the server during one request; a request is tried ``1 + retries`` times. ``gone``
    tells why no retry can help, for example that the process has ended; None while one might.
    """

    url: str
    timeout_s: float = 600.0
    retries: int = 6
    gone: Callable[[], str | None] = lambda: None
    _opener: urllib.request.OpenerDirector = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # A proxy of the environment knows no way back to this machine.
        handlers = [urllib.request.ProxyHandler({})] if _is_local(self.url) else []
        self._opener = urllib.request.build_opener(*handlers)

    def call(self, path: str, body: Any = None, *, method: str = "POST", busy: Callable[[], None] = lambda: None) -> Any:
        """The JSON that comes back, None for an empty answer.

        ``busy`` is called at every answer, or silence, that asks for less at once.

        Raises:
            RequestRefusedError: the request is at fault.
            ServerUnavailableError: the server is, still after the last retry.
        """
        for attempt in range(self.retries + 1):
            try:
                return self.once(path, body, method=method)
            except ServerUnavailableError as error:
                if error.status is None or error.status in BUSY:
                    busy()
                if reason := self.gone():
                    raise ServerUnavailableError(f"{self.url}: {reason}", None) from None
                if attempt == self.retries:
                    raise
                time.sleep(_wait_s(attempt, error.retry_after_s))
        raise AssertionError("unreachable")

    def once(
        self, path: str, body: Any = None, *, method: str = "POST", timeout_s: float | None = None, text: bool = False
    ) -> Any:
        """As :meth:`call`, without retries. ``text``: what comes back is none of JSON, and nobody reads it."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"}, method=method)
        try:
            with self._opener.open(request, timeout=timeout_s or self.timeout_s) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            raise self._refusal(path, error) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or str(error) or type(error).__name__
            raise ServerUnavailableError(f"{self.url}{path}: no answer ({reason}); is the server running?", None) from None
        try:
            return json.loads(content) if content and not text else None
        except ValueError:
            raise ServerUnavailableError(f"{self.url}{path}: answers with something other than JSON", None) from None

    def _refusal(self, path: str, error: urllib.error.HTTPError) -> RolloutError:
        with error:
            reason = _reason(error.read())
        message = f"{self.url}{path}: {error.code}: {reason}"
        if error.code in RETRIED:
            return ServerUnavailableError(message, error.code, _retry_after_s(error.headers.get("retry-after")))
        return RequestRefusedError(message, error.code)


def _is_local(url: str) -> bool:
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _reason(content: bytes) -> str:
    """What the server says, in one line."""
    text = content.decode(errors="replace")
    try:
        found = json.loads(text)
        error = found.get("error", found.get("detail", text))
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:500] or "no reason given"


def _retry_after_s(value: str | None) -> float | None:
    """Seconds from now; the header has seconds or a date."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        parsed = email.utils.parsedate_tz(value)
        if parsed is None:
            return None
        seconds = email.utils.mktime_tz(parsed) - time.time()
    return max(0.0, seconds) if seconds == seconds else None  # not NaN


def _wait_s(attempt: int, asked_s: float | None) -> float:
    """What the server asks for; else twice as long each time, and never in step with others who wait."""
    if asked_s is not None:
        return min(asked_s, LONGEST_WAIT_S)
    longest: float = min(FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S)
    return longest * random.uniform(0.5, 1.0)
