"""After a restart: sessions, runs and samplers as they were, from what the process before has kept of them.

A run is its newest state and the requests after it, repeated in their order. What they gave then they must give again; what
they had not given yet, the client gets now.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cookbook.backends.sampling import LocalSampler
from cookbook.errors import BackendError, CheckpointError, CookbookError
from cookbook.server import making, sampling, states, training
from cookbook.server.errors import Refused
from cookbook.server.futures import Answer
from cookbook.server.live import file_bytes
from cookbook.server.log import Log
from cookbook.server.messages import CreateModel, CreateSamplingSession, CustomLoss, LoadWeights, Sample, parsed
from cookbook.server.observed import event
from cookbook.server.records import Record
from cookbook.server.results import Result, failure
from cookbook.server.run_graphs import RunGraphs
from cookbook.server.runs import Recorded, Step, TrainingRun
from cookbook.server.samplers import SamplingSession
from cookbook.server.service import Service, Session

log = logging.getLogger("cookbook")


@dataclass
class _Asked:
    """A request of a log, and what came of it."""

    request: Record
    result: Record | None = None

    def answer(self, kept: Log) -> Answer:
        facts = self.request.facts
        body = self.request.body
        return Answer(facts["id"], hashlib.sha256(body).digest(), facts["kind"], kept, len(body))

    @property
    def number(self) -> int:
        return int(self.request.facts["id"].rpartition("/")[2])

    @property
    def outcome(self) -> Result | None:
        if self.result is None:
            return None
        return Result(self.result.body, self.result.facts["type"], self.result.facts["error"])


async def restore(service: Service) -> None:
    """Everything that an earlier process has left. What cannot be made again is named, and left where it is."""
    for place in service.durability.sessions():
        try:
            await _session(service, place)
        except (CookbookError, OSError, KeyError, ValueError) as error:
            log.warning("%s: this session cannot go on: %s", place, error)
            service.sessions.pop(place.name, None)
    if service.sessions:
        event("restored", sessions=len(service.sessions), runs=len(service.runs))


async def _session(service: Service, place: Path) -> None:
    """Raises CheckpointError: it is one of another model."""
    opening = next(Log(place / "log", Record({}), forced=False).earlier(), None)
    if opening is None:  # killed before it was acknowledged
        shutil.rmtree(place)
        return
    if opening.facts["model"] != service.host.digests["weights"]:
        raise CheckpointError("it was on another base model; start the server with that one, or delete the folder")
    session = service.new_session(place.name, opening.facts)
    samplers: list[CreateSamplingSession] = []
    joined: dict[str, int] = {}
    for record in session.log.earlier():
        if record.what == "request":
            _loss(service, session, record)
        elif record.what == "sampler":
            samplers.append(CreateSamplingSession(**record.facts["asked"]))
        elif record.what == "let go":
            samplers = [one for one in samplers if _sampler_id(place, one) != record.facts["sampler"]]
        elif record.what == "joined":
            joined[record.facts["sampler"]] = record.facts["count"]
    _samples(service, session)
    for message in samplers:
        sampler_id = _sampler_id(place, message)
        try:
            service.add_sampler(await sampling.make(service, message, sampler_id, again=True))
        except CookbookError as error:
            log.warning("%s: this sampling session cannot go on: %s", sampler_id, error)
    for path in sorted(place.glob("run-*")):
        await _run(service, session, path)
    for sampler_id, count in joined.items():
        if sampler_id in service.samplers:
            service.samplers[sampler_id].joined = count


def _sampler_id(place: Path, message: CreateSamplingSession) -> str:
    return f"{place.name}:sample:{message.sampling_session_seq_id}"


def _loss(service: Service, session: Session, record: Record) -> None:
    asked = _Asked(record)
    message = parsed(CustomLoss, record.body)
    service.answers.restore(asked.answer(session.log), making.make_loss(session, message, record.facts["id"]))


# ---- runs ------------------------------------------------------------------------------------------------------------


async def _run(service: Service, session: Session, place: Path) -> None:
    for left in place.glob(".*"):
        shutil.rmtree(left, ignore_errors=True)
    number = place.name.removeprefix("run-")
    run_id = f"{session.session_id}:train:{number}"
    kept = service.durability.log(session.session_id, place.name, Record({}))
    found = list(kept.earlier())
    if not found:
        return
    kept.opening = found[0]
    asked = _asked(found)
    state = next((one for one in reversed(found) if one.what == "state"), None)
    first = asked.pop(f"{run_id}/0", None)
    if first is not None and first.outcome is not None:
        service.answers.restore(first.answer(kept), first.outcome)
        if first.outcome.is_failure:
            return
    try:
        if state is None and kept.files[0].number > 1:
            raise CheckpointError(f"{place}: the beginning of its log is gone")
        run = await _made(service, session, kept, state)
    except CookbookError as error:
        service.lost[run_id] = f"{run_id} cannot go on after the restart ({error})"
        log.warning("%s", service.lost[run_id])
        return
    if first is not None and first.outcome is None:
        answer = first.answer(kept)
        service.answers.restore(answer, None)
        service.answers.settle(answer, making.created(answer.kind, run_id))
    if state is not None:
        await _restore_published(service, run, state.facts)
        service.states[run_id].begin(state.facts["number"])
    _replay(service, run, asked.values(), state.facts["number"] if state is not None else 0)


async def _made(service: Service, session: Session, kept: Log, state: Record | None) -> TrainingRun:
    """The run as it was created, or in its newest state. Raises CookbookError: something it needs is gone."""
    opening, graphs = kept.opening, RunGraphs(service.host.graphs)
    if opening.facts["kind"] == "create_model":
        plan = making.model_plan(service, session, parsed(CreateModel, opening.body))
    else:
        plan = making.weights_plan(service, session, parsed(LoadWeights, opening.body))
    trainer = await asyncio.to_thread(plan.make, graphs)
    if state is not None:
        folder = states.state_folder(kept.folder, state.facts["number"])
        await asyncio.wrap_future(trainer.load_state(str(folder)))
        remember = functools.partial(graphs.remember, trainer.engine, state.facts["graphs"])
        await asyncio.wrap_future(service.host.worker.submit(remember))
    run = making.made(service, session, plan, trainer, graphs, kept)
    run.order.following = 1 + (state.facts["number"] if state is not None else 0)
    service.add_run(run)
    return run


async def _restore_published(service: Service, run: TrainingRun, facts: Mapping[str, Any]) -> None:
    """The samplers of weights that the run had before its state. One in flight that has moved on since comes with what it
    has moved on to; until then it has the run's own.
    """
    loaded: dict[int, LocalSampler] = {}
    of_run = await asyncio.wrap_future(run.trainer.snapshot_sampler())
    for sampler_id in dict.fromkeys([*facts["published"], *facts["inflight"]]):
        number = facts["published"].get(sampler_id)
        if number is not None and number not in loaded:
            loaded[number] = service.host.kept_sampler(states.published_folder(run.log.folder, number), run.facts.seed)
        sampler = of_run if number is None else loaded[number]
        made = SamplingSession(sampler_id, run.session_id, run.facts.base_model, None, sampler, run.facts.seed)
        if number is not None:
            made.num_bytes = file_bytes(states.published_folder(run.log.folder, number))
            run.published[sampler_id] = number
        if sampler_id in facts["inflight"]:
            run.inflight.append(made)
        service.add_sampler(made)


def _replay(service: Service, run: TrainingRun, asked: Iterable[_Asked], state: int) -> None:
    """Settles what was settled, and repeats what came after the state."""
    steps, published = [], set()
    for one in sorted(asked, key=lambda one: one.number):
        answer, outcome = one.answer(run.log), one.outcome
        service.answers.restore(answer, outcome)
        facts = one.result.facts if one.result is not None else {}
        if one.number <= state or facts.get("never_run"):
            if outcome is None:  # no state is saved without the results before it
                service.answers.settle(answer, failure(BackendError(f"{answer.request_id}: its result is lost")))
            continue
        recorded = None if outcome is None else Recorded(outcome, facts.get("graph"))
        try:
            request = training.READERS[answer.kind](service, one.request.body)
        except Refused as error:  # it was read before: the log is of another version
            raise CheckpointError(f"{run.log.folder}: a request in it cannot be read: {error}") from None
        steps.append(Step(run, answer, request, again=True, recorded=recorded))
        if request.publishes is not None and (outcome is None or not outcome.is_failure):
            published.add(request.publishes)
    service.coming |= published

    async def replay() -> None:
        await run.replay(steps)
        service.coming -= published  # where the run could not go on

    service.spawn(replay())


def _asked(records: Iterable[Record]) -> dict[str, _Asked]:
    """The requests of a log by their id, in the order they came."""
    found: dict[str, _Asked] = {}
    for record in records:
        if record.what == "request":
            found[record.facts["id"]] = _Asked(record)
        elif record.what == "result" and record.facts["id"] in found:
            found[record.facts["id"]].result = record
    return found


# ---- samples ---------------------------------------------------------------------------------------------------------


@dataclass
class _Batch:
    """Requests that were, or were to be, answered together."""

    count: int
    requests: list[_Asked] = field(default_factory=list)


def _samples(service: Service, session: Session) -> None:
    """Settles what was settled. What was not is asked again as soon as its sampler is there, with its whole batch."""
    found = list(session.samples.earlier())
    asked = _asked(found)
    answers = {}
    for request_id, one in asked.items():
        answers[request_id] = one.answer(session.samples)
        service.answers.restore(answers[request_id], one.outcome)
    open_batches: dict[str, list[_Batch]] = defaultdict(list)
    for sampler_id, batch in list(_batches(found, asked)):  # whole before they are looked at
        complete = len(batch.requests) == batch.count
        if not complete or any(one.outcome is None for one in batch.requests):
            open_batches[sampler_id].append(batch)
    before = service.sampler_came

    def came(sampler: SamplingSession) -> None:
        before(sampler)
        for batch in open_batches.pop(sampler.sampler_id, []):
            _draw_again(service, sampler, batch, answers)

    service.sampler_came = came


def _batches(found: Iterable[Record], asked: Mapping[str, _Asked]) -> Iterator[tuple[str, _Batch]]:
    """In order; a request that was in none is one of its own."""
    gathering: dict[str, _Batch] = {}
    for record in found:
        if record.what == "batch":
            batch = gathering[record.facts["sampler"]] = _Batch(record.facts["count"])
            yield record.facts["sampler"], batch
        elif record.what == "request":
            sampler_id = record.facts["id"].rpartition("/")[0]
            gathered = gathering.get(sampler_id)
            if gathered is None or len(gathered.requests) == gathered.count:
                yield sampler_id, _Batch(1, [asked[record.facts["id"]]])
            else:
                gathered.requests.append(asked[record.facts["id"]])


def _draw_again(service: Service, sampler: SamplingSession, batch: _Batch, answers: Mapping[str, Answer]) -> None:
    """What is settled already is drawn along, and dropped: alone, the others could differ in their last bits."""
    if batch.count > 1:
        sampling.gather(service, sampler, batch.count)
    for one in batch.requests:
        message = parsed(Sample, one.request.body)
        sampling.draw(service, sampler, message, sampling.prompt_of(service, message), answers[one.request.facts["id"]])
