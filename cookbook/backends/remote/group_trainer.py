"""A trainer on several ranks, which run as a private server on this machine. Its checkpoints are ordinary folders."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import secrets
import shutil
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cookbook import terminal
from cookbook.backends.client_factory import checkpoint_path
from cookbook.backends.group.supervisor import LOOPBACK, RankSupervisor
from cookbook.backends.remote.connection import ADAPTED_WEIGHTS, DTYPE, KIND, PREDECESSOR, Connection
from cookbook.backends.remote.linearized_loss import PendingGradient
from cookbook.backends.remote.passes import CreateRun
from cookbook.backends.remote.sampler import RemoteSampler
from cookbook.backends.remote.trainer import RemoteReference, RemoteTrainer
from cookbook.checkpoints import card, manifest, sampler_checkpoints, store
from cookbook.engine.model import ModelConfig, with_dtype
from cookbook.errors import BackendError, CheckpointError, ConfigError
from cookbook.futures import Future
from cookbook.protocols import LaggingSampler, Sampler
from cookbook.types import Checkpoint, JsonObject

if TYPE_CHECKING:
    import tinker

# Folder of the ranks' files. It is inside the folder of the checkpoints, so that hard links between both are possible.
RANKS = ".ranks"
# Address of a checkpoint that this process has linked into the folder of the server.
IMPORTED = "tinker://imported-{}:train:0/weights/state"
# The only client is this process, so there are practically no limits.
SERVER = {
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


class GroupTrainer(RemoteTrainer):
    """A :class:`~cookbook.protocols.Trainer` on several ranks of this machine.

    Its checkpoints below ``folder`` have the format of :class:`~cookbook.backends.local.LocalTrainer`, so each of the two
    trainers can resume from a checkpoint of the other.
    """

    def __init__(self, model: ModelConfig, group: PrivateGroup, *, seed: int, folder: Path, all_logprobs: bool) -> None:
        self._group = group
        self._imports = itertools.count()
        # Element type of sampler checkpoints of full weights; None: that of the model.
        self._checkpoint_dtype: str | None = None
        # Name of the last sampler checkpoint that was requested.
        self._last_sent: str | None = None
        # The last sampler checkpoint of full weights: its address on the server, which makes the next delta of it, and its
        # folder.
        self._predecessor: tuple[str, Path] | None = None
        try:
            connection = Connection(
                group.url, group.key, "the key of the ranks", math.inf, all_logprobs=all_logprobs, lost=group.lost
            )
            super().__init__(model, connection, seed=seed, folder=folder)
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
    ) -> Future[Checkpoint]:
        folder = self._new_folder(name, overwrite)
        write_sampler = self._writer_of(sampler)

        def receive(saved: tinker.types.SaveWeightsResponse) -> Checkpoint:
            self._adopt(saved.path, folder, overwrite=overwrite, facts=facts or {}, write_sampler=write_sampler)
            self.connection.delete(saved.path)
            return Checkpoint(str(folder), self.step, "state")

        return self._calls.call(lambda client: self.connection.follow(client.save_state(name, overwrite=overwrite)), receive)

    def load_state(self, checkpoint: Checkpoint | str, *, optimizer: bool = True) -> Future[None]:
        path = Path(checkpoint_path(checkpoint))
        facts = manifest.read(path)
        if optimizer and facts["kind"] != "state":
            raise CheckpointError(f"{path}: holds weights only; pass optimizer=False, or a checkpoint made by save_state")
        address = IMPORTED.format(next(self._imports))
        imported = self._on_disk(address)

        def send(_: tinker.TrainingClient) -> None:
            self._last_sent = None
            # Keep the link: a restarted server creates the run from this checkpoint again.
            _link(path, imported)
            self._calls.start_over(functools.partial(self._create_run, address, optimizer=optimizer))
            self._gradient = PendingGradient()

        def receive(_: None) -> None:
            self._keep_as_predecessor(None)
            self.step = int(facts["step"]) if optimizer else 0

        self._weights_changed = True
        return self._calls.call(send, receive, needs_client=False)

    def save_weights_for_sampler_ext(
        self, name: str, *, checkpoint_type: str = "base", merged: bool = False
    ) -> Future[Checkpoint]:
        """Save weights to sample from. A delta becomes a base if the ranks have restarted since the last checkpoint."""
        sampler_checkpoints.check_kind(checkpoint_type)
        if merged and self.model.lora_rank:
            raise ConfigError(
                "save_weights_for_sampler_ext: several ranks save the adapter only, got merged=True; save the adapter, and "
                "merge it with `cookbook weights export`"
            )
        return self._save_to_sample(name, checkpoint_type)

    # ---- checkpoints for a deployment, see CheckpointWriter ------------------------------------------------------

    @functools.cached_property
    def model_config(self) -> ModelConfig:
        """The model as the ranks have loaded it: ``dtype`` is not ``auto``."""
        return with_dtype(self.model)

    @property
    def adapted_model(self) -> str | None:
        """Name of the weights under the LoRA adapter; None if every parameter is trained."""
        return self.model.name if self.model.lora_rank else None

    def set_checkpoint_dtype(self, dtype: str) -> None:
        self._checkpoint_dtype = dtype

    def save_adapted_weights(self, name: str) -> Future[Checkpoint]:
        return self._save_to_sample(name, ADAPTED_WEIGHTS)

    def delta_predecessor(self) -> Future[str | None]:
        def receive(_: None) -> str | None:
            folder = self._predecessor and self._predecessor[1]
            return str(folder) if folder is not None and folder.is_dir() else None

        return self._calls.call(lambda _: None, receive, needs_client=False)

    def reference(self) -> RemoteReference:
        create_run: CreateRun = self._create_run
        if self._weights_changed:
            name = f"reference-{next(self._numbers)}"
            saved = self._calls.call(lambda client: self._saved(client, name), str).result()
            create_run = functools.partial(self._create_run, saved)
        return RemoteReference(self._calls, create_run, self)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._group.close()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _saved(self, client: tinker.TrainingClient, name: str) -> str:
        """Save the weights on the server, wait until they are saved, and return the address."""
        saved: str = self.connection.follow(client.save_weights_for_sampler(name)).result().path
        return saved

    def _on_disk(self, path: str) -> Path:
        """Return the folder of a checkpoint on the server."""
        run, kind, name = path.removeprefix("tinker://").split("/")
        return self._group.state / run.replace(":", ".") / f"{kind}.{name}"

    def _save_to_sample(self, name: str, kind: str) -> Future[Checkpoint]:
        """Save a base, a delta, or the weights under the adapter."""
        folder, dtype = self._new_folder(name, overwrite=False), self._checkpoint_dtype
        is_chained = kind != ADAPTED_WEIGHTS and not self.model.lora_rank

        def send(client: tinker.TrainingClient) -> Future[tinker.types.SaveWeightsForSamplerResponse]:
            metadata = {KIND: kind} | ({DTYPE: dtype} if dtype is not None else {})
            if is_chained:
                if kind == "delta" and self._last_sent is None:
                    raise CheckpointError(f"{folder}: a delta needs a checkpoint before it; write a base first")
                metadata |= {PREDECESSOR: self._last_sent} if self._last_sent is not None else {}
                self._last_sent = name
            return self.connection.follow(client.save_weights_for_sampler(name, user_metadata=metadata))

        def receive(saved: tinker.types.SaveWeightsForSamplerResponse) -> Checkpoint:
            kind = self._adopt(saved.path, folder)["kind"]
            if is_chained:
                self._keep_as_predecessor((saved.path, folder))
            else:
                self.connection.delete(saved.path)
            return Checkpoint(str(folder), self.step, kind)

        return self._calls.call(send, receive)

    def _keep_as_predecessor(self, saved: tuple[str, Path] | None) -> None:
        """Keep this checkpoint on the server for the next delta, and delete the one before."""
        if self._predecessor is not None:
            self.connection.delete(self._predecessor[0])
        self._predecessor = saved

    def _writer_of(self, sampler: object) -> Callable[[Path], object] | None:
        """Return a function that writes the weights of a sampler to a new folder; None without a sampler."""
        if isinstance(sampler, LaggingSampler):
            return sampler.saving()
        if isinstance(sampler, RemoteSampler) and sampler.path is not None:
            return functools.partial(_link, self._on_disk(sampler.path))
        if sampler is not None:
            raise CheckpointError("save_state: the sampler's weights are not saved; pass a sampler of this trainer")
        return None

    def _adopt(
        self,
        path: str,
        folder: Path,
        *,
        overwrite: bool = False,
        facts: JsonObject | None = None,
        write_sampler: Callable[[Path], object] | None = None,
    ) -> JsonObject:
        """Turn a checkpoint on the server into a checkpoint ``folder`` of the run, by hard links. See :func:`store.save`.

        Return the server's manifest.
        """
        saved = self._on_disk(path)
        server_manifest = manifest.read(saved)
        digests: Mapping[str, str] = server_manifest["files"]
        entries = {key: value for key, value in server_manifest.items() if key not in ("files", "format")}
        entries = {**(facts or {}), **entries, "base_model": self.model.name}
        if "predecessor" in entries:
            entries["predecessor"] = _name(entries["predecessor"])
        with store.appearing(folder, overwrite=overwrite) as temporary:
            _link(saved, temporary)
            has_card = (temporary / manifest.CARD).exists()
            # Remove the links before writing: through them the files of the server would be changed.
            for name in (manifest.CARD, manifest.NAME):
                (temporary / name).unlink(missing_ok=True)
            if write_sampler is not None:
                write_sampler(temporary / store.SAMPLER)
            if has_card:
                card.write(temporary, entries)
            manifest.write(temporary, entries, digests)
        return server_manifest


def _name(folder: str) -> str:
    """Return the name of a checkpoint from the name of its folder on the server, ``KIND.NAME``."""
    return folder.partition(".")[2]


def _link(source: Path, folder: Path) -> None:
    """Create hard links to the files of ``source`` in ``folder``, or copies if the file system does not support links."""

    def link(file: str, target: str) -> str:
        with contextlib.suppress(OSError):
            os.link(file, target)
            return target
        return str(shutil.copy2(file, target))

    shutil.copytree(source, folder, copy_function=link, dirs_exist_ok=True)
