"""Snapshots of a run on disk. A restart loads the newest one and replays only later requests, so log and replay stay short.

The snapshot before the newest one stays, with the log after it. A restart uses it if the newest one is damaged.
"""

from __future__ import annotations

import asyncio
import functools
import shutil
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from cookbook.backends.local.sample_queue import LocalSampler
from cookbook.checkpoints import store
from cookbook.errors import CookbookError
from cookbook.server.config import ServerConfig
from cookbook.server.journal.log import Log, Record
from cookbook.server.metrics import log_event
from cookbook.server.state.host import Host
from cookbook.server.state.requests import Request, RequestStore
from cookbook.server.state.run import TrainingRun
from cookbook.server.state.samplers import SamplerCache
from cookbook.types import JsonObject

# A client retries a request for 5 minutes. After twice that time no retry arrives.
RETRY_S = 600.0
# The newest snapshot and the one before.
NUM_KEPT = 2
# After one of these requests a run usually has no accumulated gradient, which a snapshot could not store.
CHANGES_WEIGHTS = ("optim_step", "load_weights")


@dataclass(eq=False)
class StateSnapshots:
    """Saves a run every ``checkpoint_s`` seconds, or when its log has grown by ``log_mb`` MiB, and deletes older files.

    Files are kept for two snapshots. Until there are two, the whole log is kept.

    A snapshot is the state of the run right after one request. The snapshot is logged only after it is complete on disk, so a
    restart never loads an incomplete one.
    """

    run: TrainingRun
    host: Host
    samplers: SamplerCache
    config: ServerConfig
    # The snapshots that are kept, oldest first: by the number of the request, the numbers of the requests that published the
    # weights of the samplers at that time.
    kept: dict[int, set[int]] = field(default_factory=dict)
    _saved_at: float = field(default_factory=time.monotonic)
    _saving: asyncio.Task[None] | None = None

    @property
    def newest(self) -> int | None:
        """Number of the request whose snapshot a restart loads; None: there is no snapshot."""
        return max(self.kept, default=None)

    def add(self, number: int, published: Iterable[int]) -> None:
        """Declare the snapshot of request ``number`` the newest one. ``published``: numbers of the publishing requests."""
        self.kept[number] = set(published)
        for older in list(self.kept)[:-NUM_KEPT]:
            del self.kept[older]
        self.run.requests.retire_below(self.run.info.run_id, number + 1)

    def on_begin(self, request: Request) -> None:
        """If a snapshot is due, queue it right behind ``request``, which the trainer has just queued."""
        due = time.monotonic() - self._saved_at >= self.config.checkpoint_s and request.kind in CHANGES_WEIGHTS
        if self._saving is None and (due or self.run.log.current_bytes >= self.config.log_mb << 20):
            try:
                self.run.log.rotate()
            except OSError as error:
                # The request and those after it must still run. Retry when the next snapshot is due.
                self._postpone(error)
                return
            job = self.run.lane.submit(lambda: self._write(request.number))
            self._saving = asyncio.create_task(self._save(request.number, job))

    async def wait(self) -> None:
        """Wait for the snapshot in progress, if any."""
        if self._saving is not None:
            # asyncio.wait() does not raise the error of the task, which asyncio logs.
            await asyncio.wait([self._saving])

    def prune(self) -> None:
        """Delete the oldest log files if both snapshots cover their requests and no client may fetch their results."""
        log, requests, run_id = self.run.log, self.run.requests, self.run.info.run_id
        if len(self.kept) < NUM_KEPT:
            return
        covered = next(iter(self.kept))
        while log.files:
            oldest = log.files[0]
            is_old = time.monotonic() - oldest.last_append_s > RETRY_S or log.num_bytes > self.config.log_mb << 20
            is_needed = any(requests.may_be_fetched(known) or _number(known) > covered for known in oldest.requests)
            if oldest.snapshots & self.kept.keys() or is_needed or not is_old or not log.drop(oldest):
                return
            requests.remove(known for known in oldest.requests if known.startswith(f"{run_id}/"))

    def _write(self, number: int) -> JsonObject | None:
        """Write the snapshot, on the worker thread, and return the prediction state of the kept graphs.

        Returns None, without a snapshot, if the run has state that a checkpoint does not store: a gradient, an unread error, or
        kept graphs.
        """
        trainer = self.run.trainer
        graphs = self.host.graphs.prediction_state(trainer.engine)
        if graphs is None or not trainer.is_settled:
            return None
        with trainer.in_memory():
            store.save(trainer.engine, state_folder(self.run.log.folder, number), state=True, overwrite=True)
        return graphs

    async def _save(self, number: int, job: Future[JsonObject | None]) -> None:
        log = self.run.log
        try:
            graphs = await asyncio.wrap_future(job)
            if graphs is None:
                return
            published = await self._save_published(number)
            inflight = [session.sampler_id for session in self.run.inflight if session.published_by <= number]
            header = {"what": "state", "number": number, "graphs": graphs, "published": published, "inflight": inflight}
            # Log the results before the snapshot: a restart from the snapshot cannot recompute them.
            self.run.requests.log_results(self.run.info.run_id)
            log.append(Record(header))
            # Only a durable snapshot may replace the older files, which are deleted below.
            await log.synced()
        except (CookbookError, OSError) as error:
            # The older snapshot and the log are still complete, so nothing is lost. Retry when the next snapshot is due.
            self._postpone(error)
            return
        finally:
            self._saving = None
        self._saved_at = time.monotonic()
        self.add(number, published.values())
        log_event("state", run=self.run.info.run_id, request=number)
        self._delete_others()
        self.prune()

    def _postpone(self, error: Exception) -> None:
        log_event("state not saved", run=self.run.info.run_id, error=str(error))
        self._saved_at = time.monotonic()

    async def _save_published(self, number: int) -> dict[str, int]:
        """Save the weights of the samplers that requests up to ``number`` published.

        Returns:
            The number of the publishing request, by sampler id.
        """
        published = {
            sampler_id: (request, self.samplers[sampler_id].sampler)
            for sampler_id, request in self.run.published.items()
            if request <= number and sampler_id in self.samplers
        }
        for request, sampler in published.values():
            folder = published_folder(self.run.log.folder, request)
            if not folder.exists():
                await asyncio.wrap_future(self.host.worker.submit(functools.partial(_write_weights, sampler, folder)))
        return {sampler_id: request for sampler_id, (request, _) in published.items()}

    def _delete_others(self) -> None:
        """Delete files that only earlier snapshots need."""
        published = set[int]().union(*self.kept.values())
        for path in self.run.log.folder.glob("*-*"):
            kind, _, suffix = path.name.partition("-")
            number = int(suffix) if suffix.isdecimal() else None
            old = {
                "state": number not in self.kept,
                "published": number not in published,
                # Without a second snapshot, a replay begins with the first request.
                "loaded": number is not None and len(self.kept) == NUM_KEPT and number <= min(self.kept),
            }
            if old.get(kind):
                shutil.rmtree(path, ignore_errors=True)


def _number(request_id: str) -> int:
    return int(request_id.rpartition("/")[2])


def prune_samples(log: Log, requests: RequestStore, log_bytes: int) -> None:
    """Delete the oldest files of a log of samples once no client may fetch their results.

    No snapshot is needed: samples change no state.
    """
    if log.current_bytes >= log_bytes:
        log.rotate()
    while log.files and time.monotonic() - log.files[0].last_append_s > RETRY_S:
        oldest = log.files[0]
        if any(requests.may_be_fetched(known) for known in oldest.requests) or not log.drop(oldest):
            return
        requests.remove(oldest.requests)


def _write_weights(sampler: LocalSampler, folder: Path) -> None:
    store.save(sampler.engine(), folder, state=False)


def state_folder(log_folder: Path, number: int) -> Path:
    return log_folder / f"state-{number}"


def published_folder(log_folder: Path, number: int) -> Path:
    return log_folder / f"published-{number}"


def loaded_folder(log_folder: Path, number: int) -> Path:
    """Return the folder of hard links to the checkpoint that request ``number`` loaded. The original may be deleted."""
    return log_folder / f"loaded-{number}"
