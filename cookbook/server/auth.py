"""Who may come in."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from cookbook.server.results import error_response

OPEN = ("/api/v1/healthz", "/api/v1/download/")  # a probe has no key, and a download carries its proof in its address


class Auth:
    """Lets requests with one of ``keys`` through, in ``X-API-Key`` or as a bearer token. No keys: everybody."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._digests or scope["path"].startswith(OPEN) or self._knows(scope):
            await self.app(scope, receive, send)
        else:
            await error_response(401, "the API key is missing or wrong; set TINKER_API_KEY")(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        """Compares with every key, in a time that tells nothing about where they differ."""
        headers = dict(scope["headers"])
        given = headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        digest = hashlib.sha256(given).digest()
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
