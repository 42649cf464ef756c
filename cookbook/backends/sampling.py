"""Samplers on a model in this process. Requests are collected, and answered together when somebody waits for one.

Waiting, not time, closes a batch: so what is computed together is a function of the program, and a run repeats bit by bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from cookbook.backends.worker import Worker, explained
from cookbook.engine.engine import Engine
from cookbook.engine.sampler import Request, check_prompt, sample
from cookbook.errors import BackendError, RolloutError
from cookbook.futures import Future
from cookbook.types import Datum, ModelInput, SampleResponse, SamplingParams, as_model_input, as_sampling

T = TypeVar("T")


class LazyFuture(Future[T]):
    """A future whose work starts when it is first waited for: by ``result``, ``await``, ``done`` or a callback.

    ``concurrent.futures.wait`` and ``as_completed`` do none of these; ask for the results one by one.
    """

    def __init__(self, start: Callable[[], None]) -> None:
        super().__init__()
        self._start = start

    def result(self, timeout: float | None = None) -> T:
        self._start()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._start()
        return super().exception(timeout)

    def done(self) -> bool:
        self._start()
        return super().done()

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        self._start()
        super().add_done_callback(fn)

    def __await__(self) -> Generator[Any, None, T]:
        self._start()
        return super().__await__()


@dataclass(frozen=True)
class _Asked:
    """A prompt to complete (``request``), to score, or both."""

    prompt: list[int]
    request: Request | None
    score: bool
    future: LazyFuture[Any]


class SampleQueue:
    """Collects what samplers are asked until :meth:`flush`, and lets the worker answer it version by version."""

    def __init__(self, worker: Worker, max_batch_tokens: int) -> None:
        self.max_batch_tokens = max_batch_tokens
        self._worker = worker
        self._waiting: list[tuple[_Asked, Callable[[], Engine], int]] = []
        self._lock = threading.Lock()  # rollouts may ask from threads of their own

    def add(
        self, prompt: list[int], request: Request | None, engine: Callable[[], Engine], step: int, *, score: bool
    ) -> LazyFuture[Any]:
        asked = _Asked(prompt, request, score, LazyFuture(self.flush))
        with self._lock:
            self._waiting.append((asked, engine, step))
        return asked.future

    def flush(self) -> None:
        """Sends everything that waits to the worker, as one job a version of the weights."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        by_version: dict[tuple[Callable[[], Engine], int], list[_Asked]] = {}
        for asked, engine, step in waiting:
            by_version.setdefault((engine, step), []).append(asked)
        for (engine, step), batch in by_version.items():
            try:
                self._worker.submit(lambda engine=engine, step=step, batch=batch: self._answer(engine, step, batch))  # type: ignore[misc]
            except BackendError as error:  # the trainer is closed
                _fail(batch, error)

    def _answer(self, engine_of: Callable[[], Engine], step: int, batch: list[_Asked]) -> None:
        """Answers ``batch`` together. A bad prompt fails alone."""
        try:
            engine = engine_of()
            batch = [asked for asked in batch if _possible(engine, asked)]
            requests = [asked.request for asked in batch if asked.request is not None]
            sequences = iter(sample(engine.model, requests, step, self.max_batch_tokens))
            logprobs = iter(_prompt_logprobs(engine, [asked.prompt for asked in batch if asked.score]))
        except BaseException as error:  # noqa: BLE001 - it is raised again where a future is read
            _fail(batch, explained(error))
            return
        for asked in batch:
            scored = next(logprobs) if asked.score else None
            asked.future.set_result(scored if asked.request is None else SampleResponse(next(sequences), scored))


def _possible(engine: Engine, asked: _Asked) -> bool:
    try:
        check_prompt(engine.model, asked.prompt, asked.request.params.max_tokens if asked.request is not None else 0)
    except RolloutError as error:
        asked.future.set_exception(error)
        return False
    return True


def _fail(batch: Sequence[_Asked], error: BaseException) -> None:
    for asked in batch:
        asked.future.set_exception(error)


def _prompt_logprobs(engine: Engine, prompts: Sequence[list[int]]) -> list[list[float | None]]:
    """Per prompt the logprob of every token given those before it; the first has none."""
    longer = [prompt for prompt in prompts if len(prompt) > 1]
    data = [Datum(ModelInput.from_ints(prompt[:-1]), {"target_tokens": prompt[1:]}) for prompt in longer]
    scored = iter(engine.forward(data).loss_fn_outputs if data else [])
    return [[None, *next(scored)["logprobs"].tolist()] if len(prompt) > 1 else [None] for prompt in prompts]


class LocalSampler:
    """Samples from one version of the weights. ``engine()`` gives the engine, or raises when that version is gone."""

    def __init__(self, queue: SampleQueue, engine: Callable[[], Engine], step: int, seed: int = 0) -> None:
        self.step = step
        self._queue = queue
        self._engine = engine
        self._seed = seed
        self._asked = 0

    def sample(
        self,
        prompt: Any,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
        *,
        include_prompt_logprobs: bool = False,
    ) -> Future[SampleResponse]:
        """``num_samples`` completions. Without a seed in the params, draws differ from call to call and from step to step,
        and repeat from run to run.
        """
        if num_samples < 1:
            raise RolloutError(f"sample: num_samples must be at least 1, got {num_samples}")
        params = as_sampling(sampling_params or SamplingParams())
        self._asked += 1
        seed = (self._seed * 1_000_003 + self.step) * 1_000_003 + self._asked if params.seed is None else params.seed
        tokens = as_model_input(prompt).to_ints()
        request = Request(tokens, num_samples, params, seed)
        return self._queue.add(tokens, request, self._engine, self.step, score=include_prompt_logprobs)

    def compute_logprobs(self, prompt: Any) -> Future[list[float | None]]:
        """The logprob of every token given those before it, at temperature 1; the first is None."""
        return self._queue.add(as_model_input(prompt).to_ints(), None, self._engine, self.step, score=True)
