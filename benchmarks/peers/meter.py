"""The clock and the scales of both sides: CPU seconds and resident memory of this process, at every finished step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def cpu_seconds() -> float:
    """Spent since the process began by all of its threads, and by its children that have ended."""
    return sum(os.times()[:4])


def memory_mb(key: str) -> float:
    """``VmRSS`` now or ``VmHWM``, its peak since the start or since :func:`forget_peak`; MB."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"/proc/self/status: has no {key}; this benchmark needs Linux")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


class Meter:
    """Made after imports and before a model is loaded; written to ``path`` after the last step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        forget_peak()
        self.start_mb = memory_mb("VmRSS")
        self.cpu: list[float] = []  # at the end of every step
        self.rows: list[dict[str, float]] = []  # what every step reports of itself

    def step(self, **found: float) -> None:
        self.cpu.append(cpu_seconds())
        self.rows.append(found)

    def write(self) -> None:
        """Seconds a step are those after the first, which warms up."""
        result: dict[str, Any] = {
            "seconds_a_step": (self.cpu[-1] - self.cpu[0]) / (len(self.cpu) - 1),
            "peak_mb": memory_mb("VmHWM") - self.start_mb,
            "steps": self.rows,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
