"""Sampler on a server.

Requests are queued until the caller waits for one of them, and then sent as one batch. The client announces the size of the
batch, so that the server computes it as a whole. So the batches depend on the program only, not on timing, and a run is
reproducible bit for bit.
"""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from cookbook.backends.remote import convert
from cookbook.backends.remote.connection import ClientCall, Connection
from cookbook.errors import RolloutError
from cookbook.futures import Future, LazyFuture
from cookbook.types import Prompt, Sample, SampleResponse, SamplingParams, as_model_input, as_sampling

if TYPE_CHECKING:
    import tinker

R = TypeVar("R")
T = TypeVar("T")

# Limit on the requests of an announced batch. The client package allows 2000 pending requests; a larger batch would never be
# complete.
MAX_BATCH = 1000


@dataclass(frozen=True)
class _PendingRequest:
    """A queued request. ``send`` sends it; ``started`` and ``settle`` update its future."""

    send: Callable[[], ClientCall[Any]]
    started: Callable[[], None]
    settle: Callable[[concurrent.futures.Future[Any]], None]


@dataclass(eq=False)
class RemoteSampler:
    """A :class:`~cookbook.protocols.Sampler` on a sampling client of the package ``tinker``.

    Args:
        seeds: returns the seed of the next request without one, given the step.
        path: address of the checkpoint with the weights; None if they are not saved.
        check: raises RolloutError if the server now samples from newer weights than those of ``step``.
    """

    connection: Connection
    client: tinker.SamplingClient
    step: int
    seeds: Callable[[int], int]
    path: str | None = None
    check: Callable[[], None] = lambda: None
    _lock: AbstractContextManager[bool] = field(default_factory=threading.RLock, init=False)
    _waiting: list[_PendingRequest] = field(default_factory=list, init=False)

    def sample(
        self,
        prompt: Prompt,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
        *,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> Future[SampleResponse]:
        """Draw ``num_samples`` completions of ``prompt``."""
        if num_samples < 1:
            raise RolloutError(f"sample: num_samples must be at least 1, got {num_samples}")
        self.check()
        params = as_sampling(sampling_params or SamplingParams())
        seed = self.seeds(self.step) if params.seed is None else params.seed
        send = functools.partial(
            self.client.sample,
            prompt=convert.prompt(as_model_input(prompt).to_ints()),
            num_samples=num_samples,
            sampling_params=convert.sampling(params, seed),
            include_prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
        )
        return self._add(send, self._response)

    def compute_logprobs(self, prompt: Prompt) -> Future[list[float | None]]:
        """Compute the logprob of every token given the tokens before it, at temperature 1; the first is None."""
        self.check()
        tokens = convert.prompt(as_model_input(prompt).to_ints())
        return self._add(functools.partial(self.client.compute_logprobs, tokens), list)

    def _response(self, response: tinker.SampleResponse) -> SampleResponse:
        sequences = [
            Sample(list(sequence.tokens), list(sequence.logprobs or []), str(sequence.stop_reason), self.step)
            for sequence in response.sequences
        ]
        return SampleResponse(sequences, response.prompt_logprobs, response.topk_prompt_logprobs)

    def flush(self) -> None:
        """Send all queued requests."""
        # Hold the lock until all are sent, so that requests of another thread do not join the announced batch.
        with self._lock:
            waiting, self._waiting = self._waiting, []
            for request in waiting:
                request.started()
            for start in range(0, len(waiting), MAX_BATCH):
                self._send(waiting[start : start + MAX_BATCH])

    def _send(self, batch: Sequence[_PendingRequest]) -> None:
        if len(batch) > 1:
            self.connection.announce(self.client, len(batch))
        for request in batch:
            self.connection.follow(request.send(), RolloutError).add_done_callback(request.settle)

    def _add(self, send: Callable[[], ClientCall[R]], read: Callable[[R], T]) -> Future[T]:
        future: LazyFuture[T] = LazyFuture(self.flush)

        def settle(done: concurrent.futures.Future[R]) -> None:
            if (error := done.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(read(done.result()))

        with self._lock:
            self._waiting.append(_PendingRequest(send, future.started, settle))
        return future
