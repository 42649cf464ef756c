"""Test whether the Hugging Face hub is reachable. Its own client would retry for up to a minute and print each attempt."""

from __future__ import annotations

import socket
import urllib.request
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 5.0


def answers() -> bool:
    """Whether a connection opens. True without a test if ``HF_HUB_OFFLINE`` is set or a proxy is configured."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or urllib.request.getproxies():
        return True
    url = urlsplit(constants.ENDPOINT)
    port = url.port or (80 if url.scheme == "http" else 443)
    try:
        socket.create_connection((url.hostname or "", port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True
