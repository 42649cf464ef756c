"""Recovery after a restart: rebuild sessions, runs and samplers from the logs of earlier processes.

A run is restored from its newest snapshot; the requests after the snapshot are then replayed from the log, in order. A replayed
request must give the result that is in the log. A request without a result in the log is settled by its replay.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from cookbook.backends import worker
from cookbook.backends.local import LocalTrainer
from cookbook.engine.precision import EXACT
from cookbook.errors import BackendError, CheckpointError, CookbookError, RolloutError
from cookbook.server.handlers import create_run, sampling, training
from cookbook.server.journal.log import Log, Record
from cookbook.server.metrics import log_event
from cookbook.server.state import snapshots
from cookbook.server.state.requests import Request
from cookbook.server.state.run import TrainingRun
from cookbook.server.state.samplers import SamplingSession, file_bytes
from cookbook.server.state.service import Service, Session
from cookbook.server.wire.bodies import CreateSamplingSession, CustomLoss, Refused, SampleBody, parse
from cookbook.server.wire.encode import StoredResult, failure
from cookbook.types import JsonObject

log = logging.getLogger("cookbook")
# Attempts to replay a request that succeeded before. A run without it is lost, so there are more than for a new request.
MAX_REPLAYS = 10


@dataclass
class _LoggedRequest:
    """A request in a log, with its result and the header of the result's record; both are empty if no result was logged."""

    request_id: str
    kind: str
    body: bytes
    result: StoredResult | None = None
    result_header: JsonObject = field(default_factory=dict)

    @property
    def number(self) -> int:
        return _number(self.request_id)

    def request(self) -> Request:
        return Request(self.request_id.rpartition("/")[0], self.number, self.kind, self.body, result=self.result)


def _number(request_id: str) -> int:
    return int(request_id.rpartition("/")[2])


def _logged_requests(records: Iterable[Record]) -> dict[str, _LoggedRequest]:
    """Return the requests of a log by id, in the order in which they were accepted."""
    requests: dict[str, _LoggedRequest] = {}
    for record in records:
        header = record.header
        if record.kind == "request":
            requests[header["id"]] = _LoggedRequest(header["id"], header["kind"], record.body)
        elif record.kind == "result" and header["id"] in requests:
            logged = requests[header["id"]]
            logged.result, logged.result_header = StoredResult(record.body, header["type"], header["error"]), header
    return requests


async def recover(service: Service) -> None:
    """Recover all sessions of earlier processes. If a session cannot be recovered, log a warning and keep its folder."""
    for folder in service.durability.sessions():
        try:
            await recover_session(service, folder)
        except (CookbookError, OSError, KeyError, ValueError) as error:
            log.warning("%s: cannot recover the session: %s", folder, error)
            free_partial(service, folder.name)
    if service.sessions:
        log_event("restored", sessions=len(service.sessions), runs=len(service.runs))


def free_partial(service: Service, session_id: str) -> None:
    """Free what a failed recovery has loaded of a session. The folder of the session stays."""
    if (session := service.sessions.pop(session_id, None)) is not None:
        service.free(session)


