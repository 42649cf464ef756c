"""Processes of rewards and environments: what a handler starts ends with its process."""

from __future__ import annotations

from pathlib import Path

import pytest
from waiting import until

from cookbook.sampling.workers import WorkerProcess, WorkerTimeoutError

FORKING = """
import os, time

def make(configuration):
    def handler(request):
        child = os.fork()
        if not child:
            time.sleep(600)
        with open(request, "w") as file:
            file.write(f"{child}\\n")
        time.sleep(600)
    return handler
"""


def test_a_handler_that_forks_leaves_no_process(tmp_path, monkeypatch):
    (tmp_path / "forking.py").write_text(FORKING)
    monkeypatch.syspath_prepend(str(tmp_path))
    worker = WorkerProcess("forking:make", b"{}", timeout_s=1.0)
    worker.start()
    with pytest.raises(WorkerTimeoutError):
        worker.call(str(tmp_path / "child"))
    child = Path("/proc") / (tmp_path / "child").read_text().strip()
    # A killed process without a parent stays as a zombie until the first process of a container reads its exit code.
    until(lambda: not child.exists() or (child / "stat").read_text().rpartition(")")[2].split()[0] == "Z")
    worker.retire()
