"""Samples from one version of the weights, on a server.

As in this process, requests are collected until somebody waits for one, and the server is told how many belong together: what
it computes together is then a function of the program, and a run repeats bit by bit.
"""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cookbook.backends.remote.server import Server
from cookbook.errors import RolloutError
from cookbook.futures import Future, LazyFuture
from cookbook.types import Sample, SampleResponse, SamplingParams, as_model_input, as_sampling

TOGETHER = 1000  # the client package has no more than 2000 under way


@dataclass(frozen=True)
class _Asked:
    """``send`` makes the request; ``convert`` its answer into ours."""

    send: Callable[[], Any]
    convert: Callable[[Any], Any]
    future: LazyFuture[Any]


class RemoteSampler:
    """A :class:`~cookbook.protocols.Sampler` around a sampling client of the ``tinker`` package.

    ``path`` is where its weights are saved, if they are. ``check`` raises when they are not those of ``step`` any more.
    ``seeds`` numbers the requests that bring no seed, so that they repeat from run to run.
    """

    def __init__(
        self,
        server: Server,
        client: Any,
        step: int,
        *,
        seeds: Callable[[int], int],
        path: str | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.step = step
        self.path = path
        self._server = server
        self._client = client
        self._seeds = seeds
        self._check = check
        self._lock = threading.RLock()
        self._waiting: list[_Asked] = []

    def sample(
        self,
        prompt: Any,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
        *,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> Future[SampleResponse]:
        """``num_samples`` completions of ``prompt``."""
        if num_samples < 1:
            raise RolloutError(f"sample: num_samples must be at least 1, got {num_samples}")
        self._check()
        params = as_sampling(sampling_params or SamplingParams())
        seed = self._seeds(self.step) if params.seed is None else params.seed
        ask = functools.partial(
            self._client.sample,
            prompt=self._server.wire.prompt(as_model_input(prompt).to_ints()),
            num_samples=num_samples,
            sampling_params=self._server.wire.sampling(params, seed),
            include_prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
        )
        return self._add(ask, self._response)

    def compute_logprobs(self, prompt: Any) -> Future[list[float | None]]:
        """The logprob of every token given those before it, at temperature 1; the first is None."""
        self._check()
        wired = self._server.wire.prompt(as_model_input(prompt).to_ints())
        return self._add(functools.partial(self._client.compute_logprobs, wired), list)

    def _response(self, found: Any) -> SampleResponse:
        sequences = [
            Sample(list(one.tokens), list(one.logprobs or []), str(one.stop_reason), self.step) for one in found.sequences
        ]
        return SampleResponse(sequences, found.prompt_logprobs, found.topk_prompt_logprobs)

    def flush(self) -> None:
        """Sends everything that waits."""
        with self._lock:  # until all is sent: another thread's batch must not mix with this one
            waiting, self._waiting = self._waiting, []
            for asked in waiting:
                asked.future.started()
            for place in range(0, len(waiting), TOGETHER):
                self._send(waiting[place : place + TOGETHER])

    def _send(self, batch: Sequence[_Asked]) -> None:
        if len(batch) > 1:
            self._server.announce(self._client, len(batch))
        for asked in batch:
            self._server.follow(asked.send(), RolloutError).add_done_callback(functools.partial(_tell, asked))

    def _add(self, send: Callable[[], Any], convert: Callable[[Any], Any]) -> Future[Any]:
        future: LazyFuture[Any] = LazyFuture(self.flush)
        with self._lock:
            self._waiting.append(_Asked(send, convert, future))
        return future


def _tell(asked: _Asked, done: concurrent.futures.Future[Any]) -> None:
    error = done.exception()
    if error is not None:
        asked.future.set_exception(error)
    else:
        asked.future.set_result(asked.convert(done.result()))
