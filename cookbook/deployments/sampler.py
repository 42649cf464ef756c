"""Samples from a server that speaks vLLM's token protocol: token ids in, token ids and logprobs out."""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from cookbook.checkpoints import chain
from cookbook.deployments.http import Client, RequestRefusedError, ServerUnavailableError
from cookbook.deployments.limit import AdaptiveLimit
from cookbook.errors import RolloutError, SampleRefusedError
from cookbook.futures import Future
from cookbook.types import Sample, SampleResponse, SamplingParams, as_model_input, as_sampling

T = TypeVar("T")
GENERATE = "/inference/v1/generate"
START_REQUESTS = 16
OF_THE_REQUEST = frozenset({400, 413, 422})  # statuses that blame what was asked, and not who asked, or where


class Replica:
    """One server, with as many requests under way as it bears. ``max_length``: prompt and completion together, tokens."""

    def __init__(self, client: Client, max_length: int, max_requests: int) -> None:
        self.client = client
        self.max_length = max_length
        self.limit = AdaptiveLimit(START_REQUESTS, max_requests)

    def generate(self, body: Mapping[str, Any]) -> Any:
        """The server's answer.

        Raises:
            SampleRefusedError: it takes others, but not this request.
            ServerUnavailableError: it does not answer.
            RolloutError: it takes no requests of this kind, or from here.
        """
        with self.limit.slot() as busy:
            try:
                return self.client.call(GENERATE, body, busy=busy)
            except RequestRefusedError as error:
                if error.status in OF_THE_REQUEST:
                    raise SampleRefusedError(str(error)) from None
                raise


Job = Callable[[], None]


class Pool:
    """Answers requests on threads, replica by replica in turn.

    They are daemons: a run that ends because its servers are silent must not wait for them once more.
    """

    def __init__(self, replicas: list[Replica], max_requests: int) -> None:
        self.replicas = replicas
        self._turn = itertools.count()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = 0
        self._most_threads = max_requests * len(replicas)
        weakref.finalize(self, self._jobs.put, None)

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

        self._jobs.put(work)
        if self._threads < self._most_threads:
            self._threads += 1
            threading.Thread(target=_work, args=(self._jobs,), name="sample", daemon=True).start()
        return future

    def close(self) -> None:
        """Drops what waits. What is under way comes to nothing."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)


def _work(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # and with it the request's future, while the next one is waited for
    jobs.put(None)  # for the other threads


class DeploymentSampler:
    """Samples from what was loaded into the servers as ``version``; an answer of any other version is an error.

    Args:
        adapter: the name of one, which lies on those weights.
        checkpoint: the folder that was loaded.
        before: called before every request, to have these weights served.
    """

    def __init__(
        self,
        pool: Pool,
        step: int,
        version: str,
        seed: int = 0,
        *,
        adapter: str | None = None,
        checkpoint: Path | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        self.step = step
        self.adapter = adapter
        self.checkpoint = checkpoint
        self._pool = pool
        self._version = version
        self._seed = seed
        self._before = before
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
        return self._submit(tokens, asked, lambda answer: self._read(answer, num_samples))

    def compute_logprobs(self, prompt: Any) -> Future[list[float | None]]:
        """The logprob of every token given those before it, at temperature 1; the first is None."""
        tokens = as_model_input(prompt).to_ints()
        params = {**_asked(SamplingParams(), self._room(tokens, SamplingParams(max_tokens=1))), "max_tokens": 1}

        def read(answer: Any) -> list[float | None]:
            self._read(answer, 1)
            found = answer["prompt_logprobs"]
            return [None, *(row[str(token)]["logprob"] for token, row in zip(tokens[1:], found[1:], strict=True))]

        return self._submit(tokens, {**params, "prompt_logprobs": 0}, read)

    def saving(self) -> Callable[[Path], object]:
        """As :class:`~cookbook.protocols.LaggingSampler` has it."""
        if self.checkpoint is None:
            raise RolloutError("sample: the weights of this sampler were never written to the disk; sync again")
        return functools.partial(self._export, self.checkpoint)

    def _export(self, checkpoint: Path, folder: Path) -> None:
        """A method, so that whoever is to call it keeps the sampler, and that its checkpoint."""
        chain.export(checkpoint, folder)

    def _submit(self, tokens: list[int], asked: Mapping[str, Any], read: Callable[[Any], T]) -> Future[T]:
        if self._before is not None:
            self._before()
        model = {"model": self.adapter} if self.adapter is not None else {}
        return self._pool.submit({**model, "token_ids": tokens, "sampling_params": asked}, read)

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
        if self.adapter is not None and answer.get("model") != self.adapter:
            raise RolloutError(f"sample: asked for adapter {self.adapter}, the server has sampled from {answer.get('model')}")
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
            raise ServerUnavailableError(f"sample: the server has given up a completion ({reason}); look at its log", None)
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
