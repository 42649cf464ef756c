"""Sampling of the endpoint from a deployment in other processes, such as vLLM servers, which serve one version at a time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import shutil
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from cookbook.backends.local import LocalTrainer
from cookbook.backends.local.sample_queue import STOPPED, LocalSampler, SampleFuture
from cookbook.backends.worker import Account
from cookbook.engine.engine import Engine
from cookbook.engine.model import ModelConfig, SharedBase
from cookbook.errors import BackendError, CookbookError, RolloutError, SamplerUnavailableError
from cookbook.futures import Future, ServedFailures
from cookbook.protocols import DeploymentConfig, Sampler
from cookbook.server.state.host import Host
from cookbook.types import Checkpoint, SampleResponse, SamplingParams

# Folder, below that of the server, of the checkpoints that the deployment loads.
FOLDER = "deployed"
# Versions that the deployment can load again from its own checkpoints. Each is a full model on disk; others are saved again.
KEPT_VERSIONS = 2


@runtime_checkable
class Stoppable(Protocol):
    """A future whose computation can be ended early."""

    def stop(self) -> None: ...


@runtime_checkable
class Reloadable(Protocol):
    """A sampler whose weights the deployment may have replaced by others."""

    def reload(self) -> None:
        """Load the weights of this sampler, unless they are served."""


@runtime_checkable
class Killable(Protocol):
    """A deployment with processes. :meth:`kill` ends them without a wait; ``close`` waits until they have ended."""

    def kill(self) -> None: ...


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
        """Wait for a turn of ``version``. If other versions wait, later users of the current version wait behind them.

        A task that is cancelled while it waits loses its place.
        """
        if self._waiting or (self._num_active and version is not self._version):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((version, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.cancelled():
                    self._waiting = deque(item for item in self._waiting if item[1] is not turn)
                else:
                    self._end_one()
                raise
        else:
            self._version = version
            self._num_active += 1
        try:
            yield
        finally:
            self._end_one()

    def _end_one(self) -> None:
        self._num_active -= 1
        if not self._num_active:
            self._begin_next()

    def _begin_next(self) -> None:
        # The task of a cancelled turn may not have run yet.
        self._waiting = deque(item for item in self._waiting if not item[1].cancelled())
        if not self._waiting:
            return
        self._version = self._waiting[0][0]
        for version, turn in list(self._waiting):
            if version is self._version:
                self._num_active += 1
                turn.set_result(None)
        self._waiting = deque(item for item in self._waiting if item[0] is not self._version)


class DeployedFuture(SampleFuture[SampleResponse]):
    """The result of a request to the deployment. :meth:`stop` ends its computation there, with an error as the result.

    Used on the event loop.
    """

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self._abort: Callable[[], object] = lambda: None

    def aborts_by(self, abort: Callable[[], object]) -> None:
        """Set the function that ends the current part of the computation. Call it now if the request was stopped meanwhile."""
        self._abort = abort
        if self.is_stopped:
            abort()

    def stop(self, error: BaseException | None = None) -> None:
        super().stop()
        if not self.done():
            self.set_exception(error or RolloutError(STOPPED))
        self._abort()


class Deployed:
    """The deployment of a server. It loads the weights of a request when their turn comes.

    Raises:
        ConfigError: the deployment cannot serve the model.
        RolloutError: a server does not start.
    """

    def __init__(self, config: DeploymentConfig, host: Host, folder: Path) -> None:
        engine = host.base_sampler().engine()
        self._lane = host.worker.lane(Account())
        backend = _Loaded(engine, host.config.threads, host.config.shard_gb)
        self._trainer = ServedWeights(
            host.model, backend, seed=host.seed, folder=folder / FOLDER, failures=ServedFailures(), worker=self._lane
        )
        # By the sampler of this process on the same weights, the version that was used last at the end.
        self._samplers: WeakKeyDictionary[LocalSampler, Sampler] = WeakKeyDictionary()
        self._turns = Turns()
        self._loading = asyncio.Lock()
        # The event loop keeps only weak references to tasks.
        self._tasks: dict[asyncio.Task[None], DeployedFuture] = {}
        # Last, because the servers end only if the caller gets this object and closes it.
        self._deployment = config.deploy(self._trainer, live=False)

    def sample(
        self,
        weights: LocalSampler,
        prompt: list[int],
        num_samples: int,
        params: SamplingParams,
        scores: SampleFuture[list[float | None]] | None,
    ) -> DeployedFuture:
        """Draw completions from ``weights``. ``scores``: the logprobs of the prompt, which the response contains."""
        future = DeployedFuture()
        if scores is not None:
            future.add_done_callback(functools.partial(_stop_unused, scores))
        task = asyncio.get_running_loop().create_task(self._answer(future, weights, prompt, num_samples, params, scores))
        future.aborts_by(task.cancel)
        self._tasks[task] = future
        task.add_done_callback(self._tasks.pop)
        return future

    def abandon(self) -> None:
        """Stop all requests at shutdown, with an error by which clients retry them."""
        for future in list(self._tasks.values()):
            future.stop(BackendError("sample: the request was dropped: the server stops; send it again"))

    def close(self) -> None:
        self._deployment.close()

    def kill(self) -> None:
        """End the processes of the deployment without waiting for them."""
        if isinstance(self._deployment, Killable):
            self._deployment.kill()

    async def _answer(
        self,
        future: DeployedFuture,
        weights: LocalSampler,
        prompt: list[int],
        num_samples: int,
        params: SamplingParams,
        scores: SampleFuture[list[float | None]] | None,
    ) -> None:
        try:
            async with self._turns.of(weights):
                # The thread that loads weights cannot be stopped, and another load must wait for it.
                future.aborts_by(lambda: None)
                async with self._loading:
                    if future.is_stopped:
                        return
                    remote = await asyncio.to_thread(lambda: self._sampler(weights).sample(prompt, num_samples, params))
                if isinstance(remote, Stoppable):
                    future.aborts_by(remote.stop)
                response = await asyncio.wrap_future(remote)
            if scores is not None:
                scored = await asyncio.wrap_future(scores)
                response = SampleResponse(response.sequences, scored)
        except BaseException as error:  # noqa: BLE001 - raised again when the caller reads the future
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(response)

    def _sampler(self, weights: LocalSampler) -> Sampler:
        """Load the weights into the deployment, and return a sampler on them.

        Raises:
            CookbookError: the weights no longer exist.
            BackendError, SamplerUnavailableError: the deployment cannot load the weights.
        """
        sampler = self._samplers.pop(weights, None)
        if sampler is None:
            # On the worker, because the engine of a sampler of an earlier process is made now, with torch's random numbers.
            self._trainer.engine = self._lane.submit(weights.engine).result()
            # The deployment deletes the checkpoints of samplers that no longer exist.
            for unused in list(self._samplers)[: max(len(self._samplers) + 1 - KEPT_VERSIONS, 0)]:
                del self._samplers[unused]
            with self._load_errors():
                sampler = self._deployment.load(self._trainer.step).result()
        elif isinstance(sampler, Reloadable):
            with self._load_errors():
                sampler.reload()
        self._samplers[weights] = sampler
        return sampler

    @contextlib.contextmanager
    def _load_errors(self) -> Iterator[None]:
        """Turn errors of a load into errors of the server, by which clients retry, and delete the checkpoint of the load."""
        folder = self._trainer.folder
        before = set(folder.glob("*"))
        try:
            yield
        except (CookbookError, OSError) as error:
            for path in set(folder.glob("*")) - before:
                shutil.rmtree(path, ignore_errors=True)
            if isinstance(error, BackendError | SamplerUnavailableError):
                raise
            raise BackendError(f"deployment: the weights were not loaded: {error}") from error


def _stop_unused(scores: SampleFuture[list[float | None]], answer: Future[SampleResponse]) -> None:
    """Stop queued scores whose ``answer`` has failed: the next batch would compute them."""
    if answer.failure() is not None:
        scores.stop()
