"""Launcher ``local``: the trainer is a process of this machine that outlives the command which started it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import ClassVar

import psutil

from cookbook.errors import BackendError
from cookbook.jobs.launcher import END_S, AttemptFiles, AttemptStatus, JobLauncher, JobPhase

ADOPT_S, POLL_S = 2.0, 0.05
# Seconds until a killed process is gone: the kernel ends it when it is next scheduled.
KILLED_S = 60.0


@dataclass(kw_only=True)
class LocalJob(JobLauncher):
    """Processes of this machine. A handle holds the number of a process group, and the start time of its first process."""

    host: ClassVar[str] = "127.0.0.1"

    def start(self, files: AttemptFiles) -> str:
        if files.log.exists():
            # An interrupted call has started the script, whose first line writes the number of its process.
            end = time.monotonic() + ADOPT_S
            while time.monotonic() < end and not files.pid.exists():
                time.sleep(POLL_S)
        if files.pid.exists():
            return _handle(int(files.pid.read_text()))
        with files.log.open("ab") as log:
            process = subprocess.Popen(
                ["bash", str(files.script)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        return _handle(process.pid)

    def status(self, handle: str) -> AttemptStatus:
        return AttemptStatus(JobPhase.running, "running") if _members(handle) else AttemptStatus(JobPhase.ended, "ended")

    def stop(self, handle: str) -> None:
        for number, limit_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, KILLED_S)):
            end = time.monotonic() + limit_s
            if members := _members(handle):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(handle.partition(":")[0]), number)
            while members and time.monotonic() < end:
                time.sleep(POLL_S)
                members = _members(handle)
            if not members:
                return
        raise BackendError(f"jobs: processes {members} do not end; end them by hand")

    def logs(self, files: AttemptFiles, handle: str) -> str:
        return files.log_text()

    def address(self, handle: str) -> str:
        return self.host


def _handle(pid: int) -> str:
    try:
        return f"{pid}:{psutil.Process(pid).create_time()}"
    except psutil.NoSuchProcess:
        return f"{pid}:0"


def _members(handle: str) -> list[int]:
    """Return the processes of the group. Ended processes do not count, also if their parent has not waited for them."""
    first, born = handle.split(":")
    group = int(first)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(group, os.WNOHANG)
    with contextlib.suppress(psutil.NoSuchProcess):
        # The number belongs to another process now, which is possible only after the whole group has ended.
        if psutil.Process(group).create_time() != float(born):
            return []
    return [pid for pid in psutil.pids() if _is_member(pid, group)]


def _is_member(pid: int, group: int) -> bool:
    try:
        return os.getpgid(pid) == group and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
        return False
