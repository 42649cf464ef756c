"""The states of a run on the disk: what its log is replayed from, so that neither grows without end."""

from __future__ import annotations

import asyncio
import functools
import shutil
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from cookbook.backends.sampling import LocalSampler
from cookbook.backends.worker import Worker
from cookbook.checkpoints import store
from cookbook.errors import CookbookError
from cookbook.server.futures import Answers
from cookbook.server.live import LiveSamplers
from cookbook.server.log import Log
from cookbook.server.observed import event
from cookbook.server.records import Record
from cookbook.server.runs import Request, TrainingRun

RETRY_S = 600.0  # a client repeats what it has not seen answered for 5 minutes; twice that, and nobody will
CHANGES_WEIGHTS = ("optim_step", "load_weights")  # after one of these there is rarely more to a run than its weights


class States:
    """Saves a run every ``every_s`` seconds, and when its log has grown by ``log_bytes``; then deletes what nobody needs.

    A state is the run after some request, with everything earlier ones have left behind, and the log holds a record of it once
    all of it is on the disk.
    """

    def __init__(self, run: TrainingRun, worker: Worker, samplers: LiveSamplers, every_s: float, log_bytes: int):
        self._run = run
        self._worker = worker
        self._samplers = samplers
        self._every_s = every_s
        self._log_bytes = log_bytes
        self._saved = time.monotonic()
        self._saving: asyncio.Task[None] | None = None
        self.newest: int | None = None  # the state that a restart begins from

    def begin(self, number: int) -> None:
        """From now on a restart begins from the state after request ``number``."""
        self.newest = number
        self._run.answers.raise_floor(self._run.facts.run_id, number + 1)

    def begun(self, request: Request) -> None:
        """The trainer has got ``request``; what is asked of it now comes right after."""
        due = time.monotonic() - self._saved >= self._every_s and request.kind in CHANGES_WEIGHTS
        if self._saving is None and (due or self._run.log.current_bytes >= self._log_bytes):
            self._run.log.turn()
            job = self._worker.submit(lambda: self._write(request.number))
            self._saving = asyncio.create_task(self._save(request.number, job))

    def prune(self) -> None:
        """Deletes the oldest files of the log whose requests the newest state has seen, and whose results nobody awaits."""
        log, answers, run_id = self._run.log, self._run.answers, self._run.facts.run_id
        while log.files:
            oldest = log.files[0]
            quiet = time.monotonic() - oldest.last_record > RETRY_S or log.num_bytes > self._log_bytes
            wanted = any(answers.is_wanted(one) or not answers.is_past(one) for one in oldest.requests)
            if self.newest is None or oldest.state == self.newest or wanted or not quiet or not log.drop(oldest):
                return
            answers.remove(one for one in oldest.requests if one.startswith(f"{run_id}/"))

    def _write(self, number: int) -> dict[str, Any] | None:
        """On the trainer's thread. None: there is more to the run just now than can be saved."""
        trainer = self._run.trainer
        memory = self._run.graphs.memory(trainer.engine)
        if memory is None or not trainer.is_settled:
            return None
        store.save(trainer.engine, state_folder(self._run.log.folder, number), state=True, overwrite=True)
        return memory

    async def _save(self, number: int, job: Future[dict[str, Any] | None]) -> None:
        log = self._run.log
        try:
            memory = await asyncio.wrap_future(job)
            if memory is None:
                return
            published = await self._save_published(number)
            inflight = [one.sampler_id for one in self._run.inflight if one.made_by <= number]
            facts = {"what": "state", "number": number, "graphs": memory, "published": published, "inflight": inflight}
            self._run.answers.log_late(self._run.facts.run_id)  # they are never computed again
            log.append(Record(facts))
            await log.synced()
        except (CookbookError, OSError) as error:  # the log is still whole; it is tried again
            event("state not saved", run=self._run.facts.run_id, error=str(error))
            self._saved = time.monotonic()
            return
        finally:
            self._saving = None
        self._saved = time.monotonic()
        self.begin(number)
        event("state", run=self._run.facts.run_id, request=number)
        _delete_others(log.folder, number, set(published.values()))
        self.prune()

    async def _save_published(self, number: int) -> dict[str, int]:
        """The samplers made from the run's weights so far, by the request that published them; their weights are saved."""
        found = {
            sampler_id: (request, self._samplers[sampler_id].sampler)
            for sampler_id, request in self._run.published.items()
            if request <= number and sampler_id in self._samplers
        }
        for request, sampler in found.values():
            folder = published_folder(self._run.log.folder, request)
            if not folder.exists():
                await asyncio.wrap_future(self._worker.submit(functools.partial(_write_weights, sampler, folder)))
        return {sampler_id: request for sampler_id, (request, _) in found.items()}


def prune_samples(log: Log, answers: Answers, log_bytes: int) -> None:
    """Samples change nothing: a file of their log goes when its answers have come to those who asked."""
    if log.current_bytes >= log_bytes:
        log.turn()
    while log.files and time.monotonic() - log.files[0].last_record > RETRY_S:
        oldest = log.files[0]
        if any(answers.is_wanted(one) for one in oldest.requests) or not log.drop(oldest):
            return
        answers.remove(oldest.requests)


def _write_weights(sampler: LocalSampler, folder: Path) -> None:
    store.save(sampler.engine(), folder, state=False)


def state_folder(place: Path, number: int) -> Path:
    return place / f"state-{number}"


def published_folder(place: Path, number: int) -> Path:
    return place / f"published-{number}"


def loaded_folder(place: Path, number: int) -> Path:
    """What ``load_weights`` has read, which may be deleted elsewhere."""
    return place / f"loaded-{number}"


def _delete_others(place: Path, number: int, published: set[int]) -> None:
    """What earlier states needed, and this one does not."""
    for path in place.glob("*-*"):
        kind, _, of = path.name.partition("-")
        old = {"state": of != str(number), "published": of not in map(str, published), "loaded": _upto(of, number)}
        if old.get(kind):
            shutil.rmtree(path, ignore_errors=True)


def _upto(text: str, number: int) -> bool:
    return text.isdecimal() and int(text) <= number
