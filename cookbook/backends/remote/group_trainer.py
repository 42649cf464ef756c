"""A trainer on several ranks, which run as a private server on this machine. Its checkpoints are ordinary folders."""

from __future__ import annotations

import functools
import math
import secrets
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cookbook import terminal
from cookbook.backends.group.supervisor import LOOPBACK, RankSupervisor
from cookbook.backends.remote.connection import Connection
from cookbook.backends.remote.disk_trainer import DiskTrainer, link
from cookbook.backends.remote.sampler import RemoteSampler
from cookbook.checkpoints import store
from cookbook.engine.model import ModelConfig
from cookbook.errors import BackendError
from cookbook.futures import Future
from cookbook.protocols import Sampler
from cookbook.types import Checkpoint, JsonObject

if TYPE_CHECKING:
    import tinker

# Folder of the ranks' files. It is inside the folder of the checkpoints, so that hard links between both are possible.
RANKS = ".ranks"
# The only client is this process, so there are practically no limits.
SERVER = {
    "one_client": True,
    "durability": "written",
    "checkpoint_s": 300.0,
    "max_request_mb": 1 << 20,
    "max_pending_mb": 1 << 20,
    "upload_timeout_s": 1e9,
    "max_results_mb": 4096,
    "max_request_tokens": 1 << 50,
    "max_session_tokens": 1 << 50,
    "max_request_gb": 1e9,
    # The supervisor counts the starts that end without a result.
    "max_attempts": 100,
    "session_timeout_s": 1e9,
    "gap_timeout_s": 1e9,
}
POLL_S = 0.2


class PrivateGroup:
    """Ranks that serve one trainer of this process.

    Args:
        config: configuration of the ranks, without the server's address, folder and key, which this class adds.
        folder: folder of the checkpoints. The ranks write their log and their server's state to a folder inside it.

    Raises:
        BackendError: the ranks do not become ready.
    """

    def __init__(self, size: int, config: JsonObject, folder: Path) -> None:
        self._folder = folder / RANKS
        shutil.rmtree(self._folder, ignore_errors=True)
        self.state = self._folder / "state"
        self.state.mkdir(parents=True)
        # The package `tinker` accepts keys with this prefix only.
        self.key = f"tml-{secrets.token_urlsafe(32)}"
        # For a socket with an explicit protocol asyncio sets TCP_NODELAY.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind((LOOPBACK, 0))
        listener.listen(2048)
        self.url = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
        server = {**SERVER, **config["server"], "host": LOOPBACK}
        own = {"server": server, "out": str(self.state), "key": self.key}
        self._supervisor = RankSupervisor(size, {**config, **own}, listener, self._folder / "log.txt")
        self._error: BackendError | None = None
        self._thread = threading.Thread(target=self._run, name="cookbook-ranks", daemon=True)
        self._thread.start()
        with terminal.doing(f"starting {size} ranks"):
            try:
                while not self._supervisor.is_ready.wait(POLL_S):
                    if not self._thread.is_alive():
                        raise self._error or BackendError("backend.ranks: the ranks have ended")
            except BaseException:
                self.close()
                raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, in the order of the ranks."""
        return self._supervisor.pids

    def lost(self) -> BackendError | None:
        """Return the error because of which the ranks have ended for the last time; None while they run or restart."""
        return self._error

    def close(self) -> None:
        """End the ranks, and delete their files. If the ranks have failed, keep their log."""
        self._supervisor.end()
        self._thread.join()
        shutil.rmtree(self._folder if self._error is None else self.state, ignore_errors=True)

    def _run(self) -> None:
        try:
            self._supervisor.run()
        except BackendError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - raised again on the caller's thread
            self._error = BackendError(f"backend.ranks: {type(error).__name__}: {error}")


class GroupTrainer(DiskTrainer):
    """A :class:`~cookbook.protocols.Trainer` on several ranks of this machine.

    Its checkpoints below ``folder`` have the format of :class:`~cookbook.backends.local.LocalTrainer`, so each of the two
    trainers can resume from a checkpoint of the other.
    """

    def __init__(
        self,
        model: ModelConfig,
        group: PrivateGroup,
        *,
        seed: int,
        folder: Path,
        all_logprobs: bool,
        gpus: tuple[int, ...] = (),
    ) -> None:
        self._group = group
        try:
            connection = Connection(
                group.url, group.key, "the key of the ranks", math.inf, all_logprobs=all_logprobs, lost=group.lost
            )
            super().__init__(model, connection, state=group.state, seed=seed, folder=folder, gpus=gpus)
        except BaseException:
            group.close()
            raise

    def save_state(
        self,
        name: str,
        *,
        overwrite: bool = False,
        facts: JsonObject | None = None,
        sampler: Sampler | None = None,
        asynchronous: bool = False,
        optimizer: bool = True,
    ) -> Future[Checkpoint]:
        folder = self._new_folder(name, overwrite)
        write_sampler = self._writer_of(sampler)
        kind = "state" if optimizer else store.WEIGHTS_ONLY

        def receive(saved: tinker.types.SaveWeightsResponse | tinker.types.SaveWeightsForSamplerResponse) -> Checkpoint:
            self._adopt(saved.path, folder, overwrite=overwrite, facts=facts or {}, write_sampler=write_sampler, kind=kind)
            self.connection.delete(saved.path)
            return Checkpoint(str(folder), self.step, kind)

        return self._calls.call(self._saving(name, overwrite=overwrite, optimizer=optimizer), receive)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._group.close()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _writer_of(self, sampler: object) -> Callable[[Path], object] | None:
        if isinstance(sampler, RemoteSampler) and sampler.path is not None:
            return functools.partial(link, self._on_disk(sampler.path))
        return super()._writer_of(sampler)
