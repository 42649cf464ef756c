"""A training run: a trainer, and its requests in the order of their numbers."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from cookbook.backends import worker
from cookbook.backends.local import LocalTrainer
from cookbook.backends.local.sample_queue import LocalSampler
from cookbook.backends.local.shared_calls import PassSharing
from cookbook.backends.worker import Lane
from cookbook.errors import BackendError
from cookbook.futures import call_on, done
from cookbook.server.journal.log import Log
from cookbook.server.state.catalog import RunInfo
from cookbook.server.state.countdown import Countdown
from cookbook.server.state.host import RunGraphs
from cookbook.server.state.requests import Request, RequestStore, Work
from cookbook.server.state.samplers import SamplingSession, trained_bytes
from cookbook.server.wire.encode import StoredResult, failure
from cookbook.types import JsonObject

T = TypeVar("T")


class RequestOrder(Generic[T]):
    """Orders requests by number: request ``n`` is due once ``n - 1`` has been. Clients may send them out of order."""

    def __init__(self) -> None:
        # Number of the request that is due next.
        self.next_number = 1
        self._waiting: dict[int, T] = {}

    def put(self, number: int, request: T) -> list[T]:
        """Add a request, and return all that are due now."""
        self._waiting[number] = request
        due = []
        while self.next_number in self._waiting:
            due.append(self._waiting.pop(self.next_number))
            self.next_number += 1
        return due

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a missing predecessor."""
        return len(self._waiting)

    def take_waiting(self) -> list[T]:
        """Remove and return the requests that wait for a missing predecessor; the caller must fail them."""
        waiting, self._waiting = self._waiting, {}
        return [waiting[number] for number in sorted(waiting)]


# Requests whose failure leaves an incomplete gradient, or drops it.
GRADIENT_KINDS = ("forward_backward", "optim_step")


