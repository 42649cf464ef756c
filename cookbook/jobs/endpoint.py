"""A local address that always leads to the trainer of a job: it follows the job from attempt to attempt."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from cookbook.backends.remote import pointers
from cookbook.backends.remote.config import RemoteClients, read_key
from cookbook.backends.remote.connection import Connection
from cookbook.backends.remote.disk_trainer import DiskTrainer
from cookbook.engine.model import ModelConfig
from cookbook.errors import BackendError, ConfigError, CookbookError
from cookbook.jobs.command import STATE
from cookbook.jobs.manager import POLL_S, TrainerJobManager, is_healthy, lost

log = logging.getLogger("cookbook")

LOOPBACK = "127.0.0.1"
CHUNK = 1 << 18
CONNECT_S = 10.0
# Seconds between two requests to the trainer, which would end if no client used it (job.idle_h).
CONTACT_S = 60.0


class Relay:
    """TCP relay on the loopback interface, in a thread. Connections to an old target are closed when the target changes."""

    def __init__(self, port: int = 0) -> None:
        self._target: tuple[str, int] | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        try:
            self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, LOOPBACK, port))
        except OSError as error:
            self._loop.close()
            raise ConfigError(f"jobs: cannot listen on port {port}: {error.strerror}; choose another port") from None
        self.port = int(self._server.sockets[0].getsockname()[1])
        self._thread = threading.Thread(target=self._loop.run_forever, name="cookbook-relay", daemon=True)
        self._thread.start()

    def lead_to(self, address: str | None) -> None:
        """Set the target, ``http://host:port``. None: every connection is closed now."""
        host, _, port = (address or "").removeprefix("http://").rpartition(":")
        self._loop.call_soon_threadsafe(self._set, (host, int(port)) if address else None)

    def close(self) -> None:
        """Close every connection, and end the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end)
            self._thread.join()
            self._loop.close()

    def _set(self, target: tuple[str, int] | None) -> None:
        if target != self._target:
            self._target = target
            for writer in self._open:
                writer.transport.abort()

    def _end(self) -> None:
        self._server.close()
        self._set(None)
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        # The callbacks of cancelled tasks run first.
        self._loop.call_soon(self._loop.call_soon, self._loop.stop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        self._open.add(writer)
        try:
            if self._target is None:
                return
            there, back = await asyncio.wait_for(asyncio.open_connection(*self._target), CONNECT_S)
            writers.append(back)
            self._open.add(back)
            copies = [asyncio.create_task(_copy(reader, back)), asyncio.create_task(_copy(there, writer))]
            try:
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for copy in copies:
                    copy.cancel()
        except (OSError, TimeoutError, asyncio.CancelledError):
            # The client sees a closed connection, and retries.
            pass
        finally:
            for stream in writers:
                self._open.discard(stream)
                stream.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()


class JobEndpoint:
    """A local address for a job, and the thread that keeps the job running. Use it as a context manager; the job outlives it.

    It is also the backend of clients that reconnect by themselves: ``ServiceClient(backend=endpoint)``. Their calls wait for
    the next attempt for as long as the job gets one.

    Args:
        port: of the local address; 0: any free port.
        all_logprobs: ask for logprobs also of tokens that the loss ignores.
        gpus: numbers of the GPUs of this machine with which the trainer computes.
    """

    def __init__(
        self,
        manager: TrainerJobManager,
        job_id: str,
        port: int = 0,
        *,
        all_logprobs: bool = True,
        gpus: tuple[int, ...] = (),
    ) -> None:
        self._manager = manager
        self._job_id = job_id
        self._all_logprobs = all_logprobs
        self._gpus = gpus
        self._relay = Relay(port)
        self.base_url = f"http://{LOOPBACK}:{self._relay.port}"
        self._lost: str | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="cookbook-job", daemon=True)

    def __enter__(self) -> Self:
        """Wait until the job is ready; a job without a process is resumed.

        Raises:
            CookbookError: as :meth:`TrainerJobManager.reconnect`.
        """
        try:
            self._relay.lead_to(self._manager.reconnect(self._job_id).address)
        except BaseException:
            self._relay.close()
            raise
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ending.set()
        self._thread.join()
        self._relay.close()

    def lost(self) -> str | None:
        """Return why the job will get no other trainer; None while its trainer may answer again."""
        return self._lost

    def make_trainer(self, model: ModelConfig, *, seed: int, folder: Path) -> DiskTrainer:
        """Return a run on the trainer of the job.

        Raises:
            ConfigError: the package ``tinker`` is missing, or the model's settings differ from those of the trainer.
            BackendError: the trainer does not answer.
        """
        state = self._manager.get(self._job_id).folder / STATE
        return DiskTrainer(model, self._connection(), state=state, seed=seed, folder=folder, gpus=self._gpus)

    def clients(self, folder: Path) -> RemoteClients:
        """Return the factory of a :class:`~cookbook.service.ServiceClient`.

        Raises:
            ConfigError: the package ``tinker`` is missing.
            BackendError: the trainer does not answer.
        """
        return RemoteClients(self._connection(), folder)

    def _connection(self) -> Connection:
        job = self._manager.get(self._job_id)
        return Connection(
            *(self.base_url, read_key(self._manager.key_file(job)), "the key of the job", math.inf),
            all_logprobs=self._all_logprobs,
            lost=lambda: BackendError(f"job: {self._lost}") if self._lost else None,
            checkpoint_location=pointers.ON_DISK + str(job.folder / STATE),
        )

    def wait(self) -> None:
        """Wait until the job will get no other trainer. Raises BackendError."""
        while not self._ending.wait(POLL_S):
            if self._lost is not None:
                raise BackendError(self._lost)

    def _keep(self) -> None:
        reported, contact = "", time.monotonic()
        while not self._ending.wait(POLL_S):
            try:
                job = self._manager.advance(self._job_id)
                if job.address is not None and time.monotonic() - contact > CONTACT_S:
                    is_healthy(job.address, read_key(self._manager.key_file(job)))
                    contact = time.monotonic()
            except CookbookError as error:
                # Slurm or Ray may answer again. The trainer runs meanwhile.
                if str(error) != reported:
                    log.warning("%s; trying again", error)
                reported = str(error)
                continue
            reported = ""
            self._relay.lead_to(job.address)
            self._lost = None if job.state.is_active else lost(job)
