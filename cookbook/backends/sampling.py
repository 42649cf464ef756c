"""Samplers on a model in this process. Requests are collected, and answered together when somebody waits for one.

Waiting, not time, closes a batch: so what is computed together is a function of the program, and a run repeats bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from cookbook.backends.worker import Worker
from cookbook.engine.model import LanguageModel
from cookbook.engine.sampler import Request, sample
from cookbook.errors import RolloutError
from cookbook.futures import Future
from cookbook.types import ModelInput, SampleResponse, SamplingParams, as_model_input, as_sampling


class LazyFuture(Future[SampleResponse]):
    """A future whose work starts when it is first waited for."""

    def __init__(self, start: Callable[[], None]) -> None:
        super().__init__()
        self._start = start

    def result(self, timeout: float | None = None) -> SampleResponse:
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

    def __await__(self) -> Generator[Any, None, SampleResponse]:
        self._start()
        return super().__await__()


class SampleQueue:
    """Requests that wait for their batch to be closed."""

    def __init__(self, worker: Worker, max_batch_tokens: int) -> None:
        self._worker = worker
        self.max_batch_tokens = max_batch_tokens
        self._waiting: list[tuple[Request, LazyFuture, Callable[[], LanguageModel], int]] = []

    def add(self, request: Request, model: Callable[[], LanguageModel], step: int) -> LazyFuture:
        future = LazyFuture(self.flush)
        self._waiting.append((request, future, model, step))
        return future

    def flush(self) -> None:
        """Sends everything that waits to the worker, as one job a version of the weights."""
        waiting, self._waiting = self._waiting, []
        by_version: dict[tuple[Callable[[], LanguageModel], int], list[tuple[Request, LazyFuture]]] = {}
        for request, future, model, step in waiting:
            by_version.setdefault((model, step), []).append((request, future))
        for (model, step), entries in by_version.items():
            self._worker.submit(lambda model=model, step=step, entries=entries: self._answer(model, step, entries))  # type: ignore[misc]

    def _answer(self, model: Callable[[], LanguageModel], step: int, entries: list[tuple[Request, LazyFuture]]) -> None:
        try:
            answers = sample(model(), [request for request, _ in entries], step, self.max_batch_tokens)
        except BaseException as error:  # noqa: BLE001 - it is raised again where a future is read
            for _, future in entries:
                future.set_exception(error)
            return
        for (_, future), sequences in zip(entries, answers, strict=True):
            future.set_result(SampleResponse(sequences))


class LocalSampler:
    """Samples from one version of the weights. ``model()`` gives the model, or raises when that version is gone."""

    def __init__(
        self,
        queue: SampleQueue,
        model: Callable[[], LanguageModel],
        step: int,
        score: Callable[[ModelInput], Future[list[float | None]]],
        seed: int = 0,
    ) -> None:
        self.step = step
        self._queue = queue
        self._model = model
        self._score = score
        self._seed = seed
        self._asked = 0

    def sample(
        self, prompt: Any, num_samples: int = 1, sampling_params: SamplingParams | None = None
    ) -> Future[SampleResponse]:
        """``num_samples`` completions. Without a seed in the params, draws differ from call to call and repeat from run to run."""
        if num_samples < 1:
            raise RolloutError(f"sample: num_samples must be at least 1, got {num_samples}")
        params = as_sampling(sampling_params or SamplingParams())
        self._asked += 1
        seed = self._seed * 1_000_003 + self._asked if params.seed is None else params.seed
        request = Request(as_model_input(prompt).to_ints(), num_samples, params, seed)
        return self._queue.add(request, self._model, self.step)

    def compute_logprobs(self, prompt: Any) -> Future[list[float | None]]:
        return self._score(as_model_input(prompt))
