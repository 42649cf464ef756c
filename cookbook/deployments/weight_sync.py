"""Weight sync: how the trainer's weights reach a deployment, as full checkpoints or as deltas."""

from __future__ import annotations

import logging
import re
import secrets
import shutil
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cookbook.checkpoints import manifest
from cookbook.errors import ConfigError, RolloutError
from cookbook.protocols import CheckpointTrainer, Sampler

log = logging.getLogger("cookbook")

# Names of the checkpoints that syncs write. Checkpoints with other names are never deleted here.
OWN_NAMES = re.compile(r"sync-[0-9a-f]{8}-\d{6}")


@dataclass
class WeightSyncConfig:
    """``every``: optimizer steps between two syncs. Samples come from weights that are up to ``every - 1`` steps old."""

    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"weight_sync.every must be at least 1, got {self.every}")


@dataclass(frozen=True)
class SyncTarget:
    """State of one replica, as the replica reports it.

    Attributes:
        name: address of the replica.
        incarnation: id that changes whenever the replica restarts.
        digest: digest of the weights that the replica serves; None: unknown.
    """

    name: str
    incarnation: str
    digest: str | None


class Replicas(Protocol):
    """Copies of the model that are served outside the trainer, and receive weights as checkpoints."""

    def report(self) -> Sequence[SyncTarget]:
        """Return the current state of every replica."""

    def load(self, folder: Path, step: int) -> None:
        """Load the checkpoint ``folder``, with the weights of ``step``, into all replicas.

        Raises:
            CookbookError: a replica could not load the checkpoint.
        """

    def sampler(self, step: int) -> Sampler:
        """Return a sampler that uses the weights that were loaded last, and fails if the replicas serve other weights."""

    def in_use(self) -> Collection[Path]:
        """Return the checkpoints that may be loaded again, and therefore must not be deleted."""


def must_serve(replicas: Sequence[SyncTarget], digest: str, step: int) -> None:
    """Check that all replicas serve the weights with ``digest``. Raises RolloutError: one does not, or none exists."""
    for replica in replicas:
        if replica.digest != digest:
            served = f"{replica.digest[:12]}..." if replica.digest else "unknown weights"
            raise RolloutError(
                f"weight sync: {replica.name} should serve step {step} ({digest[:12]}...) and serves {served}; "
                "do not sample from it before the next sync"
            )
    if not replicas:
        raise RolloutError("weight sync: no replica has reported; start the deployment")


class ChainSyncer:
    """A :class:`~cookbook.protocols.WeightSyncer` that writes chains of checkpoints: a base (full weights), then deltas.

    A delta applies to the checkpoint before it. So a delta is sent only if no replica has restarted since the last sync and all
    replicas report exactly the weights to which the delta applies. Otherwise a base is sent: at the first sync, after a failed
    sync, after the restart of a replica, and if in between weights were loaded into the trainer or another caller saved a
    checkpoint. A sync succeeds if all replicas then report the digest of the trainer's weights.

    Args:
        deltas: maximum number of deltas in a chain, which limits the work of rebuilding full weights; 0: send bases only.
        keep: number of chains that are kept on disk, at least 1.
        chain_size: size of a chain, relative to the size of its base, from which on a new chain begins.
    """

    def __init__(
        self, trainer: CheckpointTrainer, replicas: Replicas, *, deltas: int = 50, keep: int = 1, chain_size: float = 2.0
    ) -> None:
        self._trainer = trainer
        self._replicas = replicas
        self._deltas = deltas
        self._keep = keep
        self._chain_size = chain_size
        # Part of the checkpoints' names, so that they differ from those of earlier processes.
        self._session = secrets.token_hex(4)
        self._saved = 0
        # Chains on disk, oldest first; the replicas serve the last one.
        self._chains: list[list[Path]] = []
        # Bytes of the checkpoints of the newest chain.
        self._sizes: list[int] = []
        # Reports of all replicas after the last successful sync.
        self._last_reports: frozenset[SyncTarget] | None = None

    def sync(self, step: int) -> Sampler:
        """Send the trainer's weights to all replicas, and return a sampler on them.

        Raises:
            CookbookError: the sync failed. Earlier samplers must not be used; the next sync sends a base.
        """
        started = time.monotonic()
        folder = self._delta(step) or self._save(step, "base")
        saved = time.monotonic()
        checkpoint = manifest.read(folder)
        kind = checkpoint["kind"]
        self._replicas.load(folder, step)
        reports = self._replicas.report()
        must_serve(reports, checkpoint["weights"], step)
        self._last_reports = frozenset(reports)
        self._add_to_chain(folder, kind)
        size = self._sizes[-1]
        times = saved - started, time.monotonic() - saved
        log.info("synced step %d: %s of %d bytes, saved in %.3f s, loaded in %.3f s", step, kind, size, *times)
        return self._replicas.sampler(step)

    # ---- base or delta -------------------------------------------------------------------------------------------

    def _delta(self, step: int) -> Path | None:
        """Write a delta that applies to the weights of all replicas. Returns None if a base must be sent instead."""
        if self._last_reports is None or len(self._chains[-1]) > self._deltas:
            return None
        if sum(self._sizes) >= self._chain_size * self._sizes[0]:
            return None
        if frozenset(self._replicas.report()) != self._last_reports:
            log.warning("weight sync: the replicas have changed since the last sync; sending full weights")
            return None
        predecessor = self._trainer.delta_predecessor().result()
        if predecessor != str(self._chains[-1][-1]):
            log.warning(
                "weight sync: the trainer's last checkpoint is %s, not that of the sync; sending full weights", predecessor
            )
            return None
        return self._save(step, "delta")

    def _save(self, step: int, kind: str) -> Path:
        self._saved += 1
        name = f"sync-{self._session}-{self._saved:06d}"
        saved = self._trainer.save_weights_for_sampler_ext(name, checkpoint_type=kind).result()
        if saved.step != step:
            raise RolloutError(
                f"weight sync: the trainer is at step {saved.step}, expected step {step}; sync after the step is done"
            )
        return Path(saved.path)

    # ---- deletion ------------------------------------------------------------------------------------------------

    def _add_to_chain(self, folder: Path, kind: str) -> None:
        """Add ``folder`` to its chain, and delete checkpoints that are no longer needed.

        These are older chains that no replica uses, and checkpoints of failed syncs and of earlier processes.
        """
        if kind == "base" or not self._chains:
            self._chains.append([])
            self._sizes = []
        self._chains[-1].append(folder)
        self._sizes.append(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
        used = set(self._replicas.in_use())
        older, newest = self._chains[: -self._keep], self._chains[-self._keep :]
        self._chains = [*(chain for chain in older if used.intersection(chain)), *newest]
        chain_paths = {path for chain in self._chains for path in chain}
        for path in folder.parent.iterdir():
            if OWN_NAMES.fullmatch(path.name) and path not in chain_paths:
                shutil.rmtree(path)

    def delete_checkpoints(self, *, keep_newest: bool = False) -> None:
        """Delete the checkpoints of all syncs, after the last sync. ``keep_newest``: keep the last one with its chain."""
        newest_chains = self._chains[-1:] if keep_newest else []
        for chain in self._chains[: len(self._chains) - len(newest_chains)]:
            # Deltas are deleted before the checkpoints to which they apply.
            for folder in reversed(chain):
                shutil.rmtree(folder, ignore_errors=True)
        self._chains = newest_chains
        self._last_reports = None
