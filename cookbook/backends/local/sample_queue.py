"""Samplers on a model in this process. Requests are queued, and computed as one batch when the caller waits for one of them.

The caller closes a batch, not a timer. So the batches depend on the program only, not on timing, and a run is reproducible bit
for bit.
"""

from __future__ import annotations

import functools
import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cookbook.backends.worker import SAMPLING_REMEDY, Lane, with_remedy
from cookbook.checkpoints import store
from cookbook.engine.batch.plan import MOST_COPIES
from cookbook.engine.decoding.decoder import PREFILL_TOKENS, ROUND_TOKENS, SlicedSampling, prefill_parts, stream
from cookbook.engine.decoding.requests import SampleRequest, TokenChunk, check_prompt
from cookbook.engine.engine import Engine
from cookbook.engine.parallel import Ranks, led
from cookbook.engine.ranks.commands import PerRank
from cookbook.errors import BackendError, RolloutError
from cookbook.futures import Future, LazyFuture
from cookbook.types import (
    Datum,
    ModelInput,
    Prompt,
    Sample,
    SampleResponse,
    SamplingParams,
    as_model_input,
    as_sampling,
    request_seed,
)

SHARDED = (
    "sampling: weights that are sharded over ranks would be gathered for every token; sample from vLLM (deployment=vllm), or "
    "set backend.shard=none"
)
STOPPED = "sample: stopped on request"
T = TypeVar("T")
# Limit on the versions of the weights for which requests without a seed are counted. Far fewer are sampled from at a time.
MAX_VERSIONS = 1000


class SampleFuture(LazyFuture[T]):
    """The result of a queued request. :meth:`stop` ends its computation early, with an error as the result.

    Attributes:
        on_tokens: called on the worker's thread with the newest tokens of the samples while others follow. The result contains
            all tokens.
    """

    is_stopped = False
    on_tokens: Callable[[list[TokenChunk]], None] | None = None

    def stop(self) -> None:
        """Stop at the next step of decoding, or if other requests share the batch, at the end of the round."""
        self.is_stopped = True


@dataclass(frozen=True)
class _PendingSample:
    """A queued request to complete a prompt, to compute its logprobs, or both.

    Attributes:
        engine: returns the engine with the weights after ``step`` steps, or raises once these weights no longer exist.
        request: the completions to draw; None: none.
        score: whether to compute the logprobs of the prompt.
        top_k: number of most likely tokens to return for each prompt position.
    """

    engine: Callable[[], Engine]
    step: int
    prompt: list[int]
    request: SampleRequest | None
    score: bool
    top_k: int
    future: SampleFuture[Any]


