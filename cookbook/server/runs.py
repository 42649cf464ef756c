"""A training run: a trainer, and the requests of one client in their order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from cookbook.backends.local import LocalTrainer
from cookbook.errors import BackendError
from cookbook.server.catalogue import RunFacts
from cookbook.server.futures import Answer, Answers
from cookbook.server.order import Order
from cookbook.server.results import Result, failure
from cookbook.server.samplers import SamplingSession

Begin = Callable[[LocalTrainer], Future[Any]]
"""Makes the call; it is queued when this returns."""
Encode = Callable[[Any], Result]


@dataclass
class Step:
    """One request of a run, waiting for its turn."""

    run: TrainingRun
    answer: Answer
    begin: Begin
    encode: Encode

    def start(self) -> None:
        self.run.execute(self)


@dataclass
class TrainingRun:
    """Everything here happens on the event loop; the trainer computes on a thread of its own."""

    facts: RunFacts
    session_id: str
    trainer: LocalTrainer
    answers: Answers
    gap_timeout_s: float
    order: Order[Step] = field(default_factory=Order)
    last_request: float = field(default_factory=time.time)
    inflight: list[SamplingSession] = field(default_factory=list)  # they follow what is published, all together
    _alarm: asyncio.TimerHandle | None = None

    def accept(self, number: int, answer: Answer, begin: Begin, encode: Encode) -> None:
        """Runs ``begin`` after all requests of lower numbers; ``encode`` makes the result of what the call returned."""
        self.last_request = time.time()
        self.order.put(number, Step(self, answer, begin, encode))
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self.order.waiting:
            self._alarm = asyncio.get_running_loop().call_later(self.gap_timeout_s, self._give_up)

    def execute(self, step: Step) -> None:
        loop = asyncio.get_running_loop()
        try:
            call = step.begin(self.trainer)
        except BaseException as error:  # noqa: BLE001 - it fails the request, as it would fail the call in this process
            call = self.trainer.refuse(error)
        call.add_done_callback(lambda done: loop.call_soon_threadsafe(self._finish, step, done))

    def _finish(self, step: Step, call: Future[Any]) -> None:
        error = call.exception()
        try:
            result = step.encode(call.result()) if error is None else failure(error)
        except BaseException as broken:  # noqa: BLE001 - a result that cannot be sent is a failed request, not a hanging one
            result = failure(broken)
        self.answers.settle(step.answer, result)

    def _give_up(self) -> None:
        missing = self.order.following
        error = BackendError(
            f"request {missing} of {self.facts.run_id} has not arrived within {self.gap_timeout_s:g} s, and those after it "
            "must not run before it; make a new training client, from a checkpoint"
        )
        for step in self.order.give_up():
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