async def recover_session(service: Service, folder: Path) -> None:
    """Recover one session from its folder. Raises CheckpointError: the session used another base model."""
    session_log = Log(folder / "log", Record({}), fsync=False)
    opening = next((record for record in session_log.earlier_records() if record.kind == "session"), None)
    if opening is None and (session_log.damage or any(folder.glob("run-*"))):
        lost = session_log.damage[0] if session_log.damage else f"{folder / 'log'}: not found"
        raise CheckpointError(f"{lost}; the log has no description of the session")
    if opening is None:
        # The server was killed before it acknowledged the session, so no client uses it.
        shutil.rmtree(folder)
        return
    if opening.header["model"] != service.host.digests["weights"]:
        raise CheckpointError("the session used another base model; start the server with that model, or delete the folder")
    if (then := opening.header.get("precision", EXACT)) != (now := service.host.digests["precision"]):
        raise CheckpointError(
            f"the session used backend.matmul_precision and backend.autocast of {then!r}, now they are {now!r}; start the "
            "server with the old values, or delete the folder"
        )
    session = service.new_session(folder.name, opening.header)
    samplers: dict[str, CreateSamplingSession] = {}
    records = list(session.log.earlier_records())
    _report_damage(session.log)
    for logged in _logged_requests(records).values():
        request = logged.request()
        request.result = create_run.add_custom_loss(session, parse(CustomLoss, logged.body), logged.request_id)
        service.requests.restore(session.log, request)
    for record in records:
        if record.kind == "sampler":
            fields = CreateSamplingSession(**record.header["asked"])
            samplers[f"{session.session_id}:sample:{fields.sampling_session_seq_id}"] = fields
        elif record.kind == "let go":
            samplers.pop(record.header["sampler"], None)
        elif record.kind == "joined":
            session.num_joined[record.header["sampler"]] = record.header["count"]
    _restore_samples(service, session)
    for sampler_id, fields in samplers.items():
        try:
            service.add_sampler(await sampling.load_sampler(service, fields, sampler_id, lazy=True))
        except CookbookError as error:
            log.warning("%s: cannot recover the sampling session: %s", sampler_id, error)
    for path in sorted(folder.glob("run-*")):
        await _recover_run(service, session, path)
    own = [known for known in service.unfinished_batches if known.startswith(f"{session.session_id}:")]
    service.fail_unfinished_batches(set(own) - service.replayed_samplers)


# ---- runs ------------------------------------------------------------------------------------------------------------


