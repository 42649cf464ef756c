"""A trainer on a server whose folder this process can read: it also writes checkpoints for a deployment in other processes."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cookbook.backends.client_factory import checkpoint_path
from cookbook.backends.remote import pointers
from cookbook.backends.remote.connection import ADAPTED_WEIGHTS, DTYPE, KIND, PREDECESSOR, Connection
from cookbook.backends.remote.linearized_loss import PendingGradient
from cookbook.backends.remote.passes import CreateRun
from cookbook.backends.remote.trainer import RemoteReference, RemoteTrainer
from cookbook.checkpoints import card, manifest, sampler_checkpoints, store
from cookbook.engine.model import ModelConfig, with_dtype
from cookbook.errors import CheckpointError, ConfigError
from cookbook.futures import Future
from cookbook.protocols import LaggingSampler
from cookbook.types import Checkpoint, JsonObject

if TYPE_CHECKING:
    import tinker

# Address of a checkpoint that this process has linked into the folder of the server.
IMPORTED = "tinker://imported-{}:train:0/weights/state"
# Checkpoints that weight syncs have written, in the folder of the server.
SYNCED_PATTERN = "*.train.*/sampler_weights.sync-*"


class DiskTrainer(RemoteTrainer):
    """A :class:`RemoteTrainer` that is also a :class:`~cookbook.protocols.CheckpointWriter`.

    Checkpoints to resume from stay on the server, as those of :class:`RemoteTrainer`. Sampler checkpoints are ordinary folders
    below ``folder``: the server writes the files to its own folder, and this process links or copies the files.

    Args:
        state: folder of the server, on a disk that this process reads and writes. The server trains for this process only.
        gpus: numbers of the GPUs of this machine with which the server computes.
    """

    def __init__(
        self, model: ModelConfig, connection: Connection, *, state: Path, seed: int, folder: Path, gpus: tuple[int, ...] = ()
    ) -> None:
        self._gpus = gpus
        self._state = state
        # Checkpoints that this process has linked into the folder of the server.
        self._imported: list[Path] = []
        # Element type of sampler checkpoints of full weights; None: that of the model.
        self._checkpoint_dtype: str | None = None
        # Name of the last sampler checkpoint that was requested.
        self._last_sent: str | None = None
        # The last sampler checkpoint of full weights: its address on the server, which makes the next delta of it, and its
        # folder.
        self._predecessor: tuple[str, Path] | None = None
        super().__init__(model, connection, seed=seed, folder=folder)
        # A process of this run that was killed has left them.
        for stale in sorted(state.glob(SYNCED_PATTERN)):
            connection.delete(f"tinker://{stale.parent.name.replace('.', ':')}/{stale.name.replace('.', '/', 1)}")

    def load_state(self, checkpoint: Checkpoint | str, *, optimizer: bool = True) -> Future[None]:
        """Load a checkpoint: a folder on this machine, or a pointer or address of a checkpoint on the server."""
        path = checkpoint_path(checkpoint)
        self._forget_predecessor()
        if path.startswith("tinker://") or pointers.SERVER in manifest.read(Path(path)):
            return super().load_state(path, optimizer=optimizer)
        return self._import(Path(path), optimizer=optimizer)

    def save_weights_for_sampler_ext(
        self, name: str, *, checkpoint_type: str = "base", merged: bool = False
    ) -> Future[Checkpoint]:
        """Save weights to sample from. A delta becomes a base if the server has restarted since the last checkpoint."""
        sampler_checkpoints.check_kind(checkpoint_type)
        if merged and self.model.lora_rank:
            raise ConfigError(
                "save_weights_for_sampler_ext: a server saves the adapter only, got merged=True; save the adapter, and merge "
                "the adapter with `cookbook weights export`"
            )
        return self._save_to_sample(name, checkpoint_type)

    # ---- checkpoints for a deployment, see CheckpointWriter ------------------------------------------------------

    @property
    def gpus(self) -> tuple[int, ...]:
        """Numbers of the GPUs of this machine with which the server computes."""
        return self._gpus

    @functools.cached_property
    def model_config(self) -> ModelConfig:
        """The model as the server has loaded it: ``dtype`` is not ``auto``."""
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
        if self._predecessor is not None and not self._failures.errors:
            self._forget_predecessor()
        try:
            super().close()
        finally:
            for folder in self._imported:
                shutil.rmtree(folder.parent, ignore_errors=True)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _saved(self, client: tinker.TrainingClient, name: str) -> str:
        """Save the weights on the server, wait until they are saved, and return the address."""
        saved: str = self.connection.follow(client.save_weights_for_sampler(name)).result().path
        return saved

    def _on_disk(self, path: str) -> Path:
        """Return the folder of a checkpoint on the server."""
        return pointers.folder_of(self._state, path)

    def _import(self, path: Path, *, optimizer: bool) -> Future[None]:
        """Load a checkpoint on this machine's disk, which is linked into the folder of the server."""
        facts = manifest.read(path)
        if optimizer and facts["kind"] != "state":
            raise CheckpointError(f"{path}: holds weights only; pass optimizer=False, or a checkpoint made by save_state")
        address = IMPORTED.format(secrets.token_hex(4))
        imported = self._on_disk(address)

        def send(_: tinker.TrainingClient) -> None:
            # Keep the link: a restarted server creates the run from this checkpoint again.
            self._imported.append(imported)
            link(path, imported)
            self._calls.start_over(functools.partial(self._create_run, address, optimizer=optimizer))
            self._gradient = PendingGradient()

        def receive(_: None) -> None:
            self.step = int(facts["step"]) if optimizer else 0

        self._weights_changed = True
        return self._calls.call(send, receive, needs_client=False)

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

    def _forget_predecessor(self) -> None:
        """Write a base next, because the weights will be replaced."""

        def send(_: tinker.TrainingClient) -> None:
            self._last_sent = None

        self._calls.call(send, lambda _: self._keep_as_predecessor(None), needs_client=False)

    def _keep_as_predecessor(self, saved: tuple[str, Path] | None) -> None:
        """Keep this checkpoint on the server for the next delta, and delete the one before."""
        if self._predecessor is not None:
            self.connection.delete(self._predecessor[0])
        self._predecessor = saved

    def _writer_of(self, sampler: object) -> Callable[[Path], object] | None:
        return sampler.saving() if isinstance(sampler, LaggingSampler) else super()._writer_of(sampler)

    def _adopt(
        self,
        path: str,
        folder: Path,
        *,
        overwrite: bool = False,
        facts: JsonObject | None = None,
        write_sampler: Callable[[Path], object] | None = None,
        kind: str | None = None,
    ) -> JsonObject:
        """Turn a checkpoint on the server into a checkpoint ``folder`` of the run, by hard links. See :func:`store.save`.

        Return the server's manifest. ``kind``: kind of the checkpoint; None: as on the server.

        Raises:
            CheckpointError: this process cannot read the folder of the server.
        """
        saved = self._on_disk(path)
        if not saved.is_dir():
            raise CheckpointError(
                f"{saved}: the trainer has written this checkpoint, and this machine cannot read the folder; set job.folder to "
                "a folder on a disk that the driver and the trainer share"
            )
        server_manifest = manifest.read(saved)
        digests: Mapping[str, str] = server_manifest["files"]
        entries = {key: value for key, value in server_manifest.items() if key not in ("files", "format")}
        entries = {**(facts or {}), **entries, "base_model": self.model.name, "kind": kind or entries["kind"]}
        if "predecessor" in entries:
            # On the server the name of the folder is KIND.NAME.
            entries["predecessor"] = entries["predecessor"].partition(".")[2]
        with store.appearing(folder, overwrite=overwrite) as temporary:
            link(saved, temporary)
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


def link(source: Path, folder: Path) -> None:
    """Create hard links to the files of ``source`` in ``folder``, or copies if the file system does not support links."""

    def link_file(file: str, target: str) -> str:
        with contextlib.suppress(OSError):
            os.link(file, target)
            return target
        return str(shutil.copy2(file, target))

    shutil.copytree(source, folder, copy_function=link_file, dirs_exist_ok=True)
