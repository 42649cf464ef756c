"""A server in a thread of the test, so that its insides can be looked at, or in a process of its own, to be killed."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from ports import free_port
from preloaded import Forked
from waiting import until

from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.backends.local.idle_adapters import IdleAdapters
from cookbook.engine.engine import Engine
from cookbook.engine.model import ModelConfig
from cookbook.protocols import EngineBackend
from cookbook.server.app import create_app
from cookbook.server.config import ServerConfig
from cookbook.server.serve import IDLE_ADAPTERS, open_listener
from cookbook.server.state.catalog import Catalog
from cookbook.server.state.host import Host
from cookbook.server.state.service import Service

KEY = "tml-test"


@dataclass
class Running:
    """A server that listens on ``url``."""

    url: str
    service: Service
    loop: asyncio.AbstractEventLoop
    app: FastAPI

    def call(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` in the event loop of the server; if it returns a coroutine, await it."""

        async def there() -> Any:
            result = function()
            return await result if inspect.isawaitable(result) else result

        return asyncio.run_coroutine_threadsafe(there(), self.loop).result()

    def trainer(self, client: Any) -> LocalTrainer:
        """The trainer behind a training client."""
        return self.service.runs[client.model_id].trainer

    def engine(self, client: Any) -> Engine:
        return self.trainer(client).engine


@contextlib.contextmanager
def running(
    model: Path,
    folder: Path,
    *,
    backend: EngineBackend | None = None,
    around: Callable[[Any], Any] = lambda app: app,
    **options: Any,
) -> Iterator[Running]:
    """A server in a thread. ``options`` are fields of ``ServerConfig``; ``around`` wraps the application."""
    backend = backend or LocalConfig()
    config = ServerConfig(**{"port": 0, **options})
    graph_bytes = int(config.graphs_gb * (1 << 30))
    idle = IdleAdapters(int(config.adapters_gb * (1 << 30)), folder / IDLE_ADAPTERS)
    host = Host(ModelConfig(str(model)), backend, seed=0, names=tuple(config.names), graph_bytes=graph_bytes, idle=idle)
    service = Service(host, Catalog(folder), config)
    app = create_app(service)
    with open_listener(config) as listener:
        server = uvicorn.Server(uvicorn.Config(around(app), log_level="error"))
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve([listener])))
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        try:
            yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", service, loop, app)
        finally:
            server.should_exit = True
            thread.join()
            loop.close()
            host.close()


@contextlib.contextmanager
def web_server(status: int, body: bytes) -> Iterator[str]:
    """The URL of a server of another program: it answers every request with ``status`` and ``body``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 - a method of the base class

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


# The program of a server that is killed, with JSON of ``model``, ``out`` and ``options``.
SERVE = """
import json, sys
from pathlib import Path
import torch
from cookbook.backends.local import LocalConfig
from cookbook.engine.model import ModelConfig
from cookbook.server.config import ServerConfig
from cookbook.server.serve import serve
torch.set_num_threads(1)
given = json.loads(sys.argv[1])
serve(ModelConfig(given["model"]), LocalConfig(), ServerConfig(**given["options"]), seed=0, out=Path(given["out"]))
"""


class Mortal:
    """``cookbook serve`` as a process that can be killed, and started again at the same address and folder."""

    def __init__(self) -> None:
        self.url = self._given = ""
        self._process: Forked | None = None

    def start(self, model: Path, folder: Path, **options: Any) -> None:
        """``options`` are fields of ``ServerConfig``. The server before is killed."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        options = {"port": port, "names": ["tiny"], **options}
        self._given = json.dumps({"model": str(model), "out": str(folder), "options": options})
        self.again()

    def again(self) -> None:
        """Kill the server, and start it again. Return when it listens."""
        self.close()
        self._process = Forked(self._given, code=SERVE, errors="inherited")
        while not (line := self._process.stdout.readline()).startswith("serving"):
            assert line, "the server did not start"

    def close(self) -> None:
        if self._process is not None:
            with self._process:
                self._process.kill()
            self._process = None


wait_until = until
