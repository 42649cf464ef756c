"""Start and graceful shutdown of the server, and its status line on the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

import uvicorn

from cookbook.backends.group.supervisor import RankChannel
from cookbook.backends.local.idle_adapters import IdleAdapters
from cookbook.engine.model import ModelConfig
from cookbook.errors import ConfigError
from cookbook.protocols import DeploymentConfig, EngineBackend
from cookbook.server.app import create_app
from cookbook.server.config import ServerConfig
from cookbook.server.connections import BoundedConnection, fit_connections
from cookbook.server.metrics import log_event, log_to
from cookbook.server.state.catalog import Catalog
from cookbook.server.state.deployed import Deployed
from cookbook.server.state.host import Host
from cookbook.server.state.service import Service
from cookbook.utils import files

LOG_FILE = "requests.jsonl"
# Folder of the adapters of idle runs.
IDLE_ADAPTERS = "idle_adapters"
# Name of the checkpoint of each run that is saved at shutdown.
CHECKPOINT_NAME = "shutdown"
STATUS_S = 1.0
DRAIN_TICK_S = 0.05
# Seconds after server.drain_s in which runs are saved and connections closed.
END_S = 4.0


def serve(
    model: ModelConfig,
    backend: EngineBackend,
    server: ServerConfig,
    *,
    seed: int,
    out: Path,
    deployment: DeploymentConfig | None = None,
    channel: RankChannel | None = None,
) -> None:
    """Load the model, listen, and serve until a signal stops the server.

    Args:
        deployment: where the endpoint samples; None: in this process.
        channel: connection to the supervisor of a group of ranks, which owns the listening socket; None: open a socket here.

    Raises:
        ConfigError: the address is in use or needs API keys that are missing; another server uses ``out``.
        BackendError: the model cannot be loaded.
    """
    # Fail on missing keys now, before the model is loaded, which takes long.
    server.key_ring()
    server.check_tls()
    with contextlib.ExitStack() as closing:
        try:
            files.make_folders(out)
            if server.key_ring().keys:
                # Other users of the machine have no keys, and could read what tenants store.
                out.chmod(0o700)
            closing.enter_context(contextlib.nullcontext() if server.durability == "off" else files.locked(out))
        except OSError as error:
            raise ConfigError(f"out: cannot write to {out}: {error.strerror}; choose another folder with out=...") from None
        listener = closing.enter_context(open_listener(server) if channel is None else channel.listener())
        idle = IdleAdapters(int(server.adapters_gb * (1 << 30)), out / IDLE_ADAPTERS)
        names, graph_bytes = tuple(server.names), int(server.graphs_gb * (1 << 30))
        host = Host(model, backend, seed=seed, names=names, graph_bytes=graph_bytes, idle=idle)
        closing.callback(host.close)
        deployed = None
        if deployment is not None:
            # Servers of the deployment are ended also by a signal during their start.
            signal.signal(signal.SIGTERM, _exit_in_order)
            deployed = closing.enter_context(contextlib.closing(Deployed(deployment, host, out)))
        service = Service(host, Catalog(out, host.public, seed), server, deployed)
        log_to(out / LOG_FILE)
        config = uvicorn.Config(
            create_app(service),
            log_level="warning",
            access_log=False,
            http=functools.partial(BoundedConnection, limit=fit_connections(server.max_connections)),  # type: ignore[arg-type]
            ws="none",
            timeout_graceful_shutdown=2,
            ssl_certfile=server.tls_cert,
            ssl_keyfile=server.tls_key,
        )
        uvicorn_server = DrainingServer(config, service, channel)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, uvicorn_server.handle_outside)
        print(f"serving {model.name} on {_write_address(server, listener)}  (checkpoints in {out})", flush=True)
        uvicorn_server.run(sockets=[listener])


def _exit_in_order(number: int, _: FrameType | None) -> NoReturn:
    """End the process by an exception, so that open contexts are closed. A second signal does not interrupt them."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _write_address(server: ServerConfig, listener: socket.socket) -> str:
    """Return the URL of the server, and write it to ``server.address_file``. Raises ConfigError: the file is not writable."""
    address, port = listener.getsockname()[:2]
    scheme = "http" if server.tls_cert is None else "https"
    url = f"{scheme}://[{address}]:{port}" if ":" in address else f"{scheme}://{address}:{port}"
    if server.address_file is not None:
        try:
            files.write_text(Path(server.address_file), f"{url}\n")
        except OSError as error:
            raise ConfigError(
                f"server.address_file: cannot write {server.address_file!r}: {error.strerror}; choose a file in a writable "
                "folder"
            ) from None
    return url


