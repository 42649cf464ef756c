"""When, and how, the deployment gets the trainer's weights."""

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
from cookbook.futures import Future
from cookbook.protocols import Deployment, Sampler
from cookbook.types import Checkpoint

log = logging.getLogger("cookbook")

OURS = re.compile(r"sync-[0-9a-f]{8}-\d{6}")  # no other checkpoint is ever deleted


@dataclass
class WeightSyncConfig:
    """``every``: optimizer steps between two syncs. Above 1, samples are up to ``every - 1`` steps old."""

    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"weight_sync.every must be at least 1, got {self.every}")


class DeploymentSyncer:
    """A :class:`~cookbook.protocols.WeightSyncer` that asks the deployment for a sampler of the trainer's current weights."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment

    def sync(self, step: int) -> Sampler:
        return self._deployment.load(step).result()


@dataclass(frozen=True)
class Replica:
    """What one replica says of itself.

    ``name`` is where it is; ``incarnation`` is another whenever it has started anew; ``digest`` is that of the weights it
    serves, None when it does not know.
    """

    name: str
    incarnation: str
    digest: str | None


class ChainTrainer(Protocol):
    """A :class:`~cookbook.protocols.TrainingClient` that tells what a delta would be against."""

    def save_weights_for_sampler_ext(self, name: str, *, checkpoint_type: str = "base") -> Future[Checkpoint]: ...

    def delta_predecessor(self) -> Future[str | None]:
        """The folder of the checkpoint that the next delta would apply to; None: there can be none."""
        ...


class Replicas(Protocol):
    """Copies of the model that are served outside of the trainer, and get their weights as checkpoints."""

    def report(self) -> Sequence[Replica]:
        """Every one of them, as it is now."""
        ...

    def load(self, folder: Path, step: int) -> None:
        """Puts a checkpoint of that step into service on all of them.

        Raises:
            CookbookError: one of them could not.
        """
        ...

    def sampler(self, step: int) -> Sampler:
        """One that answers with what was loaded last, and with nothing else."""
        ...

    def in_use(self) -> Collection[Path]:
        """The checkpoints that may be loaded once more."""
        ...


def must_serve(replicas: Sequence[Replica], digest: str, step: int) -> None:
    """Raises RolloutError when one of them serves other weights than those of ``digest``, or there is none."""
    for replica in replicas:
        if replica.digest != digest:
            holds = f"{replica.digest[:12]}..." if replica.digest else "weights that it does not know"
            raise RolloutError(
                f"weight sync: {replica.name} should serve step {step} ({digest[:12]}...) and serves {holds}; "
                "nothing may be sampled from it before the next sync"
            )
    if not replicas:
        raise RolloutError("weight sync: no replica has reported; start the deployment")


@dataclass(frozen=True)
class Synced:
    """One sync that succeeded. ``num_bytes`` were written; the times are in seconds."""

    step: int
    kind: str
    num_bytes: int
    save_s: float
    load_s: float


class ChainSyncer:
    """A :class:`~cookbook.protocols.WeightSyncer` over sampler checkpoints: a base, then deltas, each against the last.

    A delta is sent only if every replica, of the same incarnation as after the last sync, reports exactly the weights that it
    applies to. Anything else makes the next checkpoint a base: the first sync, one that failed, a replica that has started
    anew, weights that were loaded into the trainer or saved by somebody else in between. Success is every replica reporting
    the trainer's digest.

    Args:
        deltas: after so many of them the next checkpoint is a base, which bounds what a reader has to go through; 0 sends
            bases only.
        keep: chains kept on the disk, at least 1; a chain is a base with its deltas.
    """

    def __init__(self, trainer: ChainTrainer, replicas: Replicas, *, deltas: int = 50, keep: int = 1) -> None:
        self._trainer = trainer
        self._replicas = replicas
        self._deltas = deltas
        self._keep = keep
        self._session = secrets.token_hex(4)  # names of an earlier process' checkpoints must not be in the way
        self._saved = 0
        self._chains: list[list[Path]] = []  # those that are on the disk, the one that is served last
        self._holds: frozenset[Replica] | None = None  # what all of them reported after the last sync that succeeded
        self.last: Synced | None = None

    def sync(self, step: int) -> Sampler:
        """Raises CookbookError with what failed. Then the next sync sends a base, and no sampler of before may be used."""
        started = time.monotonic()
        folder = self._delta(step) or self._save(step, "base")
        saved = time.monotonic()
        facts = manifest.read(folder)
        self._replicas.load(folder, step)
        self._holds = self._verified(facts["weights"], step)
        self._note(folder, facts["kind"])
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        self.last = Synced(step, facts["kind"], size, saved - started, time.monotonic() - saved)
        log.info("synced %s", self.last)
        return self._replicas.sampler(step)

    # ---- which kind ----------------------------------------------------------------------------------------------

    def _delta(self, step: int) -> Path | None:
        """A delta that applies to what every replica holds; None where there is a doubt."""
        if self._holds is None or len(self._chains[-1]) > self._deltas:
            return None
        if frozenset(self._replicas.report()) != self._holds:
            log.warning("weight sync: the replicas are not as the last sync left them; sending all of the weights")
            return None
        predecessor = self._trainer.delta_predecessor().result()
        if predecessor != str(self._chains[-1][-1]):
            log.warning("weight sync: the trainer's last checkpoint is %s; sending all of the weights", predecessor)
            return None
        return self._save(step, "delta")

    def _save(self, step: int, kind: str) -> Path:
        self._saved += 1
        name = f"sync-{self._session}-{self._saved:06d}"
        saved = self._trainer.save_weights_for_sampler_ext(name, checkpoint_type=kind).result()
        if saved.step != step:
            raise RolloutError(f"weight sync: the trainer has seen {saved.step} steps, not {step}; sync after the step is done")
        return Path(saved.path)

    # ---- whether it worked ---------------------------------------------------------------------------------------

    def _verified(self, digest: str, step: int) -> frozenset[Replica]:
        """The replicas, all of which hold the weights of ``digest``."""
        found = self._replicas.report()
        must_serve(found, digest, step)
        return frozenset(found)

    # ---- what is kept --------------------------------------------------------------------------------------------

    def _note(self, folder: Path, kind: str) -> None:
        """Takes ``folder`` into its chain, and deletes what nobody needs any more.

        That is the chains before the kept ones where nobody uses them, and what failed syncs and earlier processes have left.
        """
        if kind == "base" or not self._chains:
            self._chains.append([])
        self._chains[-1].append(folder)
        used = set(self._replicas.in_use())
        older, newest = self._chains[: -self._keep], self._chains[-self._keep :]
        self._chains = [*(chain for chain in older if used.intersection(chain)), *newest]
        kept = {path for chain in self._chains for path in chain}
        for path in folder.parent.iterdir():
            if OURS.fullmatch(path.name) and path not in kept:
                shutil.rmtree(path)
