"""Registry of this machine's deployments: the servers that run under each name."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from cookbook.deployments.vllm import process
from cookbook.deployments.vllm.http import Client, ServerUnavailableError
from cookbook.deployments.vllm.process import Options
from cookbook.deployments.vllm.sampler import GENERATE
from cookbook.errors import ConfigError, RolloutError
from cookbook.types import JsonObject
from cookbook.utils import files, paths

log = logging.getLogger("cookbook")

RECORD, LOG = "server.json", "server.log"
WARM_UP = {"token_ids": [0, 1, 2, 3], "sampling_params": {"max_tokens": 4, "ignore_eos": True}}
NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")


@dataclass(frozen=True)
class RunningServer:
    """A server process. ``born``: its start time, which distinguishes it from a later process with the same number; ``log``:
    its log file.
    """

    pid: int
    born: str
    url: str
    options: Options
    log: str

    @property
    def alive(self) -> bool:
        return process.birth(self.pid) == self.born

    def why_gone(self) -> str | None:
        """Return why the server cannot answer; None if its process runs."""
        if self.alive:
            return None
        return f"the server's process {self.pid} has ended; its log says: {process.first_error(Path(self.log))}"


class DeploymentManager:
    """Creates, scales, warms up, lists and deletes deployments. A deployment is a folder, with a folder per replica.

    ``say`` reports progress.
    """

    def __init__(self, folder: Path | None = None, say: Callable[[str], None] = log.info) -> None:
        self.folder = folder or paths.state("deployments")
        self._say = say

    @contextlib.contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Lock the deployment: only one process at a time may load weights into it.

        Raises:
            ConfigError: another process uses the deployment, or the name is invalid.
        """
        if not name or set(name) - NAME_CHARACTERS:
            raise ConfigError(f"deployment.name: expected letters, digits, '-' and '_', got {name!r}")
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        if (owner := self.user(name)) is not None:
            raise ConfigError(f"deployment.name: {name} is used by process {owner}; wait for it, or choose another name")
        # The lock, and not the question before it, excludes other processes. The question only gives the better error.
        with files.locked(folder):
            yield

    def user(self, name: str) -> str | None:
        """Return the number of the process that uses the deployment; None if it is free."""
        try:
            with files.locked(self.folder / name):
                return None
        except ConfigError:
            return (self.folder / name / files.LOCK).read_text().strip()

    def running(self) -> dict[str, list[RunningServer]]:
        """Return the servers that run, by name."""
        names = sorted(path.name for path in self.folder.glob("*") if path.is_dir())
        servers = {name: [server for server in self._replicas(name).values() if server.alive] for name in names}
        return {name: running for name, running in servers.items() if running}

    def create(self, name: str, options: Options, count: int, limit_s: float) -> list[RunningServer]:
        """Return ``count`` healthy servers: those that run and serve these options, and new ones.

        Raises:
            ConfigError: ``options.python`` does not exist, or has no vLLM.
            RolloutError: a server does not start. The servers that this call has started are ended.
        """
        servers = {}
        for place, server in self._replicas(name).items():
            if server.alive and server.options.serve(options) and place < count:
                servers[place] = server
            else:
                self._end(name, place, server)
        if len(servers) < count:
            process.check_python(options.python)
        with contextlib.ExitStack() as undo:
            for place in set(range(count)) - servers.keys():
                servers[place] = self._start(name, place, options)
                undo.callback(self._end, name, place, servers[place])
            for server in servers.values():
                process.wait_until_healthy(self.client(server), Path(server.log), limit_s, self._say)
            undo.pop_all()
        return [servers[place] for place in range(count)]

    def scale(self, name: str, count: int, limit_s: float) -> list[RunningServer]:
        """Return ``count`` healthy servers with the options of those that run; see :meth:`create`.

        Raises:
            ConfigError: no server of that name runs.
        """
        running = self.running().get(name)
        if not running:
            raise ConfigError(f"deployments: no server of {name!r} runs, so its options are unknown; create the deployment")
        return self.create(name, running[0].options, count, limit_s)

    def client(self, server: RunningServer, timeout_s: float = 600.0, retries: int = 6) -> Client:
        """Return a client, whose requests fail immediately when the server's process has ended."""
        return Client(server.url, timeout_s, retries, server.why_gone)

    def warm_up(self, server: RunningServer) -> None:
        """Sample a few tokens, so that vLLM's setup at the first request is done, and unsupported kernels fail now.

        Raises:
            RolloutError: the server cannot sample.
        """
        try:
            self.client(server).call(GENERATE, WARM_UP)
        except ServerUnavailableError as error:
            remedy = ""
            # vLLM has no bfloat16 kernels for some CPUs.
            if server.options.dtype == "bfloat16":
                remedy = "; if it has ended at its first tokens, set deployment.dtype=float32"
            raise RolloutError(f"deployment: {error}{remedy}") from None

    def delete(self, name: str) -> None:
        """End the servers, and delete the deployment."""
        for place, server in self._replicas(name).items():
            self._end(name, place, server)
        shutil.rmtree(self.folder / name, ignore_errors=True)

    def kill(self, name: str) -> None:
        """End the servers without waiting for them, and delete the deployment."""
        for server in self._replicas(name).values():
            process.kill(server.pid, server.born)
        shutil.rmtree(self.folder / name, ignore_errors=True)

    def reap(self, prefix: str) -> None:
        """Delete unused deployments whose name has this prefix; killed runs leave them."""
        for name in self.running():
            if name.startswith(prefix):
                with contextlib.suppress(ConfigError), self.held(name):
                    self._say(f"deployment: ending {name}, whose run is gone")
                    self.delete(name)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _replicas(self, name: str) -> dict[int, RunningServer]:
        """Servers in the registry, in order, including those that have ended."""
        servers = {}
        for path in (self.folder / name).glob(f"*/{RECORD}"):
            try:
                servers[int(path.parent.name)] = _running(json.loads(path.read_text()))
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise RolloutError(f"{path}: cannot be read ({error}); end its server by hand and remove the file") from None
        return dict(sorted(servers.items()))

    def _start(self, name: str, place: int, options: Options) -> RunningServer:
        folder = self.folder / name / str(place)
        folder.mkdir(parents=True, exist_ok=True)
        port = process.free_port()
        output = folder / LOG
        pid = process.start(options, port, folder, output, place)
        running = RunningServer(pid, process.birth(pid) or "", f"http://127.0.0.1:{port}", options, str(output))
        files.write_text(folder / RECORD, json.dumps(asdict(running)) + "\n")
        numbers = ", ".join(map(str, options.gpus_of(place)))
        where = f" on GPU {numbers}" if numbers else ""
        self._say(f"deployment: starting vLLM at {running.url}{where} (process {pid}, log {output})")
        return running

    def _end(self, name: str, place: int, server: RunningServer) -> None:
        process.stop(server.pid, server.born)
        shutil.rmtree(self.folder / name / str(place), ignore_errors=True)


def _running(record: JsonObject) -> RunningServer:
    """Inverse of ``asdict``. Raises KeyError or TypeError: the record is invalid."""
    options = record["options"]
    lists = {"args": tuple(options["args"]), "gpus": tuple(map(tuple, options["gpus"]))}
    return RunningServer(**{**record, "options": Options(**{**options, **lists})})
