"""The vLLM servers behind a deployment, as the replicas that weight sync fills."""

from __future__ import annotations

import functools
import logging
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

from cookbook.checkpoints import chain, manifest
from cookbook.deployments import control
from cookbook.deployments.http import Client
from cookbook.deployments.sampler import DeploymentSampler, Pool
from cookbook.weight_sync import Replica, must_serve

log = logging.getLogger("cookbook")


class Servers:
    """Servers of full weights: of one version at a time, all of them of the same.

    With ``live`` a sampler is good until the next load. Otherwise its weights are put back when it is asked again after that,
    from its checkpoint, which stays on the disk for as long as there is the sampler.
    """

    def __init__(self, clients: Sequence[Client], pool: Pool, seed: int, *, live: bool) -> None:
        self._clients = list(clients)
        self._pool = pool
        self._seed = seed
        self._live = live
        self._served = ""  # the version that all of them are known to serve
        self._version = ""  # that was loaded last, and its checkpoint
        self._folder = Path()
        self._loading = threading.Lock()
        self._samplers: weakref.WeakSet[DeploymentSampler] = weakref.WeakSet()

    def report(self) -> list[Replica]:
        """One line a worker of every server."""
        return [
            Replica(f"{client.url} worker {rank}", str(one["incarnation"]), one["digest"])
            for client in self._clients
            for rank, one in enumerate(control.status(client))
        ]

    def load(self, folder: Path, step: int) -> None:
        """All read it while they serve. Then each is paused, when what it is sampling has come to its end, and gets it."""
        with self._loading:
            self._version, self._folder = f"step-{step}-{manifest.read(folder)['weights'][:12]}", folder
            self._put(folder, self._version)

    def sampler(self, step: int) -> DeploymentSampler:
        """Who asks for it has made sure that they serve what was loaded."""
        self._served = self._version
        again = None if self._live else functools.partial(self._put_back, self._version, self._folder, step)
        made = DeploymentSampler(self._pool, step, self._version, self._seed, checkpoint=self._folder, before=again)
        self._samplers.add(made)
        return made

    def in_use(self) -> set[Path]:
        """The checkpoints of the samplers that there still are; none where those would be of no use."""
        if self._live:
            return set()
        return {sampler.checkpoint for sampler in list(self._samplers) if sampler.checkpoint is not None}

    def close(self) -> None:
        self._pool.close()

    def _put(self, folder: Path, version: str) -> None:
        self._served = ""
        control.prepare(self._clients, folder)
        paused_s = max([control.replace(client, version) for client in self._clients])
        log.info("loaded %s; the longest pause was %.3f s", version, paused_s)

    def _put_back(self, version: str, folder: Path, step: int) -> None:
        """What the replicas report then is not what the last sync left, so that the next sync sends a base."""
        with self._loading:
            if self._served == version:
                return
            with tempfile.TemporaryDirectory(prefix=".again.", suffix=".tmp", dir=folder.parent) as aside:
                whole = Path(chain.export(folder, Path(aside) / folder.name).path)
                self._put(whole, version)
            must_serve(self.report(), manifest.read(folder)["weights"], step)
            self._served = version
