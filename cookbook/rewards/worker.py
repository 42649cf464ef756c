"""Rewards in processes of their own: slow ones do not hold up sampling, and one that hangs is stopped.

Threads would not do: a regular expression that never ends holds the interpreter's lock, and nothing in its process runs any
more, a clock that would stop it included. What goes between the processes is JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from cookbook.errors import ConfigError
from cookbook.rewards.limits import Limits
from cookbook.rewards.verdict import Fault, TraceError, judge
from cookbook.typed import TARGET, construct_target

MAIN = "import sys; sys.path[:] = {path!r}; from cookbook.rewards.worker import main; main({pipe}, {parent})"
ORPHANED_S = 1.0  # how long a worker may outlive the process that started it
ENDING_S = 1.0  # how long one that has closed its pipe may take to end


class Workers:
    """Processes that call ``reward``, as many as its limits say, started when they are first needed.

    Raises:
        ConfigError: the reward cannot be made anew in another process.
    """

    def __init__(self, reward: Limits) -> None:
        try:
            made_of = json.dumps(_configuration(reward)).encode()
        except TypeError as error:
            raise ConfigError(
                f"reward: cannot be made in a process of its own ({error}); set reward.workers=0 and reward.timeout_s=null"
            ) from None
        self._processes = [_Process(made_of, reward.timeout_s) for _ in range(reward.workers)]
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(reward.workers, thread_name_prefix="reward")

    def submit(self, completion: str, values: Mapping[str, Any]) -> Future[float | Fault]:
        return self._threads.submit(self._call, completion, values)

    def close(self) -> None:
        """Ends the processes, and with them the calls under way."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.retire()
        self._threads.shutdown()

    def _call(self, completion: str, values: Mapping[str, Any]) -> float | Fault:
        process = self._idle.get()
        try:
            return process.call(completion, values)
        finally:
            self._idle.put(process)


class _Process:
    """One process, which makes one call at a time. One that was stopped, or has ended, is started anew for the next call."""

    def __init__(self, made_of: bytes, timeout_s: float | None) -> None:
        self._made_of = made_of
        self._timeout_s = timeout_s
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._retired = False
        self._lock = threading.Lock()

    def call(self, completion: str, values: Mapping[str, Any]) -> float | Fault:
        try:
            asked = json.dumps([completion, values]).encode()
        except TypeError as error:
            return Fault(f"the row cannot be sent to a process ({error}); set reward.workers=0 and reward.timeout_s=null")
        try:
            pipe = self._pipe()
            pipe.send_bytes(asked)
            if not pipe.poll(self._timeout_s):
                self._end(0.0)
                took = f"has not returned after {self._timeout_s:g} s"
                return Fault(f"the reward {took}; mend the reward or row, or raise reward.timeout_s")
            return _read(pipe.recv_bytes())
        except (EOFError, OSError):
            return Fault(f"the reward ended its process (exit code {self._end(ENDING_S)}); mend the reward or row")

    def retire(self) -> None:
        """Stops what it is doing, and starts nothing any more."""
        with self._lock:
            self._retired = True
            if self._running is not None:
                self._running[0].kill()
                self._running[0].wait()

    def _pipe(self) -> Connection:
        """To the process, which has made its reward and waits. Raises EOFError when there is none."""
        with self._lock:
            if self._retired:
                raise EOFError
            started = self._running is None
            self._running = self._running or self._start()
            pipe = self._running[1]
        if started:
            self._wait_until_ready(pipe)
        return pipe

    def _wait_until_ready(self, pipe: Connection) -> None:
        """Importing the user's file takes its time, which is no call's."""
        try:
            pipe.recv_bytes()
        except (EOFError, OSError):
            self._retired = True  # it would be the same at every call
            raise

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, its = Pipe()
        path = [*sys.path, str(Path(__file__).parents[2])]  # the last: where this package is, if that was a relative entry
        code = MAIN.format(path=path, pipe=its.fileno(), parent=os.getpid())
        process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)
        its.close()
        ours.send_bytes(self._made_of)
        return process, ours

    def _end(self, wait_s: float) -> int | None:
        """Its exit code. Until ``wait_s`` have passed it may end by itself."""
        with self._lock:
            if self._running is None:
                return None
            (process, pipe), self._running = self._running, None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
        process.kill()
        pipe.close()
        return process.wait()


def _configuration(reward: Limits) -> dict[str, Any]:
    """What :func:`cookbook.typed.construct_target` makes an equal reward from."""
    kind = type(reward)
    values = {field.name: getattr(reward, field.name) for field in dataclasses.fields(reward) if field.init}
    return {TARGET: f"{kind.__module__}:{kind.__qualname__}", **values}


def _read(answer: bytes) -> float | Fault:
    found = json.loads(answer)
    if isinstance(found, float):
        return found
    return Fault(found["message"], None if found["trace"] is None else TraceError(found["trace"]), found["of_row"])


def main(pipe_number: int, parent: int) -> None:
    """What a worker runs: makes the reward, then calls it with one completion and row after the other."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is told to all; the run decides when its workers end
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    pipe = Connection(pipe_number)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the run has ended
        reward = construct_target(json.loads(pipe.recv_bytes()), "reward")
        pipe.send_bytes(b"ready")
        while True:
            completion, values = json.loads(pipe.recv_bytes())
            found = judge(reward, completion, values)
            pipe.send_bytes(json.dumps(_sayable(found) if isinstance(found, Fault) else found).encode())


def _sayable(fault: Fault) -> dict[str, Any]:
    return {"message": fault.message, "trace": fault.trace, "of_row": fault.of_row}


def _end_with(parent: int) -> None:
    """A reward that never returns would otherwise outlive a run that was killed."""
    while os.getppid() == parent:
        time.sleep(ORPHANED_S)
    os._exit(1)
