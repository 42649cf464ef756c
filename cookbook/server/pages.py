"""Protection against web pages: a page in a browser can send requests to servers of its user's machine."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from cookbook.server.wire.bodies import Refused

# Types that a page may send to another site without asking that site first. Only forms send them.
FORM_TYPES = ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain")


def check_page(headers: Headers, host: str, *, has_keys: bool) -> None:
    """Refuse a request that a web page of another site may have sent.

    Args:
        headers: headers of the request.
        host: address or name on which the server listens.
        has_keys: whether the server authenticates requests. Pages have no keys, so that only the origin is checked.

    Raises:
        Refused: 400, the request has several Host headers; 403, it comes from a page of another site, or names a host that
            leads to this machine but is not its own name; 415, it has the type of a form.
    """
    hosts = headers.getlist("host")
    if len(hosts) > 1:
        raise Refused(400, f"Host: expected one header, got {len(hosts)}; send one")
    origin = headers.get("origin")
    is_foreign = origin is not None and urlsplit(origin).netloc.lower() != (hosts[0].lower() if hosts else None)
    if is_foreign or headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        raise Refused(403, f"Origin: a web page of another site sent this request, got {str(origin)[:100]!r}; use a program")
    if has_keys:
        return
    if hosts and not _is_own(hosts[0], host):
        # A page can let its own name lead to this machine, and is then of the same site as the server.
        raise Refused(403, f"Host: unknown host, got {hosts[0][:100]!r}; use http://127.0.0.1 or http://localhost, or set keys")
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type in FORM_TYPES:
        raise Refused(415, f"Content-Type: forms are not accepted, got {content_type!r}; send application/json")


def _is_own(header: str, host: str) -> bool:
    """Whether a Host header names the address ``host`` of the server, or this machine."""
    try:
        name = urlsplit(f"//{header}").hostname
    except ValueError:
        return False
    if name in (host.lower(), "localhost"):
        return True
    try:
        return ipaddress.ip_address(name or "").is_loopback
    except ValueError:
        return False
