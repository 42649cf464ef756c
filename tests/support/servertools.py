"""A server in a thread of the test, so that its insides can be looked at, or in a process of its own, to be killed."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from places import ROOT
from ports import free_port
from waiting import until

from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.engine.engine import Engine
from cookbook.engine.model import ModelConfig
from cookbook.protocols import EngineBackend
from cookbook.server.app import create_app
from cookbook.server.config import ServerConfig
from cookbook.server.serve import open_listener
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
    host = Host(
        ModelConfig(str(model)), backend, seed=0, names=tuple(config.names), graph_bytes=int(config.graphs_gb * (1 << 30))
    )
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


class Mortal:
    """``cookbook serve`` as a process that can be killed, and started again at the same address and folder."""

    def __init__(self) -> None:
        self._forker = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "support" / "serving.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        self.url = self._line = ""

    def start(self, model: Path, folder: Path, **options: Any) -> None:
        """``options`` are fields of ``ServerConfig``. The server before is killed."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        options = {"port": port, "names": ["tiny"], **options}
        self._line = json.dumps({"model": str(model), "out": str(folder), "options": options}) + "\n"
        self.again()

    def again(self) -> None:
        """Kill the server, and start it again. Return when it listens."""
        assert self._forker.stdin is not None and self._forker.stdout is not None
        self._forker.stdin.write(self._line)
        self._forker.stdin.flush()
        while not (line := self._forker.stdout.readline()).startswith("serving"):
            assert line, "the server did not start"

    def close(self) -> None:
        assert self._forker.stdin is not None
        self._forker.stdin.close()
        self._forker.wait()


wait_until = until
