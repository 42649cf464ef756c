"""The commands of the pages that need a server, a job or a hub, run as they are written, with few steps."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import servertools
from hubtools import hub, push  # noqa: F401 - hub is a fixture
from jobtools import answers, until
from pageruns import SERVED, elsewhere, words_of
from pages import FOUND
from preloaded import Forked
from runtools import ROOT, here, rows  # noqa: F401 - here is a fixture
from waiting import WAIT_S

from cookbook.cli.app import run

URL = "http://127.0.0.1:8000"
WITHOUT_KEY = "train recipe=grpo backend=remote backend.base_url=http://127.0.0.1:8000"
WITH_KEY = (
    "train recipe=grpo model=qwen3_8b data=gsm8k backend=remote backend.base_url=http://127.0.0.1:8000 backend.api_key_file=key"
)
SERVERS = ("serve model=tiny", "serve backend.ranks=2")
ATTACH = "jobs attach mine --port 8000"
JOBS = ("jobs create mine model=tiny job=local", "jobs logs mine", "jobs stop mine", "jobs delete mine")
ON_SLURM = (
    "train recipe=grpo job=slurm",
    "train recipe=grpo model=qwen3_8b data=gsm8k job=slurm job.partition=gpu job.gpus=1 job.time=12:00:00",
    "jobs create mine model=qwen3_8b job=slurm job.partition=gpu job.gpus=1",
)
LOCAL_JOB = "train recipe=grpo job=local"
VIEW = "view runs/mine --serve"
PUSH = "weights push runs/mine user/name"
# What the test's cluster calls otherwise: the shipped model, its only partition, and the longest time that this one grants.
HERE = {"model=qwen3_8b": "model=tiny", "job.partition=gpu": "job.partition=main", "job.time=12:00:00": "job.time=0:30:00"}

pytestmark = pytest.mark.slow


def test_every_such_command_is_run() -> None:
    served = {one for one in FOUND if re.search(SERVED, one) and elsewhere(one) is None}
    assert served == {WITHOUT_KEY, WITH_KEY, *SERVERS, ATTACH, *JOBS, *ON_SLURM, LOCAL_JOB, VIEW, PUSH}


def words(command: str, **other: str) -> list[str]:
    """Return the words of a command, shortened, with ``other`` in place of what the machine has not."""
    found = words_of(command)
    for name, value in {**HERE, **other}.items():
        found = [word.replace(name, value) for word in found]
    return found


@contextmanager
def started(found: list[str], shows: str, **environment: str) -> Iterator[str]:
    """Yield the first line of a command in a process of its own that has ``shows``; end the command as Ctrl-C does."""
    with Forked(*found, env={**os.environ, **environment}, errors="merged") as process:
        seen: list[str] = []
        # A command that hangs ends, and the test fails.
        late = threading.Timer(900, process.kill)
        late.start()
        try:
            for line in process.stdout:
                seen.append(line)
                if shows in line:
                    yield line
                    break
            else:
                raise AssertionError("".join(seen))
        finally:
            process.send_signal(signal.SIGINT)
            rest = process.communicate()[0]
            late.cancel()
    assert process.returncode in (0, 130) and "Traceback" not in rest


@pytest.mark.parametrize(
    "command", [pytest.param(one, marks=pytest.mark.nightly if "backend.ranks" in one else ()) for one in SERVERS]
)
def test_a_run_trains_on_a_server(command: str, place: Path) -> None:
    pytest.importorskip("tinker", reason="tinker is an extra")
    port = servertools.free_port()
    with started([*words(command), f"server.port={port}"], f"serving {ROOT}/data/tiny on http://127.0.0.1:{port}"):
        assert run(words(WITHOUT_KEY, **{URL: f"http://127.0.0.1:{port}"})) == 0
    assert [row["step"] for row in rows("runs/new")] == [0, 1]


@pytest.mark.nightly
def test_a_run_trains_with_a_key(place: Path) -> None:
    pytest.importorskip("tinker", reason="tinker is an extra")
    Path("key").write_text("tml-secret\n")
    Path("key").chmod(0o600)
    port = servertools.free_port()
    with started(["serve", "model=tiny", f"server.port={port}"], "serving ", COOKBOOK_API_KEYS="tml-secret"):
        assert run(words(WITH_KEY, **{URL: f"http://127.0.0.1:{port}"})) == 0
    assert [row["step"] for row in rows("runs/new")] == [0, 1]


@pytest.mark.nightly
def test_a_job_is_created_attached_read_stopped_and_deleted(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tinker", reason="tinker is an extra")
    create, logs, stop, delete = JOBS
    assert run(words(create)) == 0
    try:
        port = str(servertools.free_port())
        with started(words(ATTACH, **{"8000": port}), "next: cookbook train") as line:
            following = line.partition("cookbook ")[2].split()
            assert f"backend.base_url=http://127.0.0.1:{port}" in following
            assert run([*words(WITHOUT_KEY, **{URL: f"http://127.0.0.1:{port}"}), following[-1]]) == 0
        capsys.readouterr()
        assert run(words(logs)) == 0 and "serving " in capsys.readouterr().out
        assert run(words(stop)) == 0
    finally:
        assert run(words(delete)) == 0


@pytest.mark.nightly
def test_a_run_starts_a_job(place: Path) -> None:
    pytest.importorskip("tinker", reason="tinker is an extra")
    assert run(words(LOCAL_JOB)) == 0
    assert [row["step"] for row in rows("runs/new")] == [0, 1]


@pytest.mark.nightly
@pytest.mark.parametrize("command", ON_SLURM)
def test_a_job_of_slurm(command: str, slurm: None, place: Path) -> None:
    pytest.importorskip("tinker", reason="tinker is an extra")
    try:
        assert run(words(command)) == 0
        assert command.startswith("jobs") or [row["step"] for row in rows("runs/new")] == [0, 1]
    finally:
        if command.startswith("jobs"):
            assert run(["jobs", "delete", "mine"]) == 0


def test_a_run_is_shown_while_it_is_served(place: Path) -> None:
    with started([*words(VIEW), "--port", "0"], "http://127.0.0.1:") as line:
        url = re.findall(r"http://[\d.:]+", line)[0]
        assert b'"steps": [1, 2]' in urllib.request.urlopen(f"{url}/facts", timeout=WAIT_S).read()


@pytest.mark.nightly
def test_a_run_is_pushed(hub, place: Path) -> None:  # noqa: F811
    found = words(PUSH)
    assert found[:2] == ["weights", "push"]
    done = push(hub, *found[2:])
    assert done.returncode == 0, done.stderr
    assert hub.private == {"user/name": True} and "model.safetensors" in hub.files


@pytest.mark.nightly
def test_two_nodes_of_torchrun_serve_one_model(place: Path) -> None:
    """The command of docs/operate/scale.md, with a process on each of two nodes, both on this machine."""
    pytest.importorskip("tinker", reason="tinker is an extra")
    page = (ROOT / "docs/operate/scale.md").read_text(encoding="utf-8")
    [text] = re.findall(r"^\$ (export TORCH.*)\n\$ (torchrun .*\\\n.*)\n", page, re.MULTILINE)
    port = servertools.free_port()
    changes = {
        "/shared/rendezvous": str(place / "rendezvous"), "10.0.3.17": "127.0.0.1", "--nproc-per-node 8": "--nproc-per-node 1",
        "model=qwen3_8b": f"model=tiny server.port={port}", "--no-python cookbook": "--no-python python -m cookbook",
    }  # fmt: skip
    script = "\n".join(text)
    for name, value in changes.items():
        assert name in script
        script = script.replace(name, value)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    nodes = [subprocess.Popen(["bash", "-c", script], start_new_session=True, **pipes) for _ in range(2)]
    try:
        until(lambda: answers(f"http://127.0.0.1:{port}/v1/models") or any(node.poll() is not None for node in nodes))
        assert run(words(WITHOUT_KEY, **{URL: f"http://127.0.0.1:{port}"})) == 0
    finally:
        for node in nodes:
            with suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGTERM)
        # torchrun itself prints a trace when it is stopped.
        told = "".join(node.communicate(timeout=300)[0] for node in nodes)
    assert [row["step"] for row in rows("runs/new")] == [0, 1] and told.count("serving ") == 1
