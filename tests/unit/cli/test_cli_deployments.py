"""``cookbook deployments`` on servers that start in no time. ``tests/system/test_vllm.py`` has the command on real ones."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from cookbook.cli.app import run
from cookbook.deployments.vllm.registry import DeploymentManager

SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def answer(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")
    do_GET = do_POST = answer

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def python(tmp_path, monkeypatch):
    """Passes for a Python that has vLLM."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    Path("server.py").write_text(SERVER)
    Path("python").write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && echo True && exit\nexec {sys.executable} {tmp_path}/server.py "$@"\n'
    )
    Path("python").chmod(0o755)
    yield "deployment.python=./python"
    for name in DeploymentManager().running():
        DeploymentManager().delete(name)


def cookbook(capsys, *words: str) -> tuple[int, str, str]:
    code = run(["deployments", *words])
    return code, *capsys.readouterr()


def listed(capsys) -> list[list[str]]:
    code, out, _ = cookbook(capsys, "list")
    assert code == 0
    return [line.split() for line in out.splitlines()[1:] if line]


@pytest.mark.slow
def test_from_create_to_delete(python, capsys):
    code, out, _ = cookbook(capsys, "create", "mine", python, "deployment.replicas=2")
    assert code == 0 and out.count("answers") == 2
    first = DeploymentManager().running()["mine"]
    assert [row[:3] for row in listed(capsys)] == [["mine", "healthy", one.url] for one in first]
    assert first[0].options.dtype == "float32" and first[0].options.max_length == 4096  # the model's own
    assert cookbook(capsys, "create", "mine", python, "deployment.replicas=2")[0] == 0
    assert DeploymentManager().running()["mine"] == first  # they are used again
    assert cookbook(capsys, "scale", "mine", "3")[0] == 0
    assert DeploymentManager().running()["mine"][:2] == first and len(listed(capsys)) == 3
    assert cookbook(capsys, "scale", "mine", "1")[0] == 0
    assert DeploymentManager().running()["mine"] == first[:1]
    assert cookbook(capsys, "warm-up", "mine") == (0, f"mine: {first[0].url} answers\n", "")
    assert cookbook(capsys, "delete", "mine") == (0, "mine: ended\n", "")
    assert listed(capsys) == [] and not any(one.alive for one in first)


@pytest.mark.slow
def test_other_settings_make_other_servers(python, capsys):
    for words in ((), ("deployment.threads=2",)):
        assert cookbook(capsys, "create", "mine", python, *words)[0] == 0
    (one,) = DeploymentManager().running()["mine"]
    assert one.options.threads == 2


@pytest.mark.slow
def test_one_that_is_in_use_names_its_process(python, capsys):
    assert cookbook(capsys, "create", "mine", python)[0] == 0
    with DeploymentManager().held("mine"):
        assert listed(capsys)[0][-1] == str(os.getpid())
        for words in (("delete", "mine"), ("scale", "mine", "2"), ("create", "mine", python)):
            code, _, error = cookbook(capsys, *words)
            assert code == 2 and f"mine is used by process {os.getpid()}; wait for it" in error
    assert listed(capsys)[0][-1] == "none"


@pytest.mark.slow
def test_misuse_is_one_line(python, capsys, tmp_path):
    assert cookbook(capsys, "create", "mine", python)[0] == 0
    for words, expected in [
        (("delete", "mime"), "deployments: not running, got 'mime'; choose one of mine. Did you mean 'mine'?"),
        (("warm-up", "other"), "deployments: not running, got 'other'; choose one of mine"),
        (("scale", "mine", "0"), "should be greater than or equal to 1"),
        (("create", "a/b", python), "deployment.name: expected letters, digits, '-' and '_', got 'a/b'"),
        (("create", "new", "deployment=embedded"), "unknown key 'deployment.name'"),
        (("create", "new", python, "deployment.url=http://x"), "leave out deployment.url"),
        (("create", "new", python, "deployment.threds=2"), "Did you mean 'deployment.threads'"),
        (("create", "new", "deployment.python=./none"), "/none cannot be started"),
        (("create", "new", python, f"model.name={tmp_path}/none"), "model.name: no such folder"),
    ]:
        code, _, error = cookbook(capsys, *words)
        assert code == 2 and expected in error and len(error.splitlines()) == 1, (words, error)
    assert [row[0] for row in listed(capsys)] == ["mine"]


def test_an_option_that_create_does_not_have_is_one_line(capsys):
    assert run(["deployments", "create", "mine", "--num_gpus", "2"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown option '--num_gpus'; write backend.gpus=2")
    assert run(["deployments", "create", "mine", "--sooner"]) == 2
    assert capsys.readouterr().err == "error: No such option: --sooner\n"
