"""Samplers on a model in this process. Requests are collected, and answered together when somebody waits for one.

Waiting, not time, closes a batch: so what is computed together is a function of the program, and a run repeats bit by bit.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.backends.worker import SAMPLING_REMEDY, Worker, explained
from cookbook.checkpoints import store
from cookbook.engine.engine import Engine
from cookbook.engine.likeliest import likeliest
from cookbook.engine.sampler import Piece, Request, check_prompt, sample, stream
from cookbook.errors import BackendError, RolloutError
from cookbook.futures import Future, LazyFuture
from cookbook.types import Datum, ModelInput, SampleResponse, SamplingParams, as_model_input, as_sampling

VERSIONS = 1000  # of the weights whose requests without a seed are counted: nobody samples from as many at a time


@dataclass(frozen=True)
class _Asked:
    """A prompt to complete (``request``), to score, or both; ``top_k`` of the likeliest tokens at each of its places."""

    prompt: list[int]
    request: Request | None
    score: bool
    top_k: int
    future: LazyFuture[Any]


class SampleQueue:
    """Collects what samplers are asked until :meth:`flush`, and lets the worker answer it version by version."""

    def __init__(self, worker: Worker, max_batch_tokens: int) -> None:
        self.max_batch_tokens = max_batch_tokens
        self._worker = worker
        self._waiting: list[tuple[_Asked, Callable[[], Engine], int]] = []
        self._unseeded: Counter[int] = Counter()  # requests without a seed so far, by step
        self._lock = threading.Lock()  # rollouts may ask from threads of their own

    def add(
        self,
        prompt: list[int],
        request: Request | None,
        engine: Callable[[], Engine],
        step: int,
        *,
        score: bool,
        top_k: int = 0,
    ) -> LazyFuture[Any]:
        asked = _Asked(prompt, request, score, top_k, LazyFuture(self.flush))
        asked.future.answered_by = self._worker.thread
        with self._lock:
            self._waiting.append((asked, engine, step))
        return asked.future

    def number(self, step: int) -> int:
        """A new number, from 1, for every request without a seed, whichever sampler of that step it is made to."""
        with self._lock:
            self._unseeded[step] += 1
            if len(self._unseeded) > VERSIONS:
                del self._unseeded[next(iter(self._unseeded))]
            return self._unseeded[step]

    def flush(self) -> None:
        """Sends everything that waits to the worker, as one job a version of the weights."""
        refused: list[_Asked] = []
        with self._lock:  # until all is sent: what another thread asked for later must not overtake it
            waiting, self._waiting = self._waiting, []
            for engine, step, batch in _by_version(waiting):
                try:
                    self._worker.submit(functools.partial(self._answer, engine, step, batch))
                except BackendError as closed:
                    refused += batch
                    error = closed
        if refused:  # outside the lock: it runs callbacks, and those may ask for more
            _fail(refused, error)

    def stream(self, request: Request, engine: Callable[[], Engine]) -> Iterator[Piece]:
        """Asks at once, after what waits; the pieces come while the worker draws them."""
        self.flush()
        pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        given_up = threading.Event()

        def draw() -> None:
            try:
                for piece in stream(engine().model, request, self.max_batch_tokens):
                    pieces.put(piece)
                    if given_up.is_set():
                        return
            except RuntimeError as error:
                raise explained(error, SAMPLING_REMEDY) from None
            finally:
                pieces.put(None)

        return _pieces(pieces, self._worker.submit(draw), given_up)

    def _answer(self, engine_of: Callable[[], Engine], step: int, batch: list[_Asked]) -> None:
        """Answers ``batch`` together. A bad prompt fails alone."""
        try:
            engine = engine_of()
            batch = [asked for asked in batch if _possible(engine, asked)]
            requests = [asked.request for asked in batch if asked.request is not None]
            sequences = iter(sample(engine.model, requests, step, self.max_batch_tokens))
            logprobs = iter(_prompt_logprobs(engine, [asked.prompt for asked in batch if asked.score]))
            tops = [_likeliest(engine, asked) for asked in batch]
        except BaseException as error:  # noqa: BLE001 - it is raised again where a future is read
            _fail(batch, explained(error, SAMPLING_REMEDY))
            return
        for asked, top in zip(batch, tops, strict=True):
            scored = next(logprobs) if asked.score else None
            asked.future.set_result(scored if asked.request is None else SampleResponse(next(sequences), scored, top))


def _pieces(pieces: queue.SimpleQueue[Piece | None], end: Future[None], given_up: threading.Event) -> Iterator[Piece]:
    if end.answered_by is threading.current_thread():
        raise BackendError("stream: read on the trainer's own thread, which is to draw it; read it from outside")
    try:
        while (piece := pieces.get()) is not None:
            yield piece
    finally:
        given_up.set()
    end.result()


def _by_version(
    waiting: Sequence[tuple[_Asked, Callable[[], Engine], int]],
) -> Iterator[tuple[Callable[[], Engine], int, list[_Asked]]]:
    """What waits, as one batch a version of the weights; from here on its futures need no start."""
    batches: dict[tuple[Callable[[], Engine], int], list[_Asked]] = {}
    for asked, engine, step in waiting:
        asked.future.started()
        batches.setdefault((engine, step), []).append(asked)
    for (engine, step), batch in batches.items():
        yield engine, step, batch


def _possible(engine: Engine, asked: _Asked) -> bool:
    try:
        check_prompt(engine.model, asked.prompt, asked.request.params.max_tokens if asked.request is not None else 0)
        vocabulary = int(engine.model.network.config.get_text_config().vocab_size)
        if not 0 <= asked.top_k <= vocabulary:
            raise RolloutError(f"sample: topk_prompt_logprobs must be 0 to {vocabulary}, the vocabulary, got {asked.top_k}")
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


def _likeliest(engine: Engine, asked: _Asked) -> list[list[tuple[int, float]] | None] | None:
    """Per token of the prompt what could have stood in its place; nothing in the first's."""
    if not asked.top_k:
        return None
    ids, logprobs = likeliest(engine, asked.prompt, asked.top_k)
    return [None, *(list(zip(*row, strict=True)) for row in zip(ids.tolist(), logprobs.tolist(), strict=True))]


