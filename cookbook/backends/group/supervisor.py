"""Supervisor of a group of ranks: it starts the ranks as child processes, restarts all of them if one is lost, and ends them.

Each rank has a channel, which is the rank's standard input. The first line on the channel is the configuration of the rank. The
rank reports on the channel that it is ready, that it makes progress, errors that the user can fix, and why it has lost the
other ranks. If the supervisor ends, however it ends, the channel is closed and the rank ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from cookbook.errors import BackendError
from cookbook.types import JsonObject
from cookbook.utils.paths import PACKAGE

log = logging.getLogger("cookbook")

LOOPBACK = "127.0.0.1"
MAIN = "import sys; sys.path[:] = {path!r}; from cookbook.server.rank import main; main()"
# Starts in a row that end before the group has finished a request. The supervisor then gives up.
MAX_FAILURES = 5
# Limit on the starts of a group within an hour.
MAX_STARTS, WITHIN_S = 100, 3600.0
# Seconds before the first restart, doubled with each failure, and their limit.
BACK_OFF_S, MAX_BACK_OFF_S = 0.5, 30.0
POLL_S = 0.2
# Seconds in which the other ranks must end after one rank has ended without an error.
END_S = 30.0
READY, PROGRESS, ERROR, LOST, TIME = "ready", "progress", "error", "lost", "time"


class RankChannel:
    """The rank's end of its channel to the supervisor."""

    def __init__(self) -> None:
        """Take the channel from the standard input, which is then empty."""
        self._socket = socket.socket(fileno=os.dup(0))
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.close(empty)
        self._lock = threading.Lock()
        self._has_progress = False
        with self._socket.makefile("r", encoding="utf-8") as lines:
            self.config: JsonObject = json.loads(lines.readline())

    def end_with_supervisor(self) -> None:
        """Wait until the supervisor has ended, and end this process."""
        with contextlib.suppress(OSError):
            while self._socket.recv(1 << 10):
                pass
        os._exit(1)

    def listener(self) -> socket.socket:
        """Return the socket on which the first rank serves; the supervisor keeps it open."""
        return socket.socket(fileno=os.dup(self.config["listener"]))

    def ready(self) -> None:
        """Report that the server answers."""
        self._send({READY: True})

    def progress(self) -> None:
        """Report that a request has been finished. Only the first report is sent."""
        if not self._has_progress:
            self._has_progress = True
            self._send({PROGRESS: True})

    def error(self, message: str) -> None:
        """Report an error that the user can fix; the group is not started again."""
        self._send({ERROR: message})

    def lost(self, message: str) -> None:
        """Report why this rank ends although no user can fix the cause. The ranks are started again."""
        self._send({LOST: message, TIME: time.monotonic()})

    def _send(self, report: JsonObject) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(report).encode() + b"\n")


@dataclass
class _Rank:
    """A rank seen from the supervisor."""

    number: int
    process: subprocess.Popen[bytes]
    channel: socket.socket
    received: bytes = b""
    is_closed: bool = False
    # The rank's own report why it ends, and the time of the report: the first of a group is the cause of the others.
    cause: str = ""
    cause_time: float = float("inf")

    def reports(self) -> list[JsonObject]:
        """Return the reports that have arrived. Does not block."""
        while not self.is_closed:
            try:
                data = self.channel.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.is_closed = not data
            self.received += data
        *lines, self.received = self.received.split(b"\n")
        return [json.loads(line) for line in lines]

    def ending(self) -> str:
        """Return how the process has ended, for messages."""
        code = self.process.returncode
        if code >= 0:
            return self.cause or f"rank {self.number} has ended with exit code {code}"
        hint = ", as if memory had run out" if -code == signal.SIGKILL else ""
        return f"rank {self.number} was killed by {signal.Signals(-code).name}{hint}"


