"""The application: state, routes, and what surrounds them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from cookbook import __version__
from cookbook.server.auth import Auth
from cookbook.server.errors import Refused
from cookbook.server.observed import Observed
from cookbook.server.restoring import restore
from cookbook.server.results import error_response
from cookbook.server.routes import about, download, futures, metrics, runs, sampling, session, training
from cookbook.server.service import Service

API = "/api/v1"
HOUSEKEEPING_S = 30.0


def create_app(service: Service) -> FastAPI:
    """The server around ``service``. Raises ConfigError where its keys are not in order."""
    app = FastAPI(
        title="cookbook", version=__version__, lifespan=_lifespan, docs_url=f"{API}/docs", openapi_url=f"{API}/openapi.json"
    )
    app.state.service = service
    for part in (session, training, sampling, futures, runs, download, about):
        app.include_router(part.router, prefix=API)
    app.include_router(metrics.router)
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(ClientDisconnect, _unheard)
    app.add_middleware(Auth, keys=service.config.api_keys())
    app.add_middleware(Observed, metrics=service.metrics)
    return app


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return error_response(error.status, str(error))


async def _unheard(_: Request, __: Exception) -> Response:
    """The client has gone in the middle of its request: no fault of ours, and nobody reads the answer."""
    return error_response(400, "the request ended before it was whole")


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    await restore(app.state.service)
    keeping = asyncio.create_task(_keep_house(app.state.service))
    yield
    keeping.cancel()


async def _keep_house(service: Service) -> None:
    """Frees what clients that have vanished held."""
    while True:
        await asyncio.sleep(HOUSEKEEPING_S)
        service.end_silent_sessions()
        service.prune_logs()