async def _recover_run(service: Service, session: Session, folder: Path) -> None:
    """Recover a run and start its replay. If the run cannot be recovered, log a warning and refuse its requests."""
    for unfinished in folder.glob(".*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    run_id = f"{session.session_id}:train:{folder.name.removeprefix('run-')}"
    run_log = service.durability.log(session.session_id, folder.name, Record({}))
    records = list(run_log.earlier_records())
    _report_damage(run_log)
    # Every file begins with the same record.
    opening = next((record for record in records if record.kind == "run"), None)
    if opening is None:
        if run_log.damage:
            lost = CheckpointError(f"{run_log.damage[0]}; the log has no whole description of the run")
            _give_up(service, session, run_id, lost)
        return
    run_log.opening = opening
    requests = _logged_requests(records)
    # Request 0 created the run.
    creation = requests.pop(f"{run_id}/0", None)
    if creation is not None and creation.result is not None:
        service.requests.restore(run_log, creation.request())
        if creation.result.is_failure:
            return
    if creation is not None and creation.result is None and (error := _ended_process(service, creation)) is not None:
        request = creation.request()
        service.requests.restore(run_log, request)
        service.requests.settle(request, failure(error))
        return
    try:
        _check_replay(service, [f"{run_id}/0", *requests])
        with worker.purpose(f"{run_id}/0"):
            run, snapshot = await _load_newest(
                service, session, run_log, records, {request.number for request in requests.values()}
            )
        service.attempts.forget(f"{run_id}/0")
        if snapshot is not None:
            await _restore_published(service, run, snapshot.header)
        _replay(service, run, requests.values(), snapshot.header["number"] if snapshot is not None else 0)
    except CookbookError as error:
        _give_up(service, session, run_id, error)
        return
    if creation is not None and creation.result is None:
        request = creation.request()
        service.requests.restore(run_log, request)
        service.requests.settle(request, create_run.creation_result(request.kind, run_id))


def _report_damage(damaged: Log) -> None:
    """Name each damaged part of a log on the console."""
    for damage in damaged.damage:
        log.warning("%s; the server continues without it", damage)


def _give_up(service: Service, session: Session, run_id: str, error: CookbookError) -> None:
    """Refuse the requests of a run that cannot be recovered."""
    if run_id in session.run_ids:
        session.run_ids.remove(run_id)
        service.free_run(run_id)
    service.unrecovered_runs[run_id] = f"{run_id} could not be recovered after the restart ({error})"
    log.warning("%s; create a new run from a checkpoint", service.unrecovered_runs[run_id])


async def _load_newest(
    service: Service, session: Session, run_log: Log, records: Sequence[Record], numbers: set[int]
) -> tuple[TrainingRun, Record | None]:
    """Create the run again from its newest whole snapshot, and return both; None: from the start of the run.

    Args:
        numbers: numbers of the requests in the log.

    Raises:
        CookbookError: a required file is missing or damaged.
    """
    written: dict[int, Record] = {record.header["number"]: record for record in records if record.kind == "state"}
    newest_first = sorted(written, reverse=True)[: snapshots.NUM_KEPT]
    candidates: list[Record | None] = [written[number] for number in newest_first]
    if run_log.files[0].number == 1:
        candidates.append(None)
    reason: CookbookError = CheckpointError(f"{run_log.folder}: the first file of the log is missing")
    for place, snapshot in enumerate(candidates):
        number = 0 if snapshot is None else snapshot.header["number"]
        _check_requests(run_log, records, numbers, number)
        try:
            run = await _load_run(service, session, run_log, snapshot)
        except CheckpointError as error:
            reason = error
            if snapshot is not None:
                log.warning("%s; trying the state before it", error)
            continue
        # The snapshot before this one stays, if it exists.
        for older in reversed(newest_first[place : place + snapshots.NUM_KEPT]):
            if snapshots.state_folder(run_log.folder, older).is_dir():
                service.snapshots[run.info.run_id].add(older, written[older].header["published"].values())
        return run, snapshot
    raise reason


def _check_requests(run_log: Log, records: Iterable[Record], numbers: set[int], snapshot: int) -> None:
    """Raise CheckpointError if an accepted request after request number ``snapshot`` is lost.

    Lost results are recomputed. A lost record without a header may have been a request: if a number is missing, it was. The
    result of the last request also tells that there was one.
    """
    last = max((_number(record.header["id"]) for record in records if "id" in record.header), default=snapshot)
    missing = sorted(set(range(snapshot + 1, last + 1)) - numbers)
    for damage in run_log.damage:
        lost = missing[:1] if damage.header is None else []
        if damage.header is not None and damage.header["what"] == "request":
            lost = [number for number in [_number(damage.header["id"])] if number > snapshot]
        if lost:
            raise CheckpointError(f"{damage}; the run cannot continue after request {lost[0] - 1}")


async def _load_run(service: Service, session: Session, run_log: Log, snapshot: Record | None) -> TrainingRun:
    """Create the run again, and load its snapshot if there is one. Raises CookbookError: a required file is missing."""
    opening = run_log.opening
    run = await create_run.load_run(service, session, opening.header["kind"], opening.body, run_log)
    if snapshot is not None:
        number = snapshot.header["number"]
        try:
            await asyncio.wrap_future(run.trainer.load_state(str(snapshots.state_folder(run_log.folder, number))))
        except CookbookError:
            run.end()
            raise
        graphs, engine = service.host.graphs, run.trainer.engine
        restore = functools.partial(graphs.restore_prediction_state, engine, snapshot.header["graphs"])
        await asyncio.wrap_future(run.lane.submit(restore))
        run.order.next_number = 1 + number
    service.add_run(run)
    return run


async def _restore_published(service: Service, run: TrainingRun, header: JsonObject) -> None:
    """Restore the samplers that the run published before its snapshot.

    An in-flight sampler may have followed weights that were published after the snapshot. The replay of that request publishes
    them again; until then the sampler uses the current weights of the run.
    """
    if not (header["published"] or header["inflight"]):
        return
    queue = service.sessions[run.session_id].queue
    run_sampler = (await asyncio.wrap_future(run.trainer.snapshot_sampler())).on(queue)
    folders = {number: snapshots.published_folder(run.log.folder, number) for number in header["published"].values()}
    for folder in folders.values():
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: not found, but samplers of the run need it")
    loaded = {number: service.host.lazy_sampler(folder, run.info.seed).on(queue) for number, folder in folders.items()}
    for sampler_id in dict.fromkeys([*header["published"], *header["inflight"]]):
        number = header["published"].get(sampler_id)
        session = SamplingSession(sampler_id, run.session_id, run.info.base_model, None, run_sampler, run.info.seed)
        if number is not None:
            session.sampler, session.num_bytes = loaded[number], file_bytes(folders[number])
            run.published[sampler_id] = number
        if sampler_id in header["inflight"]:
            run.inflight.append(session)
        service.add_sampler(session)


def _replay(service: Service, run: TrainingRun, requests: Iterable[_LoggedRequest], snapshot: int) -> None:
    """Restore the requests of a run, and start the replay of those after request number ``snapshot``.

    Raises:
        CheckpointError: a request cannot be read. No request is restored.
    """
    ordered = sorted(requests, key=lambda request: request.number)
    has_run = {request.number for request in ordered if request.number <= snapshot or request.result_header.get("never_run")}
    replayed = [_read_again(service, run, request) for request in ordered if request.number not in has_run]
    for logged in ordered:
        if logged.number in has_run:
            request = logged.request()
            service.requests.restore(run.log, request)
            if logged.result is None:
                # This should not happen: results are logged before the snapshot that covers them.
                error = BackendError(f"{request.request_id}: the result was lost in a restart; create a new training client")
                service.requests.settle(request, failure(error))
    for request in replayed:
        service.requests.restore(run.log, request)
        if request.result is None:
            service.sessions[run.session_id].training_tokens += request.num_tokens
    succeeded = [request for request in replayed if request.result is None or not request.result.is_failure]
    published = {
        request.work.publishes for request in succeeded if request.work is not None and request.work.publishes is not None
    }
    service.replayed_samplers |= published

    pause_s = service.attempts.pause_s(request.request_id for request in replayed)

    async def replay() -> None:
        await asyncio.sleep(pause_s)
        # The error of a lane whose session has ended.
        with contextlib.suppress(BackendError):
            await run.replay(replayed)
        for request in replayed:
            service.attempts.forget(request.request_id)
        # If the run failed during the replay, some samplers were not created. Requests to them must now fail, not wait.
        service.replayed_samplers -= published
        service.fail_unfinished_batches(published)

    service.spawn(replay())


def _read_again(service: Service, run: TrainingRun, logged: _LoggedRequest) -> Request:
    """Return a request that is to be replayed. Raises CheckpointError: the request cannot be read."""
    try:
        request = training.read(service, logged.kind, logged.body)
    except (Refused, KeyError) as error:
        # The process that logged the request could read it, so that process ran another version of cookbook.
        raise CheckpointError(
            f"{run.log.folder}: cannot read request {logged.request_id} in the log ({error}); start the server with the "
            "version of cookbook that wrote the log"
        ) from None
    request.result = request.expected = logged.result
    if logged.result is None and (ended := _ended_process(service, logged)) is not None:
        request.work = replace(request.work, begin=functools.partial(_raise, ended)) if request.work else None
    request.metadata.update({key: logged.result_header[key] for key in ("graph", "shape") if key in logged.result_header})
    return request


def _ended_process(service: Service, logged: _LoggedRequest) -> BackendError | None:
    """Return the error of a request that was computed when ``server.max_attempts`` processes ended; None: try it again."""
    count = service.attempts.count(logged.request_id)
    if count < service.config.max_attempts:
        return None
    return BackendError(
        f"{logged.kind}: {count} processes of the server ended while they computed this request or its batch, for example "
        "because memory ran out; send a smaller request, or raise server.max_attempts"
    )


def _check_replay(service: Service, request_ids: Iterable[str]) -> None:
    """Raises CheckpointError: many processes ended while they replayed the same request of a run."""
    for request_id in request_ids:
        if (count := service.attempts.count(request_id)) >= MAX_REPLAYS:
            raise CheckpointError(f"{count} processes of the server ended while they replayed request {request_id}")


def _raise(error: BackendError, _: LocalTrainer) -> NoReturn:
    raise error


# ---- samples ---------------------------------------------------------------------------------------------------------


@dataclass
class _LoggedBatch:
    """Requests that were computed together, or were announced as a batch."""

    count: int
    requests: list[_LoggedRequest] = field(default_factory=list)


def _restore_samples(service: Service, session: Session) -> None:
    """Restore sampling requests. Unsettled ones are computed, with their whole batch, once their sampler is recovered."""
    records = list(session.samples.earlier_records())
    _report_damage(session.samples)
    logged_requests = _logged_requests(records)
    requests = {}
    for request_id, logged in logged_requests.items():
        requests[request_id] = logged.request()
        service.requests.restore(session.samples, requests[request_id])
    # The generator adds requests to batches that it has already yielded, so exhaust it before reading them.
    for sampler_id, batch in list(_batches(records, logged_requests)):
        is_complete = len(batch.requests) == batch.count
        if not is_complete or any(request.result is None for request in batch.requests):
            service.unfinished_batches[sampler_id].append(functools.partial(_compute_batch, service, batch, requests))


def _batches(records: Iterable[Record], requests: Mapping[str, _LoggedRequest]) -> Iterator[tuple[str, _LoggedBatch]]:
    """Yield the batches of each sampler in order; a request without an announced batch is a batch of one."""
    announced: dict[str, _LoggedBatch] = {}
    for record in records:
        if record.kind == "batch":
            sampler_id = record.header["sampler"]
            if (unfinished := announced.get(sampler_id)) is not None:
                # The client retried the announcement, or sent fewer requests than announced. No more requests will arrive.
                unfinished.count = len(unfinished.requests)
            batch = announced[sampler_id] = _LoggedBatch(record.header["count"])
            yield sampler_id, batch
        elif record.kind == "request":
            request = requests[record.header["id"]]
            sampler_id = request.request_id.rpartition("/")[0]
            current = announced.get(sampler_id)
            if current is None or len(current.requests) == current.count:
                yield sampler_id, _LoggedBatch(1, [request])
            else:
                current.requests.append(request)


def _compute_batch(
    service: Service, batch: _LoggedBatch, requests: Mapping[str, Request], sampler: SamplingSession | None
) -> None:
    """Compute a whole batch again: without its settled requests the results of the others could differ in their last bits.

    ``sampler`` None: the sampler could not be recovered, so the unsettled requests fail.
    """
    if sampler is None:
        for logged in batch.requests:
            request = requests[logged.request_id]
            error = RolloutError(f"asample: {request.scope} was not recovered after the restart; create a new sampling client")
            service.requests.settle(request, failure(error))
        return
    pause_s = service.attempts.pause_s(logged.request_id for logged in batch.requests)
    if pause_s:
        service.spawn(_compute_later(service, batch, requests, sampler, pause_s))
    else:
        _compute_now(service, batch, requests, sampler)


async def _compute_later(
    service: Service, batch: _LoggedBatch, requests: Mapping[str, Request], sampler: SamplingSession, pause_s: float
) -> None:
    await asyncio.sleep(pause_s)
    # The client may have ended its session meanwhile.
    if sampler.sampler_id in service.samplers:
        _compute_now(service, batch, requests, sampler)


def _compute_now(service: Service, batch: _LoggedBatch, requests: Mapping[str, Request], sampler: SamplingSession) -> None:
    if batch.count > 1:
        sampling.begin_batch(service, sampler, batch.count)
    for logged in batch.requests:
        fields = parse(SampleBody, logged.body)
        ended = _ended_process(service, logged)
        if ended is not None:
            service.requests.settle(requests[logged.request_id], failure(ended))
        if ended is not None or (logged.result is not None and logged.result.is_failure):
            # The batch has to do without a request that was cancelled, was invalid or ends the process.
            if sampler.batch is not None:
                sampler.batch.add(fields.seq_id, lambda: None)
            continue
        sampling.compute(service, sampler, fields, sampling.prompt_of(service, fields), requests[logged.request_id])
