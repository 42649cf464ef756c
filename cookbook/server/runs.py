"""A training run: a trainer, and the requests of one client in their order."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from cookbook.backends.local import LocalTrainer
from cookbook.backends.sampling import LocalSampler
from cookbook.errors import BackendError, CookbookError
from cookbook.futures import done
from cookbook.server.catalogue import RunFacts
from cookbook.server.futures import Answer, Answers
from cookbook.server.live import own_bytes
from cookbook.server.log import Log
from cookbook.server.order import Order
from cookbook.server.results import Result, failure
from cookbook.server.run_graphs import RunGraphs
from cookbook.server.samplers import SamplingSession

Begin = Callable[[LocalTrainer], Future[Any]]
"""Makes the call; it is queued when this returns."""
Encode = Callable[[Any], Result]


@dataclass(frozen=True)
class Request:
    """One request of a run: how it is begun, and how its answer is written.

    ``is_saved``, of one that writes a checkpoint and changes nothing else: whether it is there, made for this very request by
    a process that could not say so any more. ``publishes``: the sampling session it makes. ``reports_once``, of an optimizer
    step: the errors before it, and its own, fail no later step.
    """

    run_id: str
    number: int
    kind: str
    begin: Begin
    encode: Encode
    is_saved: Callable[[], bool] | None = None
    publishes: str | None = None
    reports_once: bool = False


@dataclass(frozen=True)
class Recorded:
    """What came of a request in an earlier process. ``graph``: whether a forward pass was kept, or gone on from."""

    result: Result
    graph: bool | None = None

    def error(self) -> CookbookError | None:
        """The error it failed with, as far as the client, and the step after it, can tell."""
        if not self.result.is_failure:
            return None
        kind = CookbookError if json.loads(self.result.body)["category"] == "user" else BackendError
        return kind(self.result.error)


@dataclass
class Step:
    """A request, waiting for its turn. ``again``: an earlier process may have run it; ``recorded``, it has."""

    run: TrainingRun
    answer: Answer
    request: Request
    again: bool = False
    recorded: Recorded | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self) -> None:
        self.run.execute(self)


@dataclass
class TrainingRun:
    """Everything here happens on the event loop; the trainer computes on a thread of its own."""

    facts: RunFacts
    session_id: str
    trainer: LocalTrainer
    graphs: RunGraphs
    answers: Answers
    log: Log
    gap_timeout_s: float
    order: Order[Step] = field(default_factory=Order)
    last_request: float = field(default_factory=time.time)
    inflight: list[SamplingSession] = field(default_factory=list)  # they follow what is published, all together
    published: dict[str, int] = field(default_factory=dict)  # by sampling session, the request whose weights it has
    begun: Callable[[Request], None] = lambda _: None  # told of each request that the trainer has got
    _broken: BackendError | None = None
    _arrived: list[Step] | None = None  # while earlier ones are replayed
    _alarm: asyncio.TimerHandle | None = None

    def accept(self, answer: Answer, request: Request) -> None:
        """Runs it after all requests of lower numbers."""
        self.last_request = time.time()
        step = Step(self, answer, request)
        if self._arrived is not None:
            self._arrived.append(step)
        else:
            self._put(step)

    def follow(self, sampler: LocalSampler, number: int) -> None:
        """All that are in flight sample from what request ``number`` has published."""
        for session in self.inflight:
            session.sampler, session.num_bytes = sampler, own_bytes(sampler)
            self.published[session.sampler_id] = number

    async def replay(self, steps: Sequence[Step]) -> None:
        """Repeats what an earlier process has accepted, one after another; what arrives meanwhile waits."""
        self._arrived = []
        for step in steps:
            self.order.put(step.request.number, step)
            if step.request.number < self.order.following:  # not where one before it is missing
                await step.ended.wait()
        arrived, self._arrived = self._arrived, None
        for step in arrived:
            self._put(step)
        self._watch_gap()

    def execute(self, step: Step) -> None:
        if step.recorded is not None and step.request.is_saved is not None and not step.recorded.result.is_failure:
            step.ended.set()  # it changed nothing but the disk, and what it wrote may be deleted by now
            return
        loop = asyncio.get_running_loop()
        self.graphs.forced = step.recorded.graph if step.recorded is not None else None

        def tell(call: Future[Any]) -> None:  # on the trainer's thread, before its next call
            loop.call_soon_threadsafe(self._finish, step, call, self.graphs.decided())

        self._begin(step).add_done_callback(tell)
        if step.request.reports_once:
            self.trainer.forgive()
        self.begun(step.request)

    def _begin(self, step: Step) -> Future[Any]:
        """Fails in its turn, as the call in this process would, what cannot even be made."""
        error = self._broken or (step.recorded.error() if step.recorded is not None else None)
        if error is not None:
            return self.trainer.refuse(error, step=step.request.kind == "optim_step")
        try:
            request = step.request
            is_saved = step.again and request.is_saved is not None and request.is_saved()
            return done(None) if is_saved else request.begin(self.trainer)
        except BaseException as refused:  # noqa: BLE001 - it fails the request
            return self.trainer.refuse(refused)

    def _put(self, step: Step) -> None:
        self.order.put(step.request.number, step)
        self._watch_gap()

    def _watch_gap(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self.order.waiting:
            self._alarm = asyncio.get_running_loop().call_later(self.gap_timeout_s, self._give_up)

    def _finish(self, step: Step, call: Future[Any], graph: bool | None) -> None:
        error = call.exception()
        try:
            result = step.request.encode(call.result()) if error is None else failure(error)
        except BaseException as broken:  # noqa: BLE001 - a result that cannot be sent is a failed request, not a hanging one
            result = failure(broken)
        if step.recorded is not None:
            self._compare(step, result)
        else:
            if graph is not None:
                step.answer.facts["graph"] = graph
            self.answers.settle(step.answer, result)
        step.ended.set()

    def _compare(self, step: Step, result: Result) -> None:
        """A client has this answer already: another one now would mean that its run is no longer the one it knows."""
        assert step.recorded is not None
        if result.body != step.recorded.result.body and self._broken is None:
            self._broken = BackendError(
                f"request {step.request.number} of {self.facts.run_id} ({step.request.kind}) was repeated after a restart and "
                "gave another result; start the server with the model, options and versions it had, or make a new training "
                "client from a checkpoint"
            )

    def _give_up(self) -> None:
        missing = self.order.following
        error = BackendError(
            f"request {missing} of {self.facts.run_id} has not arrived within {self.gap_timeout_s:g} s, and those after it "
            "must not run before it; make a new training client, from a checkpoint"
        )
        for step in self.order.give_up():
            step.answer.facts["never_run"] = True
            self.answers.settle(step.answer, failure(error))

    def info(self, *, architecture: str, tokenizer: str) -> Mapping[str, Any]:
        """What ``get_info`` answers."""
        facts = self.facts
        return {
            "type": "get_info",
            "model_data": {"arch": architecture, "model_name": facts.base_model, "tokenizer_id": tokenizer},
            "model_id": facts.run_id,
            "model_name": facts.base_model,
            "is_lora": facts.is_lora,
            "lora_rank": facts.lora_rank,
        }