@dataclass
class TrainingRun:
    """A training run in memory. Its methods run on the event loop; the trainer computes on the worker thread.

    Attributes:
        lane: queue of the trainer's calls on the worker thread.
        inflight: sampling sessions that follow the newest published weights.
        published: number of the request that published the weights of a sampling session, by id of the session.
        on_begin: called with each request after the trainer has queued it.
    """

    info: RunInfo
    session_id: str
    trainer: LocalTrainer
    lane: Lane
    graphs: RunGraphs
    sharing: PassSharing
    requests: RequestStore
    log: Log
    gap_timeout_s: float
    order: RequestOrder[Request] = field(default_factory=RequestOrder)
    last_request: float = field(default_factory=time.time)
    inflight: list[SamplingSession] = field(default_factory=list)
    published: dict[str, int] = field(default_factory=dict)
    on_begin: Callable[[Request], None] = lambda _: None
    # Set if a replayed request gave a different result. Every later request fails with this error.
    _replay_error: BackendError | None = None
    # Errors since the last optimizer step of calls that do not change the gradient, such as saves.
    _side_errors: list[BaseException] = field(default_factory=list)
    # New requests that arrive during a replay; None if no replay is running.
    _postponed: list[Request] | None = None
    # Fires when a missing request has not arrived within ``gap_timeout_s``.
    _gap_timer: Countdown | None = None

    def accept(self, request: Request) -> None:
        """Run the request after all requests with lower numbers."""
        self.last_request = time.time()
        if self._postponed is not None:
            self._postponed.append(request)
        else:
            self._put([request])

    def end(self) -> None:
        """Drop the calls that have not begun. The session of the run has ended or is silent."""
        self.lane.drop()
        if self._gap_timer is not None:
            self._gap_timer.cancel()

    def follow(self, sampler: LocalSampler, number: int) -> None:
        """Move the in-flight sampling sessions to the weights that request ``number`` has published."""
        for session in self.inflight:
            session.sampler, session.num_bytes = sampler, trained_bytes(sampler)
            self.published[session.sampler_id] = number

    async def replay(self, requests: Sequence[Request]) -> None:
        """Run the requests of an earlier process again, in order; new requests wait until all have run."""
        self._postponed = []
        for request in requests:
            for due in self.order.put(request.number, request):
                await self._run(due)
        postponed, self._postponed = self._postponed, None
        self._put(postponed)

    def _put(self, requests: Sequence[Request]) -> None:
        for request in requests:
            for due in self.order.put(request.number, request):
                self._run(due)
        self._reset_gap_timer()

    def _run(self, request: Request) -> asyncio.Future[None]:
        """Queue the request at the trainer. The returned future is done once the trainer has finished the request."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        # Drop the reference to the work: it holds the datums, and the store keeps the request long after it has run.
        work, request.work, expected = request.work, None, request.expected
        assert work is not None
        if expected is not None and work.is_saved is not None and not expected.is_failure:
            # Do not replay a request that only wrote a checkpoint: the checkpoint may have been deleted since.
            ended.set_result(None)
            return ended
        self.graphs.forced = request.metadata.get("graph") if expected is not None else None
        self.sharing.replays = expected is not None
        self.sharing.recorded = request.metadata.get("shape") if expected is not None else None

        def finish(call: Future[Any]) -> None:
            # This runs on the worker thread before the next call, so the decisions read here are those of this call.
            decisions = {"graph": self.graphs.take_decision(), "shape": self.sharing.take_shape()}
            call_on(loop, self._finish, request, work, call, decisions, ended)

        request.start()
        if work.reports_once:
            # Errors of these calls are the results of their requests, and leave the gradient unchanged.
            self.trainer.forget_errors(self._side_errors)
            self._side_errors = []
        with worker.purpose(request.request_id):
            call = self._begin(request, work)
        if request.kind not in GRADIENT_KINDS:
            call.add_done_callback(functools.partial(_collect_error, self._side_errors))
        call.add_done_callback(finish)
        if work.reports_once:
            self.trainer.mark_errors_read()
        self.on_begin(request)
        return ended

    def _begin(self, request: Request, work: Work) -> Future[Any]:
        """Queue the trainer's call. A request that cannot run fails in its turn, after the requests before it."""
        error = self._replay_error or (request.expected.exception() if request.expected is not None else None)
        if error is not None:
            return self.trainer.queue_failure(error, step=request.kind == "optim_step")
        try:
            is_saved = request.is_restored and work.is_saved is not None and work.is_saved()
            return done(None) if is_saved else work.begin(self.trainer)
        except BaseException as failed:  # noqa: BLE001 - reported as the result of the request
            return self.trainer.queue_failure(failed)

    def _finish(
        self, request: Request, work: Work, call: Future[Any], decisions: JsonObject, ended: asyncio.Future[None]
    ) -> None:
        """Settle the request. ``decisions``: what affected the rounding, which a replay repeats; None if it does not apply."""
        error = call.exception()
        try:
            result = work.encode(call.result()) if error is None else failure(error)
        except BaseException as failed:  # noqa: BLE001 - reported as the result; otherwise the request would never be settled
            result = failure(failed)
        if request.expected is not None:
            self._compare(request, request.expected, result)
        else:
            request.metadata.update({key: value for key, value in decisions.items() if value is not None})
            self.requests.settle(request, result)
        ended.set_result(None)

    def _compare(self, request: Request, expected: StoredResult, result: StoredResult) -> None:
        """Fail the run if a replayed request gives a different result from the one that the client may already have."""
        request.expected = None
        if result.body != expected.body and self._replay_error is None:
            self._replay_error = BackendError(
                f"request {request.number} of {self.info.run_id} ({request.kind}) was replayed after a restart and gave a "
                "different result; start the server with the same model, options and versions as before, or create a new "
                "training client from a checkpoint"
            )

    def _reset_gap_timer(self) -> None:
        if self._gap_timer is not None:
            self._gap_timer.cancel()
            self._gap_timer = None
        if self.order.num_waiting:
            self._gap_timer = Countdown(self.gap_timeout_s, self._fail_waiting)

    def _fail_waiting(self) -> None:
        error = BackendError(
            f"request {self.order.next_number} of {self.info.run_id} has not arrived within {self.gap_timeout_s:g} s, and "
            "later requests must not run before it; create a new training client from a checkpoint"
        )
        for request in self.order.take_waiting():
            request.work = None
            request.metadata["never_run"] = True
            self.requests.settle(request, failure(error))


def _collect_error(errors: list[BaseException], call: Future[Any]) -> None:
    """Add the error of a call to ``errors`` if it has failed. Called on the worker thread, before the next call runs."""
    if (error := call.exception()) is not None:
        errors.append(error)