class SampleQueue:
    """Queues the requests of samplers until :meth:`flush`. The worker then computes one batch per version of the weights."""

    def __init__(self, worker: Lane, max_batch_tokens: int) -> None:
        self.max_batch_tokens = max_batch_tokens
        self._worker = worker
        # Requests that have not been sent to the worker yet. flush() empties the list only after all are sent, so that callers
        # may check it without the lock.
        self.waiting: list[_PendingSample] = []
        # Number of requests without a seed so far, by step; the step that was used last is the last one.
        self._unseeded: dict[int, int] = {}
        # The batch that has begun, as long as it is in memory.
        self._begun: Callable[[], RankSampling | None] = lambda: None
        # Rollouts may sample from several threads.
        self._lock = threading.Lock()

    @property
    def num_drawn(self) -> int:
        """Tokens of the batch that has begun, which are in memory. Of several ranks, those of the first."""
        begun = self._begun()
        return 0 if begun is None else begun.num_drawn

    def add(
        self,
        engine: Callable[[], Engine],
        step: int,
        prompt: list[int],
        request: SampleRequest | None = None,
        *,
        score: bool = True,
        top_k: int = 0,
    ) -> SampleFuture[Any]:
        future: SampleFuture[Any] = SampleFuture(self.flush)
        future.answered_by = self._worker.thread
        with self._lock:
            self.waiting.append(_PendingSample(engine, step, prompt, request, score, top_k, future))
        return future

    def next_number(self, step: int) -> int:
        """Return the number, from 1, of the next request without a seed among all samplers of that step."""
        with self._lock:
            # The last entry is the step that was used last. A step that is dropped too early would repeat its seeds.
            number = self._unseeded[step] = self._unseeded.pop(step, 0) + 1
            if len(self._unseeded) > MAX_VERSIONS:
                del self._unseeded[next(iter(self._unseeded))]
            return number

    def flush(self) -> None:
        """Send all queued requests to the worker, one job per version of the weights."""
        refused: list[_PendingSample] = []
        sent: list[tuple[Future[None], list[_PendingSample]]] = []
        # Hold the lock until all are sent, so that later requests of another thread do not overtake them.
        with self._lock:
            batches: dict[tuple[Callable[[], Engine], int], list[_PendingSample]] = {}
            for pending in self.waiting:
                pending.future.started()
                batches.setdefault((pending.engine, pending.step), []).append(pending)
            for (engine, step), batch in batches.items():
                try:
                    sent.append((self._worker.submit_steps(functools.partial(self._compute, engine, step, batch)), batch))
                except BackendError as closed:
                    refused += batch
                    error = closed
            self.waiting = []
        # Release the lock first: this runs callbacks, which may add requests.
        for computed, batch in sent:
            computed.add_done_callback(functools.partial(_fail_dropped, batch))
        if refused:
            _fail(refused, error)

    def stream(self, request: SampleRequest, engine: Callable[[], Engine]) -> Iterator[TokenChunk]:
        """Draw samples after all queued requests, and yield their tokens in chunks while the worker draws them."""
        self.flush()
        chunks: queue.SimpleQueue[TokenChunk | None] = queue.SimpleQueue()
        cancelled = threading.Event()

        def draw() -> None:
            try:
                current = engine()
                for chunk in stream(current.model, request, self.max_batch_tokens, current.sampler_pass):
                    chunks.put(chunk)
                    if cancelled.is_set():
                        return
            except RuntimeError as error:
                raise with_remedy(error, SAMPLING_REMEDY) from None
            finally:
                chunks.put(None)

        return _read_chunks(chunks, self._worker.submit(draw), cancelled)

    def _compute(self, engine_of: Callable[[], Engine], step: int, batch: list[_PendingSample]) -> Generator[None, None, None]:
        """Compute ``batch``, with a pause after every step. An invalid request fails alone, and so does a stopped one."""
        try:
            engine = engine_of()
            # A request that failed alone has its error already if the batch starts again.
            batch = [pending for pending in batch if not pending.future.done()]
            batch = _reject_invalid(engine, _fail_stopped(batch))
            draws = [pending for pending in batch if pending.request is not None]
            samples = yield from self._sampled(engine, draws, step)
            batch = _fail_stopped(batch)
            logprobs = yield from self._scored(engine, [pending for pending in batch if pending.score])
            batch = [pending for pending in batch if not pending.future.done()]
            topks = {}
            for pending in batch:
                # Only a request that still computes gets its likely tokens; a stopped request fails in this pause.
                if _fail_stopped([pending]):
                    topks[id(pending)] = _prompt_topk(engine, pending)
                    yield
            batch = [pending for pending in batch if id(pending) in topks]
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - raised again when the caller reads a future
            _fail(batch, with_remedy(error, SAMPLING_REMEDY))
            return
        for pending in batch:
            scores = logprobs[id(pending)] if pending.score else None
            sequences = samples[id(pending)] if pending.request is not None else None
            topk = topks[id(pending)]
            pending.future.set_result(scores if sequences is None else SampleResponse(sequences, scores, topk))

    def _sampled(
        self, engine: Engine, batch: list[_PendingSample], step: int
    ) -> Generator[None, None, dict[int, list[Sample]]]:
        """Draw all requests. Returns the samples by the id of the pending request."""
        requests = [pending.request for pending in batch if pending.request is not None]
        if not requests:
            return {}
        sampling = _begin(engine, requests, step, self.max_batch_tokens)
        self._begun = weakref.ref(sampling)
        # Several ranks agree about every slice, which takes longer than a step of a small model.
        steps = 1 if engine.ranks.size == 1 else ROUND_TOKENS
        running = set(range(len(batch)))
        watched = {index: [0] * request.num_samples for index, request in enumerate(requests) if batch[index].future.on_tokens}
        while running and sampling.advance(steps):
            yield
            if watched:
                _report_tokens(batch, sampling.samples(), watched)
            if stopped := [index for index in running if batch[index].future.is_stopped]:
                running.difference_update(stopped)
                sampling.drop(stopped)
        samples = sampling.samples() if running else [[] for _ in batch]
        return {id(pending): sequences for pending, sequences in zip(batch, samples, strict=True)}

    def _scored(self, engine: Engine, scored: list[_PendingSample]) -> Generator[None, None, dict[int, list[float | None]]]:
        """Compute the logprobs of the prompts, by the id of the pending request. Pauses between parts of the prompts.

        A request that is stopped in a pause gets its error.
        """
        logprobs: dict[int, list[float | None]] = {}
        waiting = scored
        while waiting := _fail_stopped(waiting):
            # One part for each rank.
            parts = itertools.islice(prefill_parts([pending.prompt for pending in waiting]), engine.ranks.size)
            part = waiting[: max(span.stop for span in parts)]
            # Equal prompts are computed once, but each has logprobs of its own.
            ends = itertools.accumulate(len(pending.prompt) for pending in part)
            part = part[: max(1, sum(end <= MOST_COPIES * PREFILL_TOKENS for end in ends))]
            prompts = [pending.prompt for pending in part]
            results = yield from self._worker.steps(functools.partial(_prompt_logprobs, engine, prompts))
            logprobs |= zip(map(id, part), results, strict=True)
            waiting = waiting[len(part) :]
            yield
        return logprobs


