"""vLLM servers as the replicas of a weight sync: of full weights, or of LoRA adapters.

A sync replaces full weights. It adds an adapter, and the servers do not pause.
"""

from __future__ import annotations

import functools
import logging
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from cookbook.checkpoints import manifest, sampler_checkpoints
from cookbook.deployments.vllm import api
from cookbook.deployments.vllm.http import Client
from cookbook.deployments.vllm.sampler import DeploymentSampler, Pool
from cookbook.deployments.vllm.weight_store import StoreStatus
from cookbook.deployments.weight_sync import SyncTarget, must_serve
from cookbook.types import Checkpoint

log = logging.getLogger("cookbook")


class Servers:
    """vLLM servers of full weights. All servers serve the same version, one version at a time.

    If ``live``, a sampler is valid until the next load. Otherwise a request to an older sampler reloads the weights from the
    sampler's checkpoint, which stays on disk while the sampler exists.
    """

    def __init__(self, clients: Sequence[Client], pool: Pool, seed: int, *, live: bool) -> None:
        self._clients = list(clients)
        self._pool = pool
        self._seed = seed
        self._live = live
        # Version that all servers are known to serve; empty: unknown.
        self._served_version = ""
        # Version that was loaded last, and its checkpoint.
        self._version = ""
        self._folder = Path()
        self._loading = threading.Lock()
        self._samplers: weakref.WeakSet[DeploymentSampler] = weakref.WeakSet()

    def report(self) -> list[SyncTarget]:
        """Return a report per worker of every server."""
        return [
            SyncTarget(f"{client.url} worker {rank}", worker_status["incarnation"], self._digest(worker_status))
            for client in self._clients
            for rank, worker_status in enumerate(api.status(client))
        ]

    def load(self, folder: Path, step: int) -> None:
        """Load a checkpoint. The servers read it while they serve. Then each finishes its requests, pauses, and loads it."""
        with self._loading:
            self._version, self._folder = f"step-{step}-{manifest.read(folder)['weights'][:12]}", folder
            self._load_weights(folder, self._version)

    def sampler(self, step: int) -> DeploymentSampler:
        """Return a sampler. The caller has verified that the servers serve the weights that were loaded last."""
        self._served_version = self._version
        again = None if self._live else functools.partial(self._reload, self._version, self._folder, step)
        made = DeploymentSampler(self._pool, step, self._version, self._seed, checkpoint=self._folder, before=again)
        self._samplers.add(made)
        return made

    def in_use(self) -> set[Path]:
        """Return the checkpoints of existing samplers; none if ``live``, when older weights are not loaded again."""
        if self._live:
            return set()
        return {sampler.checkpoint for sampler in list(self._samplers) if sampler.checkpoint is not None}

    def close(self) -> None:
        self._pool.close()

    def _digest(self, status: StoreStatus) -> str | None:
        """Return the digest of the weights that a worker serves; None if it is unknown."""
        return status["digest"]

    def _load_weights(self, folder: Path, version: str) -> None:
        self._served_version = ""
        api.prepare(self._clients, folder)
        paused_s = max([api.replace(client, version) for client in self._clients])
        log.info("loaded %s; the longest pause was %.3f s", version, paused_s)

    def _reload(self, version: str, folder: Path, step: int) -> None:
        """Reload the weights of an older sampler. The next sync then sends a base, because the replicas' reports differ."""
        with self._loading:
            if self._served_version == version:
                return
            with tempfile.TemporaryDirectory(prefix=".again.", suffix=".tmp", dir=folder.parent) as temporary:
                whole = Path(sampler_checkpoints.export(folder, Path(temporary) / folder.name).path)
                self._load_weights(whole, version)
            must_serve(self.report(), manifest.read(folder)["weights"], step)
            self._served_version = version


class AdapterServers(Servers):
    """Replicas that serve several versions of an adapter, each under its own name while a sampler of it exists.

    Args:
        save_adapted: writes the weights under the adapter as a checkpoint. The servers load these weights first: the weights
            that they have started with may be another version of the model, or of another element type.
    """

    def __init__(self, clients: Sequence[Client], pool: Pool, seed: int, *, save_adapted: Callable[[], Checkpoint]) -> None:
        super().__init__(clients, pool, seed, live=False)
        self._save_adapted = save_adapted
        # Digest of the base weights, to which the adapters apply.
        self._base_digest = ""
        self._names: set[str] = set()

    def load(self, folder: Path, step: int) -> None:
        with self._loading:
            self._version = ""
            self._load_base()
            api.prepare(self._clients, folder)
            version = f"step-{step}-{manifest.read(folder)['weights'][:12]}"
            self._names.add(version)
            for client in self._clients:
                api.add_adapter(client, version, folder)
            self._version, self._folder = version, folder
            self._drop_unused()

    def sampler(self, step: int) -> DeploymentSampler:
        made = DeploymentSampler(
            self._pool, step, self._base_version, self._seed, adapter=self._version, checkpoint=self._folder
        )
        self._samplers.add(made)
        return made

    def _digest(self, status: StoreStatus) -> str | None:
        """Return the digest of the newest adapter; None if a worker has other base weights."""
        return status["adapters"].get(self._version) if status["digest"] == self._base_digest else None

    @property
    def _base_version(self) -> str:
        """Version of the base weights, below the adapters."""
        return f"under-{self._base_digest[:12]}"

    def _load_base(self) -> None:
        """Load the trainer's base weights, unless all workers serve them already."""
        if {worker["digest"] for client in self._clients for worker in api.status(client)} == {self._base_digest}:
            return
        folder = Path(self._save_adapted().path)
        try:
            self._base_digest = manifest.read(folder)["weights"]
            api.prepare(self._clients, folder)
            for client in self._clients:
                # Drop the adapters of an earlier run, which belong to other base weights.
                for name in api.adapters(client):
                    api.drop_adapter(client, name)
                api.replace(client, self._base_version)
        finally:
            shutil.rmtree(folder)
        log.info("loaded the base weights, %s", self._base_version)

    def _drop_unused(self) -> None:
        used = {self._version, *(sampler.adapter for sampler in list(self._samplers))}
        for name in sorted(self._names - used):
            for client in self._clients:
                api.drop_adapter(client, name)
            self._names.remove(name)
