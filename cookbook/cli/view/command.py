"""``cookbook view``: write the page of one or two runs, or serve it on this machine while a run is in progress."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from cookbook.cli.view.page import ViewedRun, empty_page, whole_page
from cookbook.errors import ConfigError
from cookbook.run.stored_steps import ROLLOUTS
from cookbook.utils import files
from cookbook.utils.words import counted

HOST = "127.0.0.1"
PAGE = "view.html"


def run(folders: Sequence[Path], out: Path | None, serve: bool, port: int | None) -> None:
    """Write or serve the page of one or two runs.

    Raises:
        ConfigError: a folder holds no run; there are more than two; the file cannot be written; the port is in use; or an
            option does not belong to the other ones.
    """
    if serve and out is not None:
        raise ConfigError(f"view: --serve writes no file, got --out {out}; remove one of the two options")
    if port is not None and not serve:
        raise ConfigError(f"view: only a page that is served has a port, got --port {port}; add --serve or remove --port")
    if len(folders) > 2:
        raise ConfigError(f"view: expected one run or two, got {len(folders)}; for more runs use cookbook compare")
    runs = [ViewedRun(folder) for folder in folders]
    if serve:
        _serve(runs, port or 0)
    else:
        _write(runs, out or folders[0] / PAGE)


def _write(runs: Sequence[ViewedRun], path: Path) -> None:
    page, num_steps = whole_page(runs)
    for run in runs:
        with run.stored() as stored:
            if stored.unread_bytes:
                lost = (
                    f"the last {stored.unread_bytes:,} bytes are not a whole step, after a kill or damage; the page omits them"
                )
                print(f"warning: {run.folder / ROLLOUTS}: {lost}", file=sys.stderr)
    try:
        files.write_text(path, page)
    except OSError as error:
        raise ConfigError(f"view: cannot write {path}: {error.strerror}; choose another file with --out") from None
    print(f"{path}: {counted(num_steps, 'step')}, {path.stat().st_size / 1e6:.1f} MB; open it in a browser")


def _serve(runs: Sequence[ViewedRun], port: int) -> None:
    try:
        server = ThreadingHTTPServer((HOST, port), partial(PageHandler, runs))
    except OSError as error:
        raise ConfigError(f"view: cannot listen on port {port}: {error.strerror}; choose another --port") from None
    with server:
        print(
            f"http://{HOST}:{server.server_port}/ shows {' and '.join(run.folder.name for run in runs)}; Ctrl-C ends it",
            flush=True,
        )
        server.serve_forever()


class PageHandler(BaseHTTPRequestHandler):
    """Answers GET of the page, ``/facts`` and ``/run/NUMBER/step/STEP``. Reads no path that a client names."""

    def __init__(self, runs: Sequence[ViewedRun], *arguments: object) -> None:
        self._runs = runs
        super().__init__(*arguments)  # type: ignore[arg-type]

    def handle(self) -> None:
        # A browser closes connections whose answer it does not need any more.
        with contextlib.suppress(ConnectionError):
            super().handle()

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        # Another site's page can point its own name at this machine, and would then read the answers.
        if self.headers.get("Host", "").partition(":")[0] not in (HOST, "localhost"):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"unknown host\n")
        elif address.path == "/":
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", empty_page().encode())
        elif address.path == "/facts":
            self._answer(HTTPStatus.OK, "application/json", self._facts(address.query))
        elif (content := self._step(address.path)) is not None:
            self._answer(HTTPStatus.OK, "application/octet-stream", content)
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"not found\n")

    def _facts(self, query: str) -> bytes:
        known = parse_qs(query).get("metrics", [""])[0].split(",")
        known += [""] * (len(self._runs) - len(known))
        facts = []
        for run, number in zip(self._runs, known, strict=False):
            with run.stored() as stored:
                facts.append(run.facts(stored.blocks, number))
        return json.dumps(facts).encode()

    def _step(self, path: str) -> bytes | None:
        """Return the gzip bytes of ``/run/NUMBER/step/STEP``; None if the path is another one or the step is not stored."""
        match path.strip("/").split("/"):
            case ["run", number, "step", step] if number.isdecimal() and step.isdecimal() and int(number) < len(self._runs):
                with self._runs[int(number)].stored() as stored:
                    return stored.member(int(step))
        return None

    def _answer(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing per request."""