@dataclass
class RankSupervisor:
    """Runs a group of ranks on this machine until it ends or is ended.

    Args:
        config: of every rank, see :func:`cookbook.server.rank.main`.
        listener: the socket on which the first rank serves. It stays open while the ranks are started again, so that clients
            wait. :meth:`run` closes it at the end.
        log_file: for the output of the ranks; None: that of this process.
    """

    size: int
    config: JsonObject
    listener: socket.socket
    log_file: Path | None = None
    is_ready: threading.Event = field(default_factory=threading.Event)
    _ranks: list[_Rank] = field(default_factory=list)
    _ending: threading.Event = field(default_factory=threading.Event)
    # The first rank has received a signal to end.
    _is_asked: bool = False
    _has_progress: bool = False
    # Why the ranks that have just been lost were lost.
    _lost: str = ""

    def run(self) -> None:
        """Start the ranks, and restart them whenever one is lost. Return when the first rank has ended by itself.

        Raises:
            BackendError: a rank reports an error of the user, or the ranks are lost repeatedly.
        """
        starts: list[float] = []
        failures = 0
        try:
            while not self._ending.is_set():
                starts = [*(start for start in starts if time.monotonic() - start < WITHIN_S), time.monotonic()]
                self._has_progress = False
                try:
                    self._start()
                    if self._watch():
                        return
                finally:
                    self._kill()
                failures = 1 if self._has_progress else failures + 1
                if failures >= MAX_FAILURES or len(starts) >= MAX_STARTS:
                    raise BackendError(self._given_up(failures))
                log.warning("%s; starting the %d ranks again", self._lost, self.size)
                self._ending.wait(min(BACK_OFF_S * 2 ** (failures - 1), MAX_BACK_OFF_S))
        finally:
            self.listener.close()

    def signal(self, number: int) -> None:
        """Send a signal to the first rank, which ends the others when it ends. The ranks are not started again."""
        self._is_asked = True
        if self._ranks and self._ranks[0].process.poll() is None:
            self._ranks[0].process.send_signal(number)
        else:
            self._ending.set()

    def end(self) -> None:
        """Let :meth:`run` kill the ranks and return."""
        self._ending.set()

    @property
    def pids(self) -> list[int]:
        """Processes of the ranks, in their order."""
        return [rank.process.pid for rank in self._ranks]

    # ---- inside --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        environment = {**os.environ, **_group_variables(self.size)}
        # The last entry is the folder of this package, in case that sys.path names the folder by a relative path.
        code = MAIN.format(path=[*sys.path, str(PACKAGE.parent)])
        with contextlib.ExitStack() as stack:
            output: IO[bytes] | None = None
            if self.log_file is not None:
                output = stack.enter_context(self.log_file.open("ab"))
            for number in range(self.size):
                channel, theirs = socket.socketpair()
                stack.enter_context(theirs)
                process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    env={**environment, "RANK": str(number), "LOCAL_RANK": str(number)},
                    stdin=theirs.fileno(),
                    stdout=output,
                    stderr=output,
                    pass_fds=[self.listener.fileno()] if number == 0 else [],
                    # Ctrl-C reaches all processes of the terminal; the supervisor decides when the ranks end.
                    start_new_session=True,
                )
                self._ranks = [*self._ranks, _Rank(number, process, channel)]
                config = {**self.config, "listener": self.listener.fileno()}
                with contextlib.suppress(OSError):
                    channel.sendall(json.dumps(config).encode() + b"\n")

    def _watch(self) -> bool:
        """Wait until the ranks have ended. Return False if one was lost.

        Raises:
            BackendError: a rank reports an error of the user.
        """
        ends_at: float | None = None
        while not self._ending.is_set():
            channels = [rank.channel for rank in self._ranks if not rank.is_closed]
            select.select(channels, [], [], POLL_S)
            # In this order: a report is sent before its process ends.
            ended = [rank for rank in self._ranks if rank.process.poll() is not None]
            for rank in self._ranks:
                self._receive(rank)
            if lost := [rank for rank in ended if rank.process.returncode != 0]:
                # A rank that ends because of another rank has an exit code; the first cause is rather a signal.
                self._lost = min(lost, key=lambda rank: (rank.process.returncode, rank.cause_time)).ending()
                return self._is_asked
            if ended:
                # The first rank ends the others, which may end before its own process does.
                ends_at = ends_at or time.monotonic() + END_S
                if len(ended) == self.size or time.monotonic() > ends_at:
                    return True
            if not channels:
                time.sleep(POLL_S)
        return True

    def _receive(self, rank: _Rank) -> None:
        for report in rank.reports():
            if ERROR in report:
                raise BackendError(report[ERROR])
            if LOST in report:
                rank.cause, rank.cause_time = report[LOST], report[TIME]
            self._has_progress |= PROGRESS in report
            if READY in report:
                self.is_ready.set()

    def _kill(self) -> None:
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.wait()
            rank.channel.close()

    def _given_up(self, failures: int) -> str:
        where = f"; see {self.log_file}" if self.log_file is not None else ""
        times = (
            f"{failures} times without finishing a request" if failures >= MAX_FAILURES else f"{MAX_STARTS} times in an hour"
        )
        return f"backend.ranks: the group of {self.size} ranks has failed {times}, the last time because {self._lost}{where}"


def _group_variables(size: int) -> dict[str, str]:
    """Return the variables of torchrun that the ranks share. Every start has a port of its own."""
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    # Gloo would otherwise use the interface of the machine's name, which other machines may reach.
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    variables = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
    return variables | ({"GLOO_SOCKET_IFNAME": loopback[0]} if loopback else {})
