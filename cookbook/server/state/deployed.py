"""Sampling of the endpoint from a deployment in other processes, such as vLLM servers, which serve one version at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from cookbook.backends.failures import ServedFailures
from cookbook.backends.local import LocalTrainer
from cookbook.backends.local.sample_queue import STOPPED, LocalSampler, SampleFuture
from cookbook.backends.worker import Account
from cookbook.engine.engine import Engine
from cookbook.engine.model import ModelConfig, SharedBase
from cookbook.errors import RolloutError
from cookbook.futures import Future
from cookbook.protocols import DeploymentConfig, Sampler
from cookbook.server.state.host import Host
from cookbook.types import Checkpoint, SampleResponse, SamplingParams

# Folder, below that of the server, of the checkpoints that the deployment loads.
FOLDER = "deployed"


@runtime_checkable
class Stoppable(Protocol):
    """A future whose computation can be ended early."""

    def stop(self) -> None: ...


@dataclass
class _Loaded:
    """Backend that returns an engine which is in memory already."""

    engine: Engine
    threads: int
    shard_gb: float

    def make_engine(self, model: ModelConfig, seed: int, base: SharedBase | None = None) -> Engine:
        return self.engine

    def for_serving(self, *, trains: bool) -> _Loaded:
        return self


class ServedWeights(LocalTrainer):
    """Trainer of a deployment that serves several versions: ``engine`` is the version that is saved next.

    Adapters are saved merged into the base weights, because runs may have adapters of any rank.
    """

    def save_weights_for_sampler_ext(
        self, name: str, *, checkpoint_type: str = "base", merged: bool = True, predecessor: str | None = None
    ) -> Future[Checkpoint]:
        # Never a delta: consecutive versions belong to different runs.
        return super().save_weights_for_sampler_ext(name, merged=True)


class Turns:
    """Lets users of one version run together, and versions take turns in the order of arrival. Used on the event loop."""

    def __init__(self) -> None:
        self._version: object = None
        self._num_active = 0
        self._waiting: deque[tuple[object, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def of(self, version: object) -> AsyncIterator[None]:
        """Wait for a turn of ``version``. If other versions wait, later users of the current version wait behind them."""
        if self._waiting or (self._num_active and version is not self._version):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((version, turn))
            await turn
        else:
            self._version = version
            self._num_active += 1
        try:
            yield
        finally:
            self._num_active -= 1
            if not self._num_active:
                self._begin_next()

    def _begin_next(self) -> None:
        if not self._waiting:
            return
        self._version = self._waiting[0][0]
        for version, turn in list(self._waiting):
            if version is self._version:
                self._num_active += 1
                turn.set_result(None)
        self._waiting = deque(one for one in self._waiting if one[0] is not self._version)


class DeployedFuture(SampleFuture[SampleResponse]):
    """The result of a request to the deployment. :meth:`stop` ends its computation there."""

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self._abort: Callable[[], None] = lambda: None

    def begun(self, abort: Callable[[], None]) -> None:
        """Note that the request was sent. ``abort`` ends it, now if it was stopped meanwhile."""
        self._abort = abort
        if self.is_stopped:
            abort()

    def stop(self) -> None:
        super().stop()
        self._abort()


class Deployed:
    """The deployment of a server. It loads the weights of a request when their turn comes.

    Raises:
        ConfigError: the deployment cannot serve the model.
        RolloutError: a server does not start.
    """

    def __init__(self, config: DeploymentConfig, host: Host, folder: Path) -> None:
        engine = host.base_sampler().engine()
        lane = host.worker.lane(Account())
        backend = _Loaded(engine, host.config.threads, host.config.shard_gb)
        self._trainer = ServedWeights(
            host.model, backend, seed=host.seed, folder=folder / FOLDER, failures=ServedFailures(), worker=lane
        )
        self._deployment = config.deploy(self._trainer, live=False)
        # By the sampler of this process on the same weights.
        self._samplers: WeakKeyDictionary[LocalSampler, Sampler] = WeakKeyDictionary()
        self._turns = Turns()
        self._loading = asyncio.Lock()
        # The event loop keeps only weak references to tasks.
        self._tasks: set[asyncio.Task[None]] = set()

    def sample(
        self,
        weights: LocalSampler,
        prompt: list[int],
        num_samples: int,
        params: SamplingParams,
        scores: Future[list[float | None]] | None,
    ) -> DeployedFuture:
        """Draw completions from ``weights``. ``scores``: the logprobs of the prompt, which the response contains."""
        future = DeployedFuture()
        task = asyncio.get_running_loop().create_task(self._answer(future, weights, prompt, num_samples, params, scores))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return future

    def close(self) -> None:
        self._deployment.close()

    async def _answer(
        self,
        future: DeployedFuture,
        weights: LocalSampler,
        prompt: list[int],
        num_samples: int,
        params: SamplingParams,
        scores: Future[list[float | None]] | None,
    ) -> None:
        try:
            async with self._turns.of(weights):
                if future.is_stopped:
                    raise RolloutError(STOPPED)
                async with self._loading:
                    remote = await asyncio.to_thread(lambda: self._sampler(weights).sample(prompt, num_samples, params))
                if isinstance(remote, Stoppable):
                    future.begun(remote.stop)
                response = await asyncio.wrap_future(remote)
            if scores is not None:
                scored = await asyncio.wrap_future(scores)
                response = SampleResponse(response.sequences, scored)
        except BaseException as error:  # noqa: BLE001 - raised again when the caller reads the future
            future.set_exception(error)
        else:
            future.set_result(response)

    def _sampler(self, weights: LocalSampler) -> Sampler:
        """Load the weights into the deployment, or return the sampler that loads them again if they are not served."""
        if weights not in self._samplers:
            self._trainer.engine = weights.engine()
            self._samplers[weights] = self._deployment.load(self._trainer.step).result()
        return self._samplers[weights]
