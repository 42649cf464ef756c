"""A server in a thread of the test, so that its insides can be looked at, and the unmodified client to talk to it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.engine.engine import Engine
from cookbook.engine.model import ModelConfig
from cookbook.server.app import create_app
from cookbook.server.catalogue import Catalogue
from cookbook.server.config import ServerConfig
from cookbook.server.host import Host
from cookbook.server.serve import listening
from cookbook.server.service import Service

KEY = "tml-test"


@dataclass
class Running:
    """A server that listens on ``url``."""

    url: str
    service: Service
    loop: asyncio.AbstractEventLoop

    def call(self, function: Callable[[], Any]) -> Any:
        """Calls ``function`` where the server's state may be changed."""

        async def there() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(there(), self.loop).result()

    def trainer(self, client: Any) -> LocalTrainer:
        """The trainer behind a training client."""
        return self.service.runs[client.model_id].trainer

    def engine(self, client: Any) -> Engine:
        return self.trainer(client).engine


@contextlib.contextmanager
def running(model: Path, folder: Path, **options: Any) -> Iterator[Running]:
    """``options`` are fields of ``ServerConfig``."""
    config = ServerConfig(port=0, **options)
    host = Host(ModelConfig(str(model)), LocalConfig(), seed=0, names=tuple(config.names), graph_bytes=config.graph_bytes)
    service = Service(host, Catalogue(folder), config)
    with listening(config) as listener:
        server = uvicorn.Server(uvicorn.Config(create_app(service), log_level="error"))
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve([listener])))
        thread.start()
        try:
            yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", service, loop)
        finally:
            server.should_exit = True
            thread.join()
            loop.close()
            host.close()
