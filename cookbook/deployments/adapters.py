"""vLLM servers of one model and of LoRA adapters on it: a sync adds an adapter, and nothing pauses."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from cookbook.checkpoints import manifest
from cookbook.deployments import control
from cookbook.deployments.http import Client
from cookbook.deployments.sampler import DeploymentSampler, Pool
from cookbook.deployments.servers import Servers
from cookbook.types import Checkpoint
from cookbook.weight_sync import Replica

log = logging.getLogger("cookbook")


class AdapterServers(Servers):
    """Every version of the adapter has a name of its own, and is there for as long as a sampler of it.

    Args:
        save_adapted: writes the weights under the adapter as a checkpoint. The servers are given those first: what they have
            read by themselves may be another version of the model, or another element type.
    """

    def __init__(self, clients: Sequence[Client], pool: Pool, seed: int, *, save_adapted: Callable[[], Checkpoint]) -> None:
        super().__init__(clients, pool, seed, live=False)
        self._save_adapted = save_adapted
        self._under = ""  # the digest of the weights under the adapters
        self._names: set[str] = set()

    def report(self) -> list[Replica]:
        """The digest is the adapter's; a worker that has it on other weights does not know what it serves."""
        return [
            Replica(
                f"{client.url} worker {rank}",
                str(one["incarnation"]),
                one["adapters"].get(self._version) if one["digest"] == self._under else None,
            )
            for client in self._clients
            for rank, one in enumerate(control.status(client))
        ]

    def load(self, folder: Path, step: int) -> None:
        with self._loading:
            self._version = ""
            self._put_under()
            control.prepare(self._clients, folder)
            version = f"step-{step}-{manifest.read(folder)['weights'][:12]}"
            self._names.add(version)
            for client in self._clients:
                control.add_adapter(client, version, folder)
            self._version, self._folder = version, folder
            self._drop_unused()

    def sampler(self, step: int) -> DeploymentSampler:
        made = DeploymentSampler(self._pool, step, self._label, self._seed, adapter=self._version, checkpoint=self._folder)
        self._samplers.add(made)
        return made

    @property
    def _label(self) -> str:
        """The version of the weights under the adapters."""
        return f"under-{self._under[:12]}"

    def _put_under(self) -> None:
        """Where a worker has other weights under its adapters than the trainer, or does not know."""
        if {one["digest"] for client in self._clients for one in control.status(client)} == {self._under}:
            return
        folder = Path(self._save_adapted().path)
        try:
            self._under = manifest.read(folder)["weights"]
            control.prepare(self._clients, folder)
            for client in self._clients:
                for name in control.adapters(client):  # of an earlier run, on other weights
                    control.drop_adapter(client, name)
                control.replace(client, self._label)
        finally:
            shutil.rmtree(folder)
        log.info("loaded the weights under the adapters, %s", self._label)

    def _drop_unused(self) -> None:
        used = {self._version, *(sampler.adapter for sampler in list(self._samplers))}
        for name in sorted(self._names - used):
            for client in self._clients:
                control.drop_adapter(client, name)
            self._names.remove(name)
