"""Limits on connections: their number, and the time that they stay open without a request."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import time
import weakref
from collections import Counter, defaultdict
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger("cookbook")

# Seconds for which a connection stays open without a request, or with a response of which its client reads nothing.
IDLE_S = 30.0
# Entry of the scope of a request: its connection.
CONNECTION = "cookbook.connection"
# Seconds between two log lines about the same fault of clients.
WARN_EVERY_S = 60.0
# Largest header of a request, and largest trailer, beyond its first read. The parser itself has no limit.
MAX_HEADER_BYTES = 64 << 10
# Files that the server may open besides connections: logs, checkpoints, and the files of libraries.
OTHER_FILES = 1024


def fit_connections(configured: int) -> int:
    """Raise the process's limit on open files if necessary, and return the number of connections that fits into it."""
    soft, hard = (1 << 30 if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    files = min(configured + OTHER_FILES, hard)
    if soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    fitting = max(1, min(configured, max(files - OTHER_FILES, files // 2)))
    if fitting < configured:
        log.warning(
            "server.max_connections: %d connections fit into this process's limit of %d open files, got %d; raise the hard "
            "limit (ulimit -Hn)",
            fitting,
            hard,
            configured,
        )
    return fitting


class Repeats:
    """Counts an event that clients cause, so that the log reports it every ``WARN_EVERY_S`` seconds at most."""

    def __init__(self) -> None:
        self._told_at = -math.inf
        self._count = 0

    def count(self) -> int:
        """Count one event. Return the number of events since the last log line if it is time for the next, else 0."""
        self._count += 1
        now = time.monotonic()
        if now - self._told_at < WARN_EVERY_S:
            return 0
        count, self._count, self._told_at = self._count, 0, now
        return count


class _RepeatedWarnings(logging.Filter):
    """Drops repeated warnings of Uvicorn, such as those about invalid requests, and adds their number to the next one."""

    def __init__(self) -> None:
        super().__init__()
        self._repeats: defaultdict[str, Repeats] = defaultdict(Repeats)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        # The format without its arguments, so that the number of entries is limited.
        count = self._repeats[record.msg].count()
        if count > 1:
            record.msg = f"{record.msg} ({count} times since the last such line)"
        return count > 0


_WARNINGS = _RepeatedWarnings()


class BoundedConnection(HttpToolsProtocol):
    """Connection of a client, closed ``IDLE_S`` seconds after its last request.

    Above ``limit`` connections, a new one closes the connection that has been without a request for the longest time. If all
    have a request, a connection of the API key with the most connections is closed: the newest one. Connections without a key
    count as those of one key. Clients send a request again if its connection was closed.
    """

    # Connections above the limit, of the whole process.
    _above_limit = Repeats()

    def __init__(self, *args: Any, limit: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logger.addFilter(_WARNINGS)
        self._limit = limit
        # Times on the monotonic clock: of the start of the connection or the end of its last response, and of the last change
        # of the number of bytes that the client has to read.
        self.idle_since = self._unread_since = time.monotonic()
        # Name of the API key of the newest request; None: without a key, or no request has arrived.
        self.owner: str | None = None
        # The scope of a request must not keep its connection in memory: the connection refers to the scope.
        self._proxy = weakref.proxy(self)
        self._unread_bytes = 0
        # Whether the last read had the start of a request or a part of a body, and the bytes since the last such read.
        self._has_advanced = False
        self._header_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def has_request(self) -> bool:
        """Whether the headers of a request are complete, and its response is not."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._check_later()
        if len(self.connections) > self._limit:
            if self._above_limit.count():
                log.warning(
                    "more than %d connections: those without a request are closed; raise server.max_connections", self._limit
                )
            self._close_another()

    def _close_another(self) -> None:
        """Close another connection to keep the limit: one of the key with the most, preferably an idle one."""
        others = [
            connection
            for connection in self.connections
            if isinstance(connection, BoundedConnection) and connection is not self
        ]
        counts = Counter(connection.owner for connection in (*others, self))
        largest = max(counts, key=lambda owner: (counts[owner], owner is None))
        idle = [connection for connection in others if not connection.has_request]
        if own := [connection for connection in idle if connection.owner == largest] or idle:
            min(own, key=lambda connection: connection.idle_since).abort()
        elif largest is None:
            self.abort()
        else:
            max(
                (connection for connection in others if connection.owner == largest),
                key=lambda connection: connection.idle_since,
            ).abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._has_advanced = False
        super().data_received(data)
        # All other bytes are of headers, and after a body in chunks of trailers, which the parser keeps as well.
        self._header_bytes = 0 if self._has_advanced else self._header_bytes + len(data)
        if self._header_bytes > MAX_HEADER_BYTES:
            self.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_advanced = True

    def on_headers_complete(self) -> None:
        # The middleware that authenticates the request writes the name of its key.
        cast(dict[str, Any], self.scope)[CONNECTION] = self._proxy
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._has_advanced = True

    def on_response_complete(self) -> None:
        self.idle_since = time.monotonic()
        super().on_response_complete()

    def abort(self) -> None:
        """Close the connection now, and drop what the client has not read."""
        self.connections.discard(self)
        self.transport.abort()

    def _check_later(self) -> None:
        self._timer = self.loop.call_later(IDLE_S / 4, self._check)

    def _check(self) -> None:
        """Close the connection if it is idle. Bytes of an incomplete header do not count: a client could send them slowly."""
        now, unread_bytes = time.monotonic(), self.transport.get_write_buffer_size()
        if unread_bytes != self._unread_bytes:
            self._unread_bytes, self._unread_since = unread_bytes, now
        since = self._unread_since if unread_bytes else self.idle_since
        if (unread_bytes or not self.has_request) and now - since >= IDLE_S:
            self.abort()
        else:
            self._check_later()
