"""Whether the server of a tracker answers: its own client would try again for a minute, and the run waits for it."""

from __future__ import annotations

import socket
import urllib.request
from urllib.parse import urlsplit

# Seconds that a server may take to accept a connection.
CONNECT_S = 3.0


def connect(url: str) -> None:
    """Raise ConnectionError: the server does not accept a connection. Behind a proxy it is not tried."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return
    if parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(parts.hostname):
        return
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname, port), timeout=CONNECT_S).close()
    except OSError as error:
        raise ConnectionError(f"{url} does not answer: {error.strerror or error}") from None
