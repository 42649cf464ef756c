"""The ranks of ``backend.ranks`` as forks of the preloaded process: seven seconds of CPU time less for each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import IO

import pytest
from preloaded import Forked

from cookbook.backends.group import supervisor

# The ranks that have been started in this test, in their order.
STARTED: list[Forked] = []


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let supervisors in this process fork their ranks."""
    STARTED.clear()
    monkeypatch.setattr(supervisor, "subprocess", SimpleNamespace(Popen=_start))


def _start(
    command: list[str],
    *,
    env: dict[str, str],
    stdin: int,
    stdout: IO[bytes] | None,
    stderr: IO[bytes] | None,
    pass_fds: list[int],
    start_new_session: bool,
) -> Forked:
    """Stand for ``subprocess.Popen`` of a rank."""
    assert stdout is stderr and start_new_session
    output = 2 if stdout is None else stdout.fileno()
    STARTED.append(Forked(code=command[2], env=env, stdin=stdin, output=output, errors="merged", pass_fds=pass_fds))
    return STARTED[-1]
