"""Worker processes for the user's code: one call at a time, JSON in and out, with a time limit.

Threads would not suffice: a regular expression that never ends holds the interpreter lock, so that no timer of the same process
could stop it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any

from cookbook.config.typed import TARGET
from cookbook.errors import ConfigError
from cookbook.types import JsonObject
from cookbook.utils.paths import PACKAGE

MAIN = "import sys; sys.path[:] = {path!r}; from cookbook.sampling.workers import main; main({handler!r}, {pipe}, {parent})"
# Seconds that a worker may outlive the process that started it.
ORPHANED_S = 1.0
# Seconds that a worker may take to exit after it has closed its pipe.
EXIT_S = 1.0

Handler = Callable[[Any], object]
"""Function of a worker that answers one request. Both are JSON-compatible."""


class WorkerTimeoutError(Exception):
    """A call has not returned within its limit; its process is stopped."""


class WorkerEndedError(Exception):
    """The process has ended during a call, with ``exit_code``."""

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


class WorkerStartError(WorkerEndedError):
    """The process cannot be started, and no later call tries again."""


class GradeError(Exception):
    """A reward function of environments has failed; the text says how. The run ends, as with any reward."""


class TraceError(Exception):
    """Stand-in for an exception of a worker process. Its text is that exception's traceback."""


def trace_of(error: BaseException | None) -> str | None:
    """Return the traceback as text, which a worker can send."""
    return None if error is None else "".join(traceback.format_exception(error))


class WorkerProcess:
    """One process, which makes one call at a time. After it was stopped or has exited, the next call starts it again.

    ``starts`` counts the starts: what the process knew before the last one is gone.

    Args:
        handler: ``module:function``; in the worker, the function gets the configuration and returns the :data:`Handler`.
        configuration: JSON.
    """

    def __init__(self, handler: str, configuration: bytes, timeout_s: float | None) -> None:
        self._handler = handler
        self._configuration = configuration
        self._timeout_s = timeout_s
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._retired = False
        # The process has ended before it was ready, with this exit code.
        self._failed_start: list[int | None] = []
        self._lock = threading.Lock()
        self.starts = 0

    def call(self, request: object) -> Any:
        """Return the worker's answer.

        Raises:
            TypeError: the request is not JSON-compatible.
            WorkerTimeoutError: the call has exceeded the limit.
            WorkerEndedError: the process has ended.
            WorkerStartError: it cannot be started.
        """
        content = json.dumps(request).encode()
        try:
            pipe = self._pipe()
            pipe.send_bytes(content)
            if not pipe.poll(self._timeout_s):
                self._stop(0.0)
                raise WorkerTimeoutError
            return json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            raise self._ended() from None

    def start(self) -> None:
        """Start the process if it does not run, and wait until it is ready.

        Raises:
            WorkerStartError: it cannot be started.
        """
        try:
            self._pipe()
        except (EOFError, OSError):
            raise self._ended() from None

    def retire(self) -> None:
        """Stop the process, and never start it again."""
        with self._lock:
            self._retired = True
            if self._running is not None:
                _kill(self._running[0])
                self._running[0].wait()

    def _pipe(self) -> Connection:
        """Return the pipe to the process, which has its handler. Raises EOFError: the process cannot be started."""
        with self._lock:
            if self._retired:
                raise EOFError
            if self._running is not None and self._running[0].poll() is not None:
                # It has ended between two calls.
                self._running[1].close()
                self._running = None
            started = self._running is None
            self._running = self._running or self._start()
            pipe = self._running[1]
        if started:
            self.starts += 1
            try:
                # The worker first imports the user's file. This time is not part of any call.
                pipe.recv_bytes()
            except (EOFError, OSError):
                # Every later start would fail in the same way.
                self._retired = True
                self._failed_start = [self._stop(EXIT_S)]
                raise
        return pipe

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        pipe, worker_end = Pipe()
        # The last entry is the folder of this package, in case that sys.path names the folder by a relative path.
        path = [*sys.path, str(PACKAGE.parent)]
        code = MAIN.format(path=path, handler=self._handler, pipe=worker_end.fileno(), parent=os.getpid())
        # Processes that the handler starts stay in the group of the worker, and end with it.
        process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[worker_end.fileno()], stdin=subprocess.DEVNULL, process_group=0
        )
        worker_end.close()
        pipe.send_bytes(self._configuration)
        return process, pipe

    def _ended(self) -> WorkerEndedError:
        return WorkerStartError(self._failed_start[0]) if self._failed_start else WorkerEndedError(self._stop(EXIT_S))

    def _stop(self, wait_s: float) -> int | None:
        """Kill the process if it does not exit within ``wait_s``. Return its exit code."""
        with self._lock:
            if self._running is None:
                return None
            (process, pipe), self._running = self._running, None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
        _kill(process)
        pipe.close()
        return process.wait()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker and the processes that its handler has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def configuration(instance: object, key: str) -> bytes:
    """Return the JSON from which :func:`cookbook.config.typed.construct_target` constructs an equal instance of a dataclass.

    ``key`` is its configuration key.

    Raises:
        ConfigError: a field is not JSON-compatible.
    """
    kind = type(instance)
    values = {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance) if field.init}  # type: ignore[arg-type]
    target: JsonObject = {TARGET: f"{kind.__module__}:{kind.__qualname__}"}
    try:
        return json.dumps({**target, **values}).encode()
    except TypeError as error:
        raise ConfigError(
            f"{key}: cannot be constructed in a worker process ({error}); set {key}.workers=0 and {key}.timeout_s=null"
        ) from None


def main(handler: str, pipe_number: int, parent: int) -> None:
    """Construct the handler, then call it with each request that arrives, until the pipe is closed."""
    # Ctrl-C reaches all processes of the terminal; the run decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    pipe = Connection(pipe_number)
    module, _, name = handler.partition(":")
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        answer: Handler = getattr(importlib.import_module(module), name)(json.loads(pipe.recv_bytes()))
        pipe.send_bytes(b"ready")
        while True:
            pipe.send_bytes(json.dumps(answer(json.loads(pipe.recv_bytes()))).encode())


def _exit_with(parent: int) -> None:
    """Exit when the parent process has ended: a call that hangs would otherwise outlive a run that was killed."""
    while os.getppid() == parent:
        time.sleep(ORPHANED_S)
    os._exit(1)
