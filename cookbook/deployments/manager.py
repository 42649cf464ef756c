"""Deployments of this machine: what runs under which name, from one process to the next."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cookbook import atomic, lock
from cookbook.deployments import server
from cookbook.deployments.http import Client, ServerUnavailableError
from cookbook.deployments.sampler import GENERATE
from cookbook.deployments.server import Options
from cookbook.errors import ConfigError, RolloutError

log = logging.getLogger("cookbook")

RECORD, LOG = "server.json", "server.log"
WARM_UP = {"token_ids": [0, 1, 2, 3], "sampling_params": {"max_tokens": 4, "ignore_eos": True}}
NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")


def state_folder() -> Path:
    """Where deployments are written down: of one user, on one machine."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "cookbook" / "deployments"


@dataclass(frozen=True)
class Running:
    """A server process. ``born`` tells it from a later one of the same number; ``options`` is what it was started with.

    ``log`` is the file that it writes to.
    """

    pid: int
    born: str
    url: str
    options: Options
    log: str

    @property
    def alive(self) -> bool:
        return server.birth(self.pid) == self.born

    def why_gone(self) -> str | None:
        """Why it answers no more; None while it might."""
        if self.alive:
            return None
        return f"the server's process {self.pid} has ended; it said: {server.first_error(Path(self.log))}"


class DeploymentManager:
    """Creates, scales, warms up, lists and deletes deployments: one folder a name, one folder in it a replica.

    ``say`` is told how it goes.
    """

    def __init__(self, folder: Path | None = None, say: Callable[[str], None] = log.info) -> None:
        self.folder = folder or state_folder()
        self._say = say

    @contextlib.contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Nobody else can use the deployment meanwhile: who loads weights must be alone.

        Raises:
            ConfigError: somebody does, or the name is none.
        """
        if not name or set(name) - NAME_CHARACTERS:
            raise ConfigError(f"deployment.name: expected letters, digits, '-' and '_', got {name!r}")
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(lock.held(folder))
            except ConfigError:
                owner = self.user(name)
                raise ConfigError(
                    f"deployment.name: {name} is used by process {owner}; wait for it, or choose another name"
                ) from None
            yield

    def user(self, name: str) -> str | None:
        """The number of the process that holds it; None while nobody does."""
        try:
            with lock.held(self.folder / name):
                return None
        except ConfigError:
            return (self.folder / name / lock.NAME).read_text().strip()

    def running(self) -> dict[str, list[Running]]:
        """The servers that run, by name."""
        names = sorted(path.name for path in self.folder.glob("*") if path.is_dir())
        found = {name: [one for one in self._replicas(name).values() if one.alive] for name in names}
        return {name: running for name, running in found.items() if running}

    def create(self, name: str, options: Options, count: int, limit_s: float) -> list[Running]:
        """``count`` servers that are healthy: those that run already where they were made alike, else new ones.

        Raises:
            ConfigError: there is no such Python, or it has no vLLM.
            RolloutError: one does not come up. Those that this call has started are gone then.
        """
        kept = {}
        for place, one in self._replicas(name).items():
            if one.alive and one.options == options and place < count:
                kept[place] = one
            else:
                self._end(name, place, one)
        started = [place for place in range(count) if place not in kept]
        if started:
            server.check_python(options.python)
        try:
            for place in started:
                kept[place] = self._start(name, place, options)
            for one in kept.values():
                server.wait_until_healthy(self.client(one), Path(one.log), limit_s, self._say)
        except BaseException:
            for place in started:
                if place in kept:
                    self._end(name, place, kept[place])
            raise
        return [kept[place] for place in range(count)]

    def scale(self, name: str, count: int, limit_s: float) -> list[Running]:
        """As :meth:`create`, with the options of those that run.

        Raises:
            ConfigError: nothing of that name runs.
        """
        running = self.running().get(name)
        if not running:
            raise ConfigError(f"deployments: nothing called {name!r} runs, so nothing says what to start; create it")
        return self.create(name, running[0].options, count, limit_s)

    def client(self, one: Running, timeout_s: float = 600.0, retries: int = 6) -> Client:
        """Requests to it end at once when its process has."""
        return Client(one.url, timeout_s, retries, one.why_gone)

    def warm_up(self, one: Running) -> None:
        """A few tokens: what is set up at the first request is then, and what this machine cannot compute shows itself.

        Raises:
            RolloutError: it cannot.
        """
        try:
            self.client(one).call(GENERATE, WARM_UP)
        except ServerUnavailableError as error:
            remedy = ""
            if one.options.dtype == "bfloat16":  # there are CPUs that vLLM has other kernels for than this type's
                remedy = "; where it has ended at its first tokens, set deployment.dtype=float32"
            raise RolloutError(f"deployment: {error}{remedy}") from None

    def delete(self, name: str) -> None:
        """Ends its servers, and forgets the name."""
        for place, one in self._replicas(name).items():
            self._end(name, place, one)
        shutil.rmtree(self.folder / name, ignore_errors=True)

    def reap(self, prefix: str) -> None:
        """Deletes the deployments whose name begins so and whom nobody uses: their runs were killed."""
        for name in self.running():
            if name.startswith(prefix):
                with contextlib.suppress(ConfigError), self.held(name):
                    self._say(f"deployment: ending {name}, whose run is gone")
                    self.delete(name)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _replicas(self, name: str) -> dict[int, Running]:
        """Those that are written down, dead ones too, in order."""
        found = {}
        for path in (self.folder / name).glob(f"*/{RECORD}"):
            try:
                found[int(path.parent.name)] = _running(json.loads(path.read_text()))
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise RolloutError(f"{path}: cannot be read ({error}); end its server by hand and remove the file") from None
        return dict(sorted(found.items()))

    def _start(self, name: str, place: int, options: Options) -> Running:
        folder = self.folder / name / str(place)
        folder.mkdir(parents=True, exist_ok=True)
        port = server.free_port()
        output = folder / LOG
        pid = server.start(options, port, folder, output)
        running = Running(pid, server.birth(pid) or "", f"http://127.0.0.1:{port}", options, str(output))
        atomic.write_text(folder / RECORD, json.dumps(asdict(running)) + "\n")
        self._say(f"deployment: starting vLLM at {running.url} (process {pid}, log {output})")
        return running

    def _end(self, name: str, place: int, one: Running) -> None:
        server.stop(one.pid, one.born)
        shutil.rmtree(self.folder / name / str(place), ignore_errors=True)


def _running(record: Mapping[str, Any]) -> Running:
    """The inverse of ``asdict``. Raises KeyError, TypeError."""
    options = record["options"]
    return Running(**{**record, "options": Options(**{**options, "args": tuple(options["args"])})})
