"""Sampler for servers with vLLM's token API: token ids in, token ids and logprobs out."""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from cookbook.checkpoints import sampler_checkpoints
from cookbook.deployments.vllm.http import Client, RequestRefusedError, ServerUnavailableError
from cookbook.errors import RolloutError, SampleRefusedError
from cookbook.futures import Future
from cookbook.types import JsonObject, Prompt, Sample, SampleResponse, SamplingParams, as_model_input, as_sampling, request_seed


class AdaptiveLimit:
    """Limit of concurrent requests with additive increase and multiplicative decrease.

    After as many requests without congestion as the limit allows, the limit rises by one. Congestion halves it, once for all
    requests that were in progress, because they have met the same congestion.

    Source: Chiu and Jain, Analysis of the Increase and Decrease Algorithms for Congestion Avoidance (1989).
    """

    def __init__(self, start: int, highest: int) -> None:
        self._limit = float(min(start, highest))
        self._highest = highest
        self._active = 0
        self._num_started = 0  # requests so far
        # Requests with a lower number than this one do not halve the limit again.
        self._ignored_below = 0
        self._changed = threading.Condition()

    @property
    def limit(self) -> int:
        return int(self._limit)

    @contextlib.contextmanager
    def slot(self) -> Iterator[Callable[[], None]]:
        """Wait until one more request is allowed. Yields a function to call at every sign of congestion."""
        with self._changed:
            self._changed.wait_for(lambda: self._active < self.limit)
            self._active += 1
            number, self._num_started = self._num_started, self._num_started + 1
        congested = False

        def report_congestion() -> None:
            nonlocal congested, number
            congested = True
            with self._changed:
                if number >= self._ignored_below:
                    self._limit = max(1.0, self._limit / 2)
                    self._ignored_below = self._num_started
                # The next attempt of this request starts now.
                number = self._num_started

        try:
            yield report_congestion
        finally:
            with self._changed:
                self._active -= 1
                if not congested:
                    self._limit = min(self._highest, self._limit + 1 / self._limit)
                self._changed.notify_all()


T = TypeVar("T")
GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
# Of the ids of requests of the route GENERATE, inside the server.
ID_PREFIX = "generate-tokens-"
START_REQUESTS = 16
# Statuses for a bad request, and not for a missing permission or route.
BAD_REQUEST = frozenset({400, 413, 422})


def generate(client: Client, limit: AdaptiveLimit, body: JsonObject) -> JsonObject:
    """Return the JSON response of the route ``GENERATE``.

    Raises:
        SampleRefusedError: the server refuses this request, but would take others.
        ServerUnavailableError: the server does not answer.
        RolloutError: the server takes no requests of this kind, or none from this client.
    """
    with limit.slot() as busy:
        try:
            response: JsonObject = client.call(GENERATE, body, busy=busy)
            return response
        except RequestRefusedError as error:
            if error.status in BAD_REQUEST:
                raise SampleRefusedError(str(error)) from None
            raise


Job = Callable[[], None]


