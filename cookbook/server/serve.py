"""Starting and stopping the server."""

from __future__ import annotations

import contextlib
import signal
import socket
from pathlib import Path

import uvicorn

from cookbook import atomic, lock
from cookbook.backends.local import LocalConfig
from cookbook.engine.model import ModelConfig
from cookbook.errors import ConfigError
from cookbook.server.app import create_app
from cookbook.server.catalogue import Catalogue
from cookbook.server.config import ServerConfig
from cookbook.server.host import Host
from cookbook.server.observed import log_to
from cookbook.server.running import Server
from cookbook.server.service import Service

LOG_FILE = "requests.jsonl"


def serve(model: ModelConfig, backend: LocalConfig, server: ServerConfig, *, seed: int, out: Path) -> None:
    """Loads the model, listens, and answers until it is told to stop.

    Raises:
        ConfigError: the address cannot be had, or needs keys that are not there; another server uses ``out``.
        BackendError: the model cannot be loaded.
    """
    server.api_keys()  # before anything slow
    atomic.make_folders(out)
    alone = contextlib.nullcontext() if server.durability == "off" else lock.held(out)
    with alone, listening(server) as listener:
        host = Host(model, backend, seed=seed, names=tuple(server.names), graph_bytes=server.graph_bytes)
        service = Service(host, Catalogue(out), server)
        log_to(out / LOG_FILE)
        address, port = listener.getsockname()[:2]
        print(f"serving {model.name} on http://{address}:{port}  (checkpoints in {out})", flush=True)
        config = uvicorn.Config(create_app(service), log_level="warning", access_log=False, timeout_graceful_shutdown=5)
        signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn stops on it, then raises it again; what follows has to run
        try:
            Server(config, service).run(sockets=[listener])
        finally:
            host.close()


def listening(server: ServerConfig) -> socket.socket:
    """A socket that takes connections from now on; they wait until somebody answers. Raises ConfigError."""
    # With its protocol named, asyncio sends at once (TCP_NODELAY). Else every answer waits 40 ms for the client's next packet.
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((server.host, server.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"server.port: cannot listen on {server.host}:{server.port}: {error.strerror}; choose another"
        ) from None
    return listener