class LocalSampler:
    """Samples from one version of the weights. ``engine()`` gives the engine, or raises when that version is gone."""

    def __init__(self, queue: SampleQueue, engine: Callable[[], Engine], step: int, seed: int = 0) -> None:
        self.step = step
        self._queue = queue
        self._engine = engine
        self._seed = seed

    def sample(
        self,
        prompt: Any,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
        *,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> Future[SampleResponse]:
        """``num_samples`` completions. Without a seed in the params, draws differ from call to call, also to another sampler of
        this step, and from step to step; and repeat from run to run.
        """
        request = self._request(prompt, num_samples, sampling_params)
        score, top_k = include_prompt_logprobs, topk_prompt_logprobs
        return self._queue.add(request.prompt, request, self._engine, self.step, score=score, top_k=top_k)

    def stream(self, prompt: Any, num_samples: int = 1, sampling_params: SamplingParams | None = None) -> Iterator[Piece]:
        """What :meth:`sample` would draw, a few tokens at a time. Other calls wait until it is drawn or no longer read."""
        return self._queue.stream(self._request(prompt, num_samples, sampling_params), self._engine)

    def _request(self, prompt: Any, num_samples: int, sampling_params: SamplingParams | None) -> Request:
        if num_samples < 1:
            raise RolloutError(f"sample: num_samples must be at least 1, got {num_samples}")
        params = as_sampling(sampling_params or SamplingParams())
        seed = params.seed
        if seed is None:
            seed = (self._seed * 1_000_003 + self.step) * 1_000_003 + self._queue.number(self.step)
        return Request(as_model_input(prompt).to_ints(), num_samples, params, seed)

    def engine(self) -> Engine:
        """The weights it samples from. Raises RolloutError when they are gone."""
        return self._engine()

    def saving(self) -> Callable[[Path], object]:
        """As :class:`~cookbook.protocols.LaggingSampler` has it."""
        return functools.partial(store.save, self._engine(), state=False)

    def compute_logprobs(self, prompt: Any) -> Future[list[float | None]]:
        """The logprob of every token given those before it, at temperature 1; the first is None."""
        return self._queue.add(as_model_input(prompt).to_ints(), None, self._engine, self.step, score=True)
