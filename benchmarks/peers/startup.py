"""From the start of a command to its first finished step, in CPU seconds of it and of all the processes it starts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")  # the kernel's unit, a second's worth


def cpu_until(command: Sequence[str], marker: str, environment: Mapping[str, str], log: Path) -> float:
    """CPU seconds until a line of ``command``'s output contains ``marker``; the command then runs to its end.

    Raises:
        SystemExit: it ended without such a line.
    """
    seconds = None
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**environment, "PYTHONUNBUFFERED": "1"}
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            if seconds is None and marker in line:
                seconds = _cpu(process.pid)
            lines.append(line)
    log.write_text("".join(lines), encoding="utf-8")
    if seconds is None:
        raise SystemExit(f"{command[0]}: ended without {marker!r}; see {log}")
    return seconds


def _cpu(pid: int) -> float:
    """Of a process, its children that have ended, and those that live, now."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except FileNotFoundError:  # it ended between two looks: its parent has its seconds
        return 0.0
    return sum(map(int, after_name[11:15])) / TICKS + sum(_cpu(int(child)) for child in children)
