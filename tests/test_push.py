"""``cookbook weights push``, against an HTTP stand-in of the hub's API that huggingface_hub's own client talks to."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from runtools import ROOT, SMALL, checkpoint, here, train  # noqa: F401 - here is a fixture

from cookbook.cli.app import run


class Hub(ThreadingHTTPServer):
    """Repositories in memory. ``files`` of a repository: what its commits hold; large files travel by LFS."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.private: dict[str, bool] = {}
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.messages: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_GET(self) -> None:
        name = self.path.removeprefix("/api/models/").partition("?")[0]
        found = self.server.private.get(name)
        self.answer(*((200, {"id": name, "private": found}) if found is not None else (404, {"error": "not found"})))

    def do_PUT(self) -> None:
        self.server.objects[self.path.rpartition("/")[2]] = self.body()
        self.answer(200, {})

    def do_POST(self) -> None:
        hub, body = self.server, self.body()
        if self.headers.get("Authorization") != "Bearer right":
            self.answer(401, {"error": "Invalid username or password."})
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            exists = name in hub.private
            hub.private.setdefault(name, asked.get("private") or asked.get("visibility") == "private")
            self.answer(409 if exists else 200, {"url": f"{hub.url}/{name}"})
        elif "/preupload/" in self.path:
            names = [one["path"] for one in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            files = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]
            self.answer(200, {"files": files})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            links = [
                {**one, "actions": {"upload": {"href": f"{hub.url}/put/{one['oid']}"}}}
                for one in objects
            ]  # fmt: skip
            self.answer(200, {"transfer": "basic", "objects": links})
        elif self.path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        else:
            assert "/commit/" in self.path
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.objects[value["oid"]]
                else:
                    hub.messages.append(value["summary"])
            self.answer(200, {"commitUrl": f"{hub.url}/me/mine/commit/1", "commitOid": "0" * 40, "hookOutput": ""})


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def push(hub: Hub, *words: str, token: str = "right") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: huggingface_hub reads its variables when it is imported."""
    own = {"HF_ENDPOINT": hub.url, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "cookbook", "weights", "push", *words]
    return subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_run_is_pushed_with_its_card(here, hub):  # noqa: F811
    assert train(*SMALL["sft"], "checkpoint.every=2", "out=mine") == 0
    done = push(hub, "mine", "me/mine", "--private")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{checkpoint('mine')} is at {hub.url}/me/mine"
    assert hub.private == {"me/mine": True} and hub.messages == ["Weights after 3 steps"]
    weights = (checkpoint("mine") / "model.safetensors").read_bytes()
    assert hashlib.sha256(hub.files["model.safetensors"]).digest() == hashlib.sha256(weights).digest()
    assert b"recipe" in hub.files["README.md"] and hub.files["README.md"].startswith(b"---\n")
    assert {"config.json", "tokenizer.json"} <= hub.files.keys()
    # The optimizer stays at home.
    assert not [name for name in hub.files if name.startswith("trainer")]
    hub.private["me/open"] = False
    refused = push(hub, "mine", "me/open", "--private")
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1
    assert refused.stderr.startswith("error: weights push: me/open exists and is public; make it private")
    wrong = push(hub, "mine", "me/other", token="wrong")
    assert wrong.returncode == 2 and wrong.stderr.endswith("log in with `hf auth login`, or set HF_TOKEN\n")


@pytest.mark.slow
def test_a_dry_run_needs_no_hub_and_an_adapter_a_base_that_others_have(here, capsys):  # noqa: F811
    assert train(*SMALL["sft"], "model.lora_rank=2", "model.random=false", "out=mine") == 0
    capsys.readouterr()
    assert run(["weights", "push", "mine", "me/mine", "--dry-run"]) == 2
    assert "which is not on the hub, so the adapter would be useless there; add --merged" in capsys.readouterr().err
    assert run(["weights", "push", "mine", "me/mine", "--merged", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines if "MB" in line] >= ["README.md"] and "model.safetensors" in "".join(lines)
    assert (
        lines[-1]
        == f"dry run: {checkpoint('mine')} would be uploaded to me/mine (public, unless the repository exists and is private)"
    )
    # HF_HUB_OFFLINE is set in tests.
    assert run(["weights", "push", "mine", "me/mine", "--merged"]) == 2
    assert capsys.readouterr().err == "error: weights push: HF_HUB_OFFLINE is set; unset it\n"


def test_what_is_not_supported_is_an_error(capsys):
    assert run(["weights", "push", "mine", "mine"]) == 2
    assert capsys.readouterr().err == "error: weights push: expected the name of a repository, user/name, got 'mine'\n"
    assert run(["weights", "export", "a", "b", "--precision=float16"]) == 2
    assert "--precision belongs to --gguf" in capsys.readouterr().err
