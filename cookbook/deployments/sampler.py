"""Samples from a server that speaks vLLM's token protocol: token ids in, token ids and logprobs out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from cookbook.deployments.http import Client, ServerUnavailableError
from cookbook.deployments.limit import AdaptiveLimit
from cookbook.errors import RolloutError
from cookbook.futures import Future
from cookbook.types import Sample, SampleResponse, SamplingParams, as_model_input, as_sampling

T = TypeVar("T")
GENERATE = "/inference/v1/generate"
START_REQUESTS = 16


class Replica:
    """One server, with as many requests under way as it bears. ``max_length``: prompt and completion together, tokens."""

    def __init__(self, client: Client, max_length: int, max_requests: int) -> None:
        self.client = client
        self.max_length = max_length
        self.limit = AdaptiveLimit(START_REQUESTS, max_requests)

    def generate(self, body: Mapping[str, Any]) -> Any:
        """Raises RolloutError for a request that is refused, or a server that does not answer."""
        with self.limit.slot() as busy:
            return self.client.call(GENERATE, body, busy=busy)


class Pool:
    """Answers requests on threads, replica by replica in turn."""

    def __init__(self, replicas: list[Replica], max_requests: int) -> None:
        self.replicas = replicas
        self._turn = itertools.count()
        self._threads = ThreadPoolExecutor(max_requests * len(replicas), thread_name_prefix="sample")

    @property
    def max_length(self) -> int:
        return min(replica.max_length for replica in self.replicas)

    def submit(self, body: Mapping[str, Any], read: Callable[[Any], T]) -> Future[T]:
        """``read`` of the answer to ``body``."""
        future: Future[T] = Future()
        replica = self.replicas[next(self._turn) % len(self.replicas)]

        def work() -> None:
            try:
                future.set_result(read(replica.generate(body)))
            except BaseException as error:  # noqa: BLE001 - it is raised again where the future is read
                future.set_exception(error)

        self._threads.submit(work)
        return future

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class DeploymentSampler:
    """Samples from what was loaded into the servers as ``version``; an answer of any other version is an error."""

    def __init__(self, pool: Pool, step: int, version: str, seed: int = 0) -> None:
        self.step = step
        self._pool = pool
        self._version = version
        self._seed = seed
        self._unseeded = itertools.count(1)

    def sample(
        self, prompt: Any, num_samples: int = 1, sampling_params: SamplingParams | None = None
    ) -> Future[SampleResponse]:
        """``num_samples`` completions.

        Raises:
            RolloutError: prompt and completion are longer than the server takes; nothing has been sent.
        """
        if num_samples < 1:
            raise RolloutError(f"sample: num_samples must be at least 1, got {num_samples}")
        tokens, params = as_model_input(prompt).to_ints(), as_sampling(sampling_params or SamplingParams())
        seed = params.seed
        if seed is None:
            seed = (self._seed * 1_000_003 + self.step) * 1_000_003 + next(self._unseeded)
        asked = {**_asked(params, self._room(tokens, params)), "n": num_samples, "seed": seed % (1 << 63)}
        return self._pool.submit(
            {"token_ids": tokens, "sampling_params": asked}, lambda answer: self._read(answer, num_samples)
        )

    def compute_logprobs(self, prompt: Any) -> Future[list[float | None]]:
        """The logprob of every token given those before it, at temperature 1; the first is None."""
        tokens = as_model_input(prompt).to_ints()
        params = {**_asked(SamplingParams(), self._room(tokens, SamplingParams(max_tokens=1))), "max_tokens": 1}
        body = {"token_ids": tokens, "sampling_params": {**params, "prompt_logprobs": 0}}

        def read(answer: Any) -> list[float | None]:
            self._read(answer, 1)
            found = answer["prompt_logprobs"]
            return [None, *(row[str(token)]["logprob"] for token, row in zip(tokens[1:], found[1:], strict=True))]

        return self._pool.submit(body, read)

    def _room(self, tokens: list[int], params: SamplingParams) -> int:
        """Tokens that the completion may have."""
        longest = self._pool.max_length
        if not tokens:
            raise RolloutError("sample: the prompt is empty; give at least one token")
        room = longest - len(tokens)
        if room < (params.max_tokens or 1):
            raise RolloutError(
                f"sample: a prompt of {len(tokens)} tokens and max_tokens={params.max_tokens} do not fit into the {longest} "
                "that the deployment takes; shorten it, or raise deployment.max_length"
            )
        return params.max_tokens or room

    def _read(self, answer: Any, num_samples: int) -> SampleResponse:
        try:
            choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
            samples = [self._sample(choice) for choice in choices]
        except (KeyError, TypeError, ValueError) as error:
            problem = f"{type(error).__name__} {error}"
            raise ServerUnavailableError(f"sample: the server's answer cannot be read ({problem})", None) from None
        if len(samples) != num_samples:
            raise RolloutError(f"sample: asked for {num_samples} samples, the server has sent {len(samples)}")
        return SampleResponse(samples)

    def _sample(self, choice: Mapping[str, Any]) -> Sample:
        versions = {span["version"] for span in choice["weight_versions"] or []}
        if versions != {self._version}:
            raise RolloutError(
                f"sample: asked for weights {self._version}, the server has sampled from {sorted(versions) or 'unknown ones'}; "
                "sync again, and let nobody else load weights"
            )
        if (reason := choice["finish_reason"]) not in ("stop", "length"):
            raise RolloutError(f"sample: the server has given up a completion ({reason}); look at its log")
        content = choice["logprobs"]["content"]
        tokens, logprobs = list(map(int, choice["token_ids"])), [float(one["logprob"]) for one in content]
        if not tokens or [one["token_id"] for one in content] != tokens:
            raise RolloutError(f"sample: the server has sent {len(tokens)} tokens and {len(logprobs)} logprobs")
        return Sample(tokens, logprobs, reason, self.step)


def _asked(params: SamplingParams, max_tokens: int) -> dict[str, Any]:
    """As vLLM has it. ``logprobs`` 0 are those of the drawn tokens only."""
    stop = [params.stop] if isinstance(params.stop, str) else list(params.stop or [])
    return {
        "max_tokens": max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": max(params.top_k, 0),
        "min_p": params.min_p,
        "stop": [one for one in stop if isinstance(one, str)],
        "stop_token_ids": [one for one in stop if not isinstance(one, str)],
        "ignore_eos": params.stop is not None and not stop,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 0,
    }