def open_listener(server: ServerConfig) -> socket.socket:
    """Open a listening socket; connections wait until the server accepts them. Raises ConfigError."""
    # asyncio sets TCP_NODELAY only on sockets with an explicit protocol. Without it every response is delayed by 40 ms.
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((server.host, server.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"server.port: cannot listen on {server.host}:{server.port}: {error.strerror}; choose another port"
        ) from None
    return listener


class DrainingServer(uvicorn.Server):
    """Uvicorn server with a graceful shutdown.

    After a first signal it finishes accepted requests, for at most ``drain_s`` seconds. The process ends at the latest
    ``END_S`` seconds later, even in the middle of a call, and immediately after a second signal.
    """

    def __init__(self, config: uvicorn.Config, service: Service, channel: RankChannel | None = None) -> None:
        super().__init__(config)
        self.service = service
        self._channel = channel
        self._has_signal = False
        # A signal before Uvicorn handled signals.
        self._early: int | None = None

    def handle_outside(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal before Uvicorn does, and the signal that Uvicorn raises again after its shutdown.

        An early signal waits until the server has started. A later SIGTERM is ignored, so that the code after ``run`` runs.
        """
        if self._early is None and not (self._has_signal or self.started):
            self._early = sig
        elif sig == signal.SIGINT:
            raise KeyboardInterrupt

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # An idle server may be shutting down before its first signal.
        if self._has_signal:
            _exit_now(self.service, "stopping immediately", 128 + sig)
        self._has_signal = True
        super().handle_exit(sig, frame)
        drain_message = "finishing accepted requests and saving runs; press Ctrl-C again to stop immediately"
        print(f"\n{drain_message}", file=sys.stderr, flush=True)
        # On a thread of its own: the event loop and the worker may be in the middle of a long call.
        late = f"stopping: a call has not ended within server.drain_s={self.service.config.drain_s:g} s and {END_S:g} s more"
        timer = threading.Timer(self.service.config.drain_s + END_S, _exit_now, (self.service, late, 0))
        timer.daemon = True
        timer.start()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Recover, listen, and then report to the supervisor."""
        await super().startup(sockets)
        if self._channel is not None:
            channel = self._channel
            self.service.requests.watchers.append(lambda _: channel.progress())
            channel.ready()

    async def main_loop(self) -> None:
        if self._early is not None and not self._has_signal:
            self.handle_exit(self._early, None)
        tasks = [asyncio.create_task(show_status(self.service)), asyncio.create_task(self._end_if_idle())]
        try:
            await super().main_loop()
        finally:
            for task in tasks:
                task.cancel()

    async def _end_if_idle(self) -> None:
        """Begin a graceful shutdown once no client has sent a request for ``server.idle_h`` hours."""
        server = self.service.config
        if server.idle_h is None:
            return
        while (left_s := self.service.last_request + 3600 * server.idle_h - time.monotonic()) > 0:
            await asyncio.sleep(left_s)
        reason = f"no client has sent a request for {server.idle_h:g} h (server.idle_h)"
        print(f"{reason}; saving runs and ending", file=sys.stderr, flush=True)
        if server.idle_file is not None:
            try:
                files.write_text(Path(server.idle_file), f"{reason}\n")
            except OSError as error:
                # Without this the server would run forever.
                print(
                    f"server.idle_file: cannot write {server.idle_file!r}: {error.strerror}; make its folder writable",
                    file=sys.stderr,
                    flush=True,
                )
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then close. The listener stays open until then, so that clients can still fetch their results."""
        await drain(self.service, self.service.config.drain_s)
        await super().shutdown(sockets)


def _exit_now(service: Service, message: str, code: int) -> NoReturn:
    """End the process without waiting for its threads. As after a kill, the logs are whole, and a restart continues."""
    # A print raises RuntimeError if the signal has interrupted another print.
    with contextlib.suppress(RuntimeError):
        print(f"\n{message}", file=sys.stderr, flush=True)
    try:
        service.attempts.end()
        if service.deployed is not None:
            service.deployed.kill()
        sys.stdout.flush()
    finally:
        os._exit(code)


async def drain(service: Service, limit_s: float) -> None:
    """Refuse new requests, wait up to ``limit_s`` seconds for accepted ones, and save every run that has trained.

    Requests that take longer are stopped. With a log, a restart recomputes them, and the paused samples of vanished clients.
    """
    service.requests.closing = True
    log_event("shutdown", pending=_num_pending(service), runs=len(service.runs))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await service.endpoint.idle.wait()
            # Clients may vanish, and return, until the end.
            while _num_pending(service):
                await asyncio.sleep(DRAIN_TICK_S)
    service.abandon_work()
    for run in service.runs.values():
        if run.trainer.step:
            await service.save_run(run, CHECKPOINT_NAME)


def _num_pending(service: Service) -> int:
    """Return the number of accepted requests that are neither settled nor paused."""
    return sum(not service.is_paused(request) for request in service.requests.unsettled())


async def show_status(service: Service) -> None:
    """Update the status line every second until cancelled, if stderr is a terminal."""
    if not sys.stderr.isatty():
        return
    last_tokens, last_time = 0, time.monotonic()
    try:
        while True:
            await asyncio.sleep(STATUS_S)
            now, tokens = time.monotonic(), service.metrics.trained_tokens + service.metrics.sampled_tokens
            line = status_line(service, (tokens - last_tokens) / (now - last_time))
            # Return to the start of the line and clear it.
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
            last_tokens, last_time = tokens, now
    finally:
        print(file=sys.stderr)


def status_line(service: Service, tokens_per_s: float) -> str:
    """Return a line like ``1 sessions, 2 runs (12, 3 steps), 0 samplers, 4 requests pending, 5,120 tokens/s``."""
    steps = ", ".join(str(run.trainer.step) for run in service.runs.values())
    runs = f"{len(service.runs)} runs" + (f" ({steps} steps)" if steps else "")
    pending = len(service.requests.unsettled())
    return (
        f"{len(service.sessions)} sessions, {runs}, {len(service.samplers)} samplers, {pending} requests pending, "
        f"{tokens_per_s:,.0f} tokens/s"
    )
