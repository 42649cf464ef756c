"""Programs of agents: processes that end with their rollout, and with the run, also if the run is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO

# Kills the process groups whose numbers it has read, once all writers of its pipe have ended.
KEEPER = """
import os, signal, sys
running = set()
for line in sys.stdin.buffer:
    number = int(line)
    running.add(number) if number > 0 else running.discard(-number)
for number in running:
    try:
        os.killpg(number, signal.SIGKILL)
    except OSError:
        pass
"""
# The process reports its number before it becomes the program, so that no kill of the run can come between.
STARTED = 'echo "$$" >&0; exec "$@" </dev/null'
TAIL_BYTES = 1 << 16


class Keeper:
    """A process that outlives the run by a moment, and kills the programs that the run has left."""

    def __init__(self) -> None:
        read, self.write = os.pipe()
        # Ctrl-C in the terminal does not reach another session.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", KEEPER], stdin=read, stdout=subprocess.DEVNULL, start_new_session=True
        )
        os.close(read)

    def forget(self, number: int) -> None:
        """Forget a program that has ended, because its number may be used again."""
        os.write(self.write, b"%d\n" % -number)

    def close(self) -> None:
        os.close(self.write)
        self._process.wait()


class Program:
    """A running program and what it prints. Raises OSError: it cannot be started."""

    def __init__(self, words: Sequence[str], variables: Mapping[str, str], keeper: Keeper) -> None:
        self._keeper = keeper
        # Files, because a pipe that is not read would stop the program.
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - close() closes it
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - close() closes it
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", STARTED, "sh", *words],
            env={**os.environ, **variables},
            stdin=keeper.write,
            stdout=self._printed,
            stderr=self._errors,
            start_new_session=True,
        )
        self._exit_code: int | None = None

    def exit_code(self) -> int | None:
        """Return the exit code; None while the program runs. What it has started ends with it."""
        if self._exit_code is None and (code := self._process.poll()) is not None:
            self._exit_code = code
            self._kill_group()
            self._keeper.forget(self._process.pid)
        return self._exit_code

    def kill(self) -> None:
        """End the program, if it runs, with all that it has started."""
        if self._exit_code is None:
            self._kill_group()
            self._process.wait()
            self.exit_code()

    def last_line(self) -> str:
        """Return the last line of the output that is not empty."""
        return _last_line(self._printed)

    def last_error(self) -> str:
        return _last_line(self._errors)

    def close(self) -> None:
        self.kill()
        self._printed.close()
        self._errors.close()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _last_line(file: IO[bytes]) -> str:
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - TAIL_BYTES))
    lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""
