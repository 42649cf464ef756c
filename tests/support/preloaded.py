"""Python programs in processes that one preloaded process forks: a start then takes no second of CPU time, and not seven.

A program is the text of a script, as in ``python -c``. It starts in its own session, with its own working folder, environment
and standard streams, and ends as any program does. :class:`Forked` is used as :class:`subprocess.Popen`.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Literal, NoReturn, Self

from places import ROOT

COMMAND = "from cookbook.cli.app import main; main()"
PRELOADED = (
    "cookbook.backends.local.trainer",
    "cookbook.cli.hydra.bridge",
    "cookbook.run.builder",
    "cookbook.server.rank",
    "cookbook.server.serve",
    "datasets",
    "fastapi.routing",
    "peft",
    "torch.distributed.checkpoint.hf_storage",
    "torch.distributed.fsdp",
    "transformers.models.qwen3.modeling_qwen3",
)
# The process id, then the exit code.
NUMBER = struct.Struct("i")
ASIDE = 500
# One request is under way at a time.
STARTING = threading.Lock()


class Forked:
    """A process that runs ``code`` with ``arguments``.

    Args:
        stdin, output: descriptors; None: no input, and a pipe whose end is ``stdout``.
        errors: are read from a pipe, or go where the output goes ("merged"), or where this process's errors go ("inherited").
        pass_fds: descriptors that have the same number in the new process.
    """

    def __init__(
        self,
        *arguments: str,
        code: str = COMMAND,
        cwd: Path | str = ".",
        env: dict[str, str] | None = None,
        stdin: int | None = None,
        output: int | None = None,
        errors: Literal["pipe", "merged", "inherited"] = "pipe",
        pass_fds: Sequence[int] = (),
    ) -> None:
        with contextlib.ExitStack() as ends:

            def pipe() -> tuple[int, int]:
                """Return a pipe. Its writing end is closed here when the new process has started."""
                reader, writer = os.pipe()
                ends.callback(os.close, writer)
                return reader, writer

            if stdin is None:
                stdin = os.open(os.devnull, os.O_RDONLY)
                ends.callback(os.close, stdin)
            read_output, their_output = pipe() if output is None else (None, output)
            read_errors, their_errors = pipe() if errors == "pipe" else (None, their_output if errors == "merged" else 2)
            self._status, their_status = pipe()
            request = {
                "code": code,
                "arguments": arguments,
                "cwd": str(Path(cwd).absolute()),
                "environment": dict(os.environ if env is None else env),
                "numbers": [0, 1, 2, *pass_fds],
            }
            descriptors = [their_status, stdin, their_output, their_errors, *pass_fds]
            with STARTING:
                socket.send_fds(_parent(), [json.dumps(request).encode()], descriptors)
                self.pid = self._number()
        self.stdout: Any = None if read_output is None else os.fdopen(read_output)
        self.stderr: Any = None if read_errors is None else os.fdopen(read_errors)
        self.returncode: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self.wait()

    def _close(self) -> None:
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()

    def _number(self) -> int:
        found = os.read(self._status, NUMBER.size)
        assert found, "the preloaded process has ended"
        return int(NUMBER.unpack(found)[0])

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(COMMAND, timeout or 0.0)
            self.returncode = self._number()
            os.close(self._status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read both streams to their end, wait for the end of the process, and return what was read."""
        found = {}
        streams = {name: stream for name, stream in (("output", self.stdout), ("errors", self.stderr)) if stream is not None}

        def read(name: str, stream: IO[str]) -> None:
            found[name] = stream.read()

        threads = [threading.Thread(target=read, args=pair, daemon=True) for pair in streams.items()]
        ends_at = None if timeout is None else time.monotonic() + timeout
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(None if ends_at is None else max(ends_at - time.monotonic(), 0.0))
            if thread.is_alive():
                raise subprocess.TimeoutExpired(COMMAND, timeout or 0.0)
        self._close()
        self.wait(None if ends_at is None else max(ends_at - time.monotonic(), 0.0))
        return found.get("output", ""), found.get("errors", "")


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as ``subprocess.run`` does with captured text."""
    with Forked(*arguments, **options) as process:
        output, errors = process.communicate()
    assert process.returncode is not None
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


@functools.cache
def _parent() -> socket.socket:
    """Start the preloaded process of this test process. It ends with its socket."""
    ours, theirs = socket.socketpair()
    with theirs:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        parent = subprocess.Popen([sys.executable, __file__], stdin=theirs, cwd=ROOT, env=environment, start_new_session=True)

    def end() -> None:
        # Forks of this process may hold the socket too.
        ours.shutdown(socket.SHUT_RDWR)
        parent.wait()

    atexit.register(end)
    return ours


# ---- in the preloaded process ----------------------------------------------------------------------------------------


def main() -> None:
    requests = socket.socket(fileno=os.dup(0))
    for name in PRELOADED:
        __import__(name)
    assert threading.active_count() == 1, "a thread would not be there after the fork"
    # A full collection over the imported modules takes a third of a second.
    gc.collect()
    gc.freeze()
    while True:
        request, descriptors = b"", []
        while not request.endswith(b"}"):
            data, received, _, _ = socket.recv_fds(requests, 1 << 20, 16)
            if not data:
                return
            request, descriptors = request + data, [*descriptors, *received]
        while _ended_keeper():
            pass
        if not os.fork():
            requests.close()
            _keep(json.loads(request), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _ended_keeper() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _keep(request: dict[str, Any], status: int, *descriptors: int) -> NoReturn:
    """Fork the program, and report its process id and exit code."""
    child = os.fork()
    if not child:
        os.close(status)
        _become(request, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    os.write(status, NUMBER.pack(child))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    # The test may have ended.
    with contextlib.suppress(BrokenPipeError):
        os.write(status, NUMBER.pack(code))
    os._exit(0)


def _become(request: dict[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Run the program in this process, as ``python -c`` does."""
    os.setsid()
    # A shell starts its background jobs without Ctrl-C, and their children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # First to numbers that none of them is going to have.
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, ASIDE) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(aside, request["numbers"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    # In place of the folder of this file: what `python -c` and PYTHONPATH add.
    sys.path[:] = ["", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *sys.path[1:]]
    sys.argv = ["cookbook", *request["arguments"]]
    # Worker processes import the main module of their parent, if it has a file.
    sys.modules["__main__"] = program = types.ModuleType("__main__")
    exec(compile(request["code"], "<program>", "exec"), program.__dict__)
    sys.exit()


if __name__ == "__main__":
    main()