class RequestFuture(Future[T]):
    """The result of a request. :meth:`stop` ends its computation on the server; an error is then the result."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self.request_id = uuid.uuid4().hex
        self.is_stopped = False
        self._client = client

    def stop(self) -> None:
        """Return immediately; another thread sends the message."""
        self.is_stopped = True
        if not self.done():
            threading.Thread(target=self._abort, name="abort", daemon=True).start()

    def _abort(self) -> None:
        # The server may have ended.
        with contextlib.suppress(RolloutError):
            self._client.once(ABORT, {"request_ids": [f"{ID_PREFIX}{self.request_id}"]}, text=True)


class Pool:
    """Sends requests on threads, to the servers in turn, an adaptive number at a time to each.

    ``max_length``: tokens of prompt and completion that every server takes. ``max_requests``: the limit of each server.
    ``end_token_ids``: the model's stop tokens, of which the servers know the end-of-text token only. The threads are daemons: a
    run that ends because its servers do not answer must not wait for them.
    """

    def __init__(
        self, clients: Sequence[Client], max_length: int, max_requests: int, end_token_ids: Sequence[int] = ()
    ) -> None:
        self.max_length = max_length
        self.end_token_ids = tuple(end_token_ids)
        self._round_robin = itertools.cycle([(client, AdaptiveLimit(START_REQUESTS, max_requests)) for client in clients])
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = 0
        self._max_threads = max_requests * len(clients)
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, body: JsonObject, read: Callable[[JsonObject], T]) -> RequestFuture[T]:
        """Send ``body``, and convert the response with ``read``."""
        client, limit = next(self._round_robin)
        future: RequestFuture[T] = RequestFuture(client)
        request = {**body, "request_id": future.request_id}

        def work() -> None:
            try:
                if future.is_stopped:
                    raise RolloutError("sample: stopped on request")
                future.set_result(read(generate(client, limit, request)))
            except BaseException as error:  # noqa: BLE001 - raised again when the caller reads the future
                future.set_exception(error)

        self._jobs.put(work)
        if self._threads < self._max_threads:
            self._threads += 1
            threading.Thread(target=_work, args=(self._jobs,), name="sample", daemon=True).start()
        return future

    def close(self) -> None:
        """Drop the requests that wait. Responses to requests in progress are lost."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)


