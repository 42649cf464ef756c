"""Whether an HTTP server answers within a few seconds. Clients of trackers would retry for minutes, without a word."""

from __future__ import annotations

import http.client
import ssl
import threading
import urllib.error
import urllib.request
from urllib.parse import urlsplit

# Seconds that a server may take to answer any request, and those that a name may take to resolve in addition.
ANSWER_S, RESOLVE_S = 3.0, 2.0
# Errors of a proxy about the server behind it.
GATEWAY_ERRORS = (502, 503, 504)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer, so that it is not followed."""

    def redirect_request(self, *_: object) -> None:
        return None


def no_answer(url: str) -> str | None:
    """Return why the server of ``url`` does not answer, without the password of the URL; None if it answers anything.

    An unknown certificate and HTTP errors other than those of a gateway are answers: the tracker's own client reports them
    better. A proxy of the environment is used as other clients use it; with a SOCKS proxy, nothing is tested.
    """
    parts = urlsplit(url)
    if not parts.hostname or "all" in urllib.request.getproxies():
        return None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    address = f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}/"
    reasons: list[str] = []

    def ask() -> None:
        try:
            opener = urllib.request.build_opener(_NoRedirects)
            opener.open(urllib.request.Request(address, method="HEAD"), timeout=ANSWER_S).close()
        except urllib.error.HTTPError as error:
            if error.code in GATEWAY_ERRORS:
                reasons.append(f"{address} does not answer: its gateway or proxy returned HTTP {error.code}")
        except http.client.HTTPException:
            return
        except OSError as error:
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(cause, TimeoutError):
                reasons.append(f"{address} does not answer in {ANSWER_S:g} s")
            elif not isinstance(cause, ssl.SSLError):
                reasons.append(f"{address} does not answer: {getattr(cause, 'strerror', None) or cause}")

    # The timeout of a socket does not cover the resolution of the name.
    thread = threading.Thread(target=ask, name="reachable", daemon=True)
    thread.start()
    thread.join(ANSWER_S + RESOLVE_S)
    if thread.is_alive():
        return f"{address} does not answer in {ANSWER_S + RESOLVE_S:g} s"
    return reasons[0] if reasons else None
