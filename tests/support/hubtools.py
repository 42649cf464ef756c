"""A model hub in this process."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from runtools import ROOT


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