class RankSampling(PerRank):
    """This rank's part of a batch. Ranks that hold the whole model share the requests."""

    def __init__(self, engine: Engine, requests: Sequence[SampleRequest], step: int, max_batch_tokens: int) -> None:
        self.ranks: Ranks = engine.ranks
        self._count = len(requests)
        own = requests[self.ranks.rank :: self.ranks.size]
        self._own = SlicedSampling(engine.model, own, step, max_batch_tokens, engine.sampler_pass)

    @property
    def num_drawn(self) -> int:
        """Tokens that this rank has drawn."""
        return self._own.num_drawn

    @led
    def advance(self, steps: int) -> bool:
        """Compute the next ``steps`` steps. Return whether more follow on any rank."""
        return any(self.ranks.gathered(self.ranks.together(lambda: self._own.advance(steps))))

    @led
    def drop(self, requests: Sequence[int]) -> None:
        """Stop the samples of ``requests``."""
        rank, size = self.ranks.rank, self.ranks.size
        self._own.drop(number // size for number in requests if number % size == rank)

    @led
    def samples(self) -> list[list[Sample]]:
        """Return the samples of all requests."""
        parts = self.ranks.gathered(self._own.samples())
        return [parts[number % self.ranks.size][number // self.ranks.size] for number in range(self._count)]


@led
def _begin(engine: Engine, requests: Sequence[SampleRequest], step: int, max_batch_tokens: int) -> RankSampling:
    """Begin a batch on every rank; each decodes ``max_batch_tokens`` at a time."""
    return RankSampling(engine, requests, step, max_batch_tokens)


def _read_chunks(
    chunks: queue.SimpleQueue[TokenChunk | None], end: Future[None], cancelled: threading.Event
) -> Iterator[TokenChunk]:
    if end.answered_by is threading.current_thread():
        raise BackendError("stream: deadlock: the trainer's thread reads a stream that it must fill; read it on another thread")
    try:
        while (chunk := chunks.get()) is not None:
            yield chunk
    finally:
        cancelled.set()
    end.result()


def _report_tokens(requests: Sequence[_PendingSample], samples: list[list[Sample]], sent: dict[int, list[int]]) -> None:
    """Report the newest tokens of the requests in ``sent``, which contains the number of reported tokens of each sample."""
    for index, counts in sent.items():
        chunks = []
        for number, sample in enumerate(samples[index]):
            start, counts[number] = counts[number], len(sample.tokens)
            if start < counts[number]:
                chunks.append(TokenChunk(number, sample.tokens[start:], sample.logprobs[start:], None))
        if chunks and (on_tokens := requests[index].future.on_tokens) is not None:
            on_tokens(chunks)


def _fail_stopped(batch: Sequence[_PendingSample]) -> list[_PendingSample]:
    """Set the error of the requests that are stopped, and return the others."""
    for pending in batch:
        if pending.future.is_stopped and not pending.future.done():
            pending.future.set_exception(RolloutError(STOPPED))
    return [pending for pending in batch if not pending.future.done()]


def _reject_invalid(engine: Engine, batch: Sequence[_PendingSample]) -> list[_PendingSample]:
    """Set the error of the requests that the model cannot compute, and return the others."""
    valid = []
    for pending in batch:
        try:
            _check(engine, pending)
            valid.append(pending)
        except RolloutError as error:
            pending.future.set_exception(error)
    return valid


def _check(engine: Engine, pending: _PendingSample) -> None:
    """Raise RolloutError: the prompt is too long or has unknown tokens, or ``top_k`` is larger than the vocabulary."""
    check_prompt(engine.model, pending.prompt, pending.request.params.max_tokens if pending.request is not None else 0)
    vocabulary = int(engine.model.network.config.get_text_config().vocab_size)
    if not 0 <= pending.top_k <= vocabulary:
        raise RolloutError(
            f"sample: topk_prompt_logprobs: expected 0 to {vocabulary} (the vocabulary size), got {pending.top_k}"
        )


def _fail_dropped(batch: Sequence[_PendingSample], computed: Future[None]) -> None:
    """Fail ``batch`` if its job was dropped; :meth:`SampleQueue._compute` handles all other errors."""
    if (error := computed.failure()) is not None:
        _fail(batch, error)


def _fail(batch: Sequence[_PendingSample], error: BaseException) -> None:
    for pending in batch:
        if not pending.future.done():
            pending.future.set_exception(error)


def _prompt_logprobs(engine: Engine, prompts: Sequence[list[int]]) -> list[list[float | None]]:
    """Compute, per prompt, the logprob of every token given the tokens before it; the first is None."""
    # A prompt of one token has no logprobs to compute.
    longer = [prompt for prompt in prompts if len(prompt) > 1]
    data = [Datum(ModelInput.from_ints(prompt[:-1]), {"target_tokens": prompt[1:]}) for prompt in longer]
    outputs = iter(engine.forward(data).loss_fn_outputs if data else [])
    return [[None, *next(outputs)["logprobs"].tolist()] if len(prompt) > 1 else [None] for prompt in prompts]


def _prompt_topk(engine: Engine, pending: _PendingSample) -> list[list[tuple[int, float]] | None] | None:
    """Compute the most likely tokens and their logprobs for each prompt position; the first position has none."""
    if not pending.top_k:
        return None
    ids, logprobs = engine.passes.top_logprobs(pending.prompt, pending.top_k)
    return [None, *(list(zip(*row, strict=True)) for row in zip(ids.tolist(), logprobs.tolist(), strict=True))]


class LocalSampler:
    """Sampler on one version of the weights. ``engine()`` raises RolloutError once these weights no longer exist."""

    def __init__(self, queue: SampleQueue, engine: Callable[[], Engine], step: int, seed: int = 0) -> None:
        self.step = step
        self.engine = engine
        self._queue = queue
        self._seed = seed

    def sample(
        self,
        prompt: Prompt,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
        *,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> SampleFuture[SampleResponse]:
        """Draw ``num_samples`` completions.

        Without a seed in ``sampling_params``, each call gets its own seed, which depends on the seed of the run, the step and
        the number of calls so far. So draws differ between calls and between steps, and are the same in every run.
        """
        request = self._request(prompt, num_samples, sampling_params)
        score, top_k = include_prompt_logprobs, topk_prompt_logprobs
        return self._queue.add(self.engine, self.step, request.prompt, request, score=score, top_k=top_k)

    def stream(
        self, prompt: Prompt, num_samples: int = 1, sampling_params: SamplingParams | None = None
    ) -> Iterator[TokenChunk]:
        """Yield the completions of :meth:`sample` in chunks of tokens. Other calls wait until the stream ends or is closed."""
        return self._queue.stream(self._request(prompt, num_samples, sampling_params), self.engine)

    def _request(self, prompt: Prompt, num_samples: int, sampling_params: SamplingParams | None) -> SampleRequest:
        if num_samples < 1:
            raise RolloutError(f"sample: num_samples must be at least 1, got {num_samples}")
        params = as_sampling(sampling_params or SamplingParams())
        seed = params.seed
        if seed is None:
            seed = request_seed(self._seed, self.step, self._queue.next_number(self.step))
        return SampleRequest(as_model_input(prompt).to_ints(), num_samples, params, seed)

    def on(self, queue: SampleQueue) -> LocalSampler:
        """Return a sampler on the same weights whose requests go to ``queue``."""
        return LocalSampler(queue, self.engine, self.step, self._seed)

    def saving(self) -> Callable[[Path], object]:
        """Return a function that writes the weights as a checkpoint; see :class:`~cookbook.protocols.LaggingSampler`."""
        return functools.partial(store.save, self.engine(), state=False)

    def compute_logprobs(self, prompt: Prompt) -> SampleFuture[list[float | None]]:
        """Compute the logprob of every token given the tokens before it, at temperature 1; the first is None."""
        return self._queue.add(self.engine, self.step, as_model_input(prompt).to_ints())
