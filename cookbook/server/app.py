"""The FastAPI application: routes, middleware, recovery at start and periodic cleanup."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from cookbook.backends.remote.connection import API
from cookbook.errors import CheckpointError, ConfigError
from cookbook.server.connections import CONNECTION
from cookbook.server.handlers.recovery import recover
from cookbook.server.handlers.silence import restore, unload_silent_sessions
from cookbook.server.keys import CALLER, ApiKey, KeyRing
from cookbook.server.metrics import RequestObserver
from cookbook.server.pages import check_page
from cookbook.server.routes import endpoint, hub, requests, runs, session
from cookbook.server.state.countdown import STOPPED_S
from cookbook.server.state.service import Service
from cookbook.server.wire import openai
from cookbook.server.wire.bodies import Refused
from cookbook.server.wire.encode import error_response
from cookbook.utils.version import __version__

log = logging.getLogger("cookbook")
# Seconds between two searches for silent clients, and between two deletions of old log files.
CLEANUP_S, PRUNE_S = 1.0, 30.0
# Routes without authentication: health probes have no key, and download URLs are signed.
WITHOUT_KEY = (f"{API}/healthz", f"{API}/download/")


def create_app(service: Service) -> FastAPI:
    """Build the application."""
    app = FastAPI(
        title="cookbook", version=__version__, lifespan=_lifespan, docs_url=f"{API}/docs", openapi_url=f"{API}/openapi.json"
    )
    app.state.service = service
    add_routes(app)
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(CheckpointError, _refused)
    app.add_exception_handler(ClientDisconnect, _disconnected)
    # A route of another method answers 405.
    for status in (404, 405):
        app.add_exception_handler(status, functools.partial(_no_route, status))
    app.add_middleware(Auth, keys=service.tenants.keys, host=service.config.host, on_request=service.note_request)
    app.add_middleware(RequestObserver, metrics=service.metrics)
    return app


def add_routes(app: FastAPI) -> FastAPI:
    """Add every route of the server, and return the application."""
    # FastAPI tries the routes in order, so those of every step come first. It tries the routes of an included router twice.
    for router in (requests.router, session.router, runs.router, endpoint.router, session.metrics_router, hub.router):
        app.router.routes.extend(router.routes)
    return app


class Auth:
    """ASGI middleware for API-key authentication, with ``X-API-Key`` or a bearer token. It sets ``CALLER`` for the request.

    Requests of web pages are refused; see :func:`check_page`. If the server has no keys, requests are not authenticated.
    ``on_request`` is called at every request of a client; health probes and Prometheus are no clients.
    """

    def __init__(
        self, app: ASGIApp, keys: KeyRing, host: str = "127.0.0.1", on_request: Callable[[], None] = lambda: None
    ) -> None:
        self.app = app
        self._keys = keys
        self._host = host
        self._on_request = on_request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                check_page(Headers(scope=scope), self._host, has_keys=bool(self._keys.keys))
            except Refused as error:
                await _error(scope["path"], error, error.status, str(error))(scope, receive, send)
                return
        is_open = scope["type"] != "http" or scope["path"].startswith(WITHOUT_KEY)
        key = None if is_open else self._key_of(scope)
        if not is_open and key is None and self._keys.keys:
            refused = Refused(401, "the API key is missing or wrong; set TINKER_API_KEY, or api_key of an OpenAI client")
            await _error(scope["path"], refused, 401, str(refused))(scope, receive, send)
            return
        if not is_open and scope["path"].startswith((API, *openai.ENDPOINT_PATHS)):
            self._on_request()
        CALLER.set(key)
        # Other servers than that of `cookbook serve` have connections of another class.
        if (connection := scope.get(CONNECTION)) is not None:
            connection.owner = None if key is None else key.name
        await self.app(scope, receive, send)

    def _key_of(self, scope: Scope) -> ApiKey | None:
        """Return the key of a request; None: it is missing or wrong. A changed file of keys is read again."""
        try:
            self._keys.refresh()
        except ConfigError as error:
            log.warning("%s; the former keys stay valid", error)
        headers = dict(scope["headers"])
        authorization = headers.get(b"authorization", b"").strip()
        scheme, _, token = authorization.partition(b" ")
        return self._keys.find(headers.get(b"x-api-key") or (token.strip() if scheme.lower() == b"bearer" else authorization))


async def _refused(request: HttpRequest, error: Exception) -> Response:
    """Respond to a refused request. A CheckpointError (invalid address, unknown checkpoint) becomes status 404."""
    service: Service = request.app.state.service
    status = error.status if isinstance(error, Refused) else 404
    return _error(request.url.path, error, status, service.without_paths(str(error)))


def _error(path: str, error: Exception, status: int, message: str) -> Response:
    """Return an error in the format that the clients of the route know."""
    if path.startswith(openai.ENDPOINT_PATHS):
        return openai.openai_error(error, status, message)
    return error_response(status, message)


async def _no_route(status: int, request: HttpRequest, _: Exception) -> Response:
    """Respond to a request that no route matches, such as one of the hosted service's account management."""
    path = request.url.path
    page = "docs/reference/tinker-compatibility.md"
    message = f"{request.method} {path[:200]}: this server has no such route; {page} lists what it supports"
    return _error(path, Refused(status, message), status, message)


async def _disconnected(_: HttpRequest, __: Exception) -> Response:
    """Handle a client that disconnected while it sent a request.

    No client reads this response. Without the handler the disconnect would be logged as an error of the server.
    """
    return error_response(400, "the connection closed before the request was complete")


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    service.restore = functools.partial(restore, service)
    await recover(service)
    tasks = [asyncio.create_task(work) for work in (_clean_up_periodically(service), service.metrics.measure_loop_delay())]
    yield
    for task in tasks:
        task.cancel()
    service.decoder.close()


async def _clean_up_periodically(service: Service) -> None:
    pruned = seen = time.monotonic()
    while True:
        await asyncio.sleep(CLEANUP_S)
        # A late tick means that the server was stopped: what clients sent meanwhile has not been read yet.
        if time.monotonic() - seen > CLEANUP_S + STOPPED_S:
            service.excuse_silence()
        seen = time.monotonic()
        try:
            unload_silent_sessions(service)
            if seen - pruned >= PRUNE_S:
                pruned = seen
                service.prune_logs()
        except Exception:
            # For example a disk that cannot sync. The next cleanup may succeed.
            log.exception("the periodic cleanup has failed; it is repeated")