def _work(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        # Frees the request's future before the wait for the next job.
        del job
    jobs.put(None)  # for the other threads


@dataclass(eq=False)
class DeploymentSampler:
    """Samples from the weights that the servers have loaded as ``version``; a response of another version is an error.

    Args:
        adapter: name of a LoRA adapter on those weights.
        checkpoint: the folder that was loaded.
        before: called before every request; makes the servers load these weights, if they have others.
    """

    pool: Pool
    step: int
    version: str
    seed: int = 0
    adapter: str | None = None
    checkpoint: Path | None = None
    before: Callable[[], None] | None = None
    # Numbers of the requests without a seed.
    _unseeded: Iterator[int] = field(default_factory=lambda: itertools.count(1), init=False)

    def sample(
        self, prompt: Prompt, num_samples: int = 1, sampling_params: SamplingParams | None = None
    ) -> Future[SampleResponse]:
        """Draw ``num_samples`` completions.

        Raises:
            RolloutError: prompt and completion are longer than the server takes; no request was sent.
        """
        if num_samples < 1:
            raise RolloutError(f"sample: num_samples must be at least 1, got {num_samples}")
        tokens, params = as_model_input(prompt).to_ints(), as_sampling(sampling_params or SamplingParams())
        seed = params.seed
        if seed is None:
            seed = request_seed(self.seed, self.step, next(self._unseeded))
        sent = _vllm_params(params, self._max_tokens(tokens, params), self.pool.end_token_ids)
        options = {**sent, "n": num_samples, "seed": seed % (1 << 63)}
        return self._submit(tokens, options, lambda response: self._read(response, num_samples))

    def compute_logprobs(self, prompt: Prompt) -> Future[list[float | None]]:
        """Compute the logprob of every token given the tokens before it, at temperature 1; the first is None."""
        tokens = as_model_input(prompt).to_ints()
        options = {**_vllm_params(SamplingParams(), self._max_tokens(tokens, SamplingParams(max_tokens=1))), "max_tokens": 1}

        def read(response: JsonObject) -> list[float | None]:
            self._read(response, 1)
            logprobs = response["prompt_logprobs"]
            return [None, *(row[str(token)]["logprob"] for token, row in zip(tokens[1:], logprobs[1:], strict=True))]

        return self._submit(tokens, {**options, "prompt_logprobs": 0}, read)

    def saving(self) -> Callable[[Path], object]:
        """Return a function that writes the weights as a checkpoint; see :class:`~cookbook.protocols.LaggingSampler`."""
        if self.checkpoint is None:
            raise RolloutError("sample: the weights of this sampler were never written to disk; sync again")
        return functools.partial(self._export, self.checkpoint)

    def _export(self, checkpoint: Path, folder: Path) -> None:
        """Export the checkpoint. A bound method, so that holding the callable keeps the sampler and its checkpoint alive."""
        sampler_checkpoints.export(checkpoint, folder)

    def reload(self) -> None:
        """Make the servers load these weights, if they have others."""
        if self.before is not None:
            self.before()

    def _submit(self, tokens: list[int], options: JsonObject, read: Callable[[JsonObject], T]) -> Future[T]:
        self.reload()
        model = {"model": self.adapter} if self.adapter is not None else {}
        return self.pool.submit({**model, "token_ids": tokens, "sampling_params": options}, read)

    def _max_tokens(self, tokens: list[int], params: SamplingParams) -> int:
        """Longest completion, in tokens."""
        max_length = self.pool.max_length
        if not tokens:
            raise RolloutError("sample: the prompt is empty; give at least one token")
        available = max_length - len(tokens)
        if available < (params.max_tokens or 1):
            raise RolloutError(
                f"sample: a prompt of {len(tokens)} tokens and max_tokens={params.max_tokens} do not fit into the {max_length} "
                "that the deployment takes; shorten it, or raise deployment.max_length"
            )
        return params.max_tokens or available

    def _read(self, response: JsonObject, num_samples: int) -> SampleResponse:
        if self.adapter is not None and response.get("model") != self.adapter:
            raise RolloutError(f"sample: asked for adapter {self.adapter}, the server has sampled from {response.get('model')}")
        try:
            choices = sorted(response["choices"], key=lambda choice: int(choice["index"]))
            samples = [self._sample(choice) for choice in choices]
        except (KeyError, TypeError, ValueError) as error:
            problem = f"{type(error).__name__} {error}"
            raise ServerUnavailableError(f"sample: the server's response cannot be read ({problem})", None) from None
        if len(samples) != num_samples:
            raise RolloutError(f"sample: asked for {num_samples} samples, the server has sent {len(samples)}")
        return SampleResponse(samples)

    def _sample(self, choice: JsonObject) -> Sample:
        versions = {span["version"] for span in choice["weight_versions"] or []}
        if versions != {self.version}:
            raise RolloutError(
                f"sample: asked for weights {self.version}, the server has sampled from {sorted(versions) or 'unknown ones'}; "
                "sync again, and stop other processes from loading weights into this server"
            )
        if (reason := choice["finish_reason"]) not in ("stop", "length"):
            raise ServerUnavailableError(f"sample: the server has aborted a completion ({reason}); see its log", None)
        content = choice["logprobs"]["content"]
        tokens, logprobs = list(map(int, choice["token_ids"])), [float(token["logprob"]) for token in content]
        if not tokens or [token["token_id"] for token in content] != tokens:
            raise RolloutError(f"sample: the server has sent {len(tokens)} tokens and {len(logprobs)} logprobs")
        return Sample(tokens, logprobs, reason, self.step)


def _vllm_params(params: SamplingParams, max_tokens: int, end_token_ids: Sequence[int] = ()) -> JsonObject:
    """Convert to vLLM's sampling parameters. ``logprobs`` 0 returns those of the drawn tokens only.

    ``end_token_ids`` end a completion too, unless ``params.stop`` is empty.
    """
    ignores_end = params.stop is not None and not params.stop
    stop = [params.stop] if isinstance(params.stop, str) else list(params.stop or [])
    return {
        "max_tokens": max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": max(params.top_k, 0),
        "min_p": params.min_p,
        "stop": [text for text in stop if isinstance(text, str)],
        "stop_token_ids": list(
            dict.fromkeys([*(token for token in stop if not isinstance(token, str)), *(() if ignores_end else end_token_ids)])
        ),
        "ignore_eos": ignores_end,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 0,
    }
