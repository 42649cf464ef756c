"""A headless Chromium of this machine, controlled through its pipe for debuggers; needs no package."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OPTIONS = ["--headless=new", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--no-sandbox", "--remote-debugging-pipe"]


def program() -> str | None:
    """The browser's path; None if this machine has none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """A tab. Its messages to the console that are errors, and the addresses that it asked for, are kept."""

    def __init__(self, commands: Any, answers: Any, width: int, height: int) -> None:
        self._commands, self._answers, self._numbers = commands, answers, itertools.count(1)
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while (answer := self._next()).get("id") != number:
            self._note(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser has ended"
            text += byte
        message: dict[str, Any] = json.loads(text)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        about = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(about["exceptionDetails"]))
        if event.get("method") == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.errors.append(about["entry"]["text"])
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])

    def open(self, address: str) -> None:
        """Load a page of ``cookbook view`` and wait until it is drawn."""
        # A page of which only the fragment differs is not loaded again.
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)
        self.wait("document.documentElement.dataset.openedMs")

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, which may be a promise."""
        done = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true, for a minute at most."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            # A page that is being loaded has no document yet, or loses it during the call.
            with contextlib.suppress(AssertionError):
                if self.run(expression):
                    return
            time.sleep(0.02)
        raise AssertionError(f"not true after a minute: {expression}; errors of the page: {self.errors}")

    def change(self, name: str, value: str, event: str = "input") -> None:
        """Set the element with this id to a value, as a user does, and wait until the page is drawn with it."""
        before = self.run("document.documentElement.dataset.complete")
        self.run(f"(() => {{ const one = document.getElementById({name!r}); one.value = {json.dumps(value)};"
                 f" one.dispatchEvent(new Event({event!r})); }})()")  # fmt: skip
        self.wait(f"document.documentElement.dataset.complete !== {json.dumps(before)}")

    def click(self, selector: str, index: int = 0) -> None:
        """Click an element and wait until the page is drawn."""
        before = self.run("document.documentElement.dataset.complete")
        self.run(f"document.querySelectorAll({json.dumps(selector)})[{index}].click()")
        self.wait(f"document.documentElement.dataset.complete !== {json.dumps(before)}")

    def texts(self, selector: str) -> list[str]:
        """Return the texts of all elements of a selector."""
        found: list[str] = self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(one => one.textContent)")
        return found

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextlib.contextmanager
def page(width: int = 1400, height: int = 1000) -> Iterator[Page]:
    """Yield a tab of a browser that ends with the block."""
    path = program()
    assert path is not None
    (commands_in, commands_out), (answers_in, answers_out) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The browser reads commands from 3 and writes answers to 4, so the pipes themselves have higher numbers.
        ends = [fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in (commands_in, answers_out)]
        words = ["bash", "-c", f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}', "bash", path, *OPTIONS, f"--user-data-dir={profile}"]
        quiet = subprocess.DEVNULL
        browser = subprocess.Popen(words, pass_fds=ends, stdout=quiet, stderr=quiet)
        for one in (commands_in, answers_out, *ends):
            os.close(one)
        with os.fdopen(commands_out, "wb") as commands, os.fdopen(answers_in, "rb") as answers:
            try:
                one = Page(commands, answers, width, height)
                yield one
                one._session = None
                one.call("Browser.close")
                browser.wait(20)
            finally:
                browser.kill()
                browser.wait()
