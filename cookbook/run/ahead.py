"""Sampling ahead (``rollout.ahead=N``): a thread samples the batch of step b while the trainer makes the steps before it.

    N = 1      trainer    | batch 0           | batch 1           | batch 2           |
               sampler    | batch 1, weights 0| batch 2, weights 1| batch 3, weights 2|

Batch b is sampled from the weights after ``max(0, b - N)`` steps. So the weights of a batch, its seeds and its prompts are
functions of its number, and not of the time: a run has the same bits as one that samples and trains in turn, with a sampler
that lags behind N steps. No batch is dropped, and no prompt is sampled from newer weights than the others of its batch.

With ``recipe.updates=U``, batch b is trained for U steps, the first of them step b U (from 0), and its weights are those after
``max(0, b - N) U`` steps.

A curriculum and ``rollout.refill`` choose the prompts of batch b by the results of the batches up to b - N. The thread samples
one batch after the other, so that these choices have one order.

Every sampled batch is stored in the run's folder. A checkpoint before batch c waits for the batches before c + N, whose weights
are gone when the run resumes; all later batches can be sampled again from the weights of the checkpoint or of later steps.
"""

from __future__ import annotations

import functools
import json
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload

import numpy as np

from cookbook.data import DataConfig, RejectedRows, RenderedPrompt
from cookbook.data.datum_table import Batches
from cookbook.data.rows import RejectedRow
from cookbook.errors import ConfigError, RolloutError
from cookbook.futures import Future
from cookbook.protocols import Sampler
from cookbook.run.hooks import writing_to
from cookbook.sampling.episodes import FailedRequests
from cookbook.sampling.prompt_queue import PromptQueue
from cookbook.sampling.rollouts import PolicySampling, RolloutGroup, StepRollouts
from cookbook.sampling.trajectory import Segment, Trajectory
from cookbook.types import JsonObject
from cookbook.utils import files

log = logging.getLogger("cookbook")

FOLDER = "ahead"
NAME = re.compile(r"batch-(\d{6,})\.json")


@dataclass(frozen=True)
class SampledBatch:
    """The rollouts of one step, with everything that the step reports about them. ``index`` is the number of the batch.

    ``version``: optimizer steps of the weights; ``prompts``: all that were sampled, in order, ``numbers`` those of a queue;
    ``queue``: its state after the batch; ``idle_s``: seconds that the thread has waited for the weights of the batch.
    """

    index: int
    version: int
    prompts: Sequence[RenderedPrompt]
    sampled: StepRollouts
    refused: Sequence[RejectedRow] = ()
    metrics: JsonObject = field(default_factory=dict)
    numbers: Sequence[int] | None = None
    queue: JsonObject | None = None
    idle_s: float = 0.0


class StepPrompts(Sequence[RenderedPrompt]):
    """The prompts of the batch with the number ``batch``, from 0, of a run that samples ahead.

    Raises:
        ConfigError: the prompts are read, and a queue chooses them when the batch is sampled.
    """

    def __init__(self, batch: int, prompts: Callable[[], Sequence[RenderedPrompt]]) -> None:
        self.batch = batch
        self._prompts = prompts

    def __len__(self) -> int:
        return len(self._prompts())

    @overload
    def __getitem__(self, place: int) -> RenderedPrompt: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[RenderedPrompt]: ...
    def __getitem__(self, place: int | slice) -> RenderedPrompt | Sequence[RenderedPrompt]:
        return self._prompts()[place]

    def __iter__(self) -> Iterator[RenderedPrompt]:
        return iter(self._prompts())


class Thread:
    """A thread that makes calls in order. It does not keep the process alive."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="cookbook-ahead", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], SampledBatch]) -> Future[SampledBatch]:
        """Make a call after the earlier ones."""
        future: Future[SampledBatch] = Future()
        self._calls.put(functools.partial(_settle, call, future))
        return future

    def close(self) -> None:
        """End the thread after its calls. Do not wait for it: a call may wait for an environment."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            # The call holds a copy of the weights.
            del call


def _settle(call: Callable[[], SampledBatch], future: Future[SampledBatch]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised again when the step asks for its batch
        future.set_exception(error)


class AheadSampler(Batches[RenderedPrompt]):
    """Samples the batches of a run, up to ``rollout.ahead`` batches before their steps; the prompts are those of ``batches``.

    Args:
        done: number of finished optimizer steps.
        checkpoint: checkpoint that the run resumes from.
        updates: optimizer steps per batch.
    """

    def __init__(
        self,
        batches: Batches[RenderedPrompt],
        sampling: PolicySampling,
        data: DataConfig,
        out: Path,
        done: int,
        checkpoint: Path | None,
        updates: int = 1,
    ) -> None:
        self._updates = updates
        # The number of the next batch to take. That of the current steps is in the checkpoint.
        first = self._first_batch(done)
        self._batches, self.per_epoch = batches, batches.per_epoch
        self._queue = batches if isinstance(batches, PromptQueue) else None
        self._sampling = sampling
        self._data = data
        self._ahead = sampling.config.ahead
        # The failures of evaluations, which come at other times, do not count here.
        self._retrier = sampling.config.retrier()
        self._folder = out / FOLDER
        # Batches that have begun and that no step has taken.
        self._begun: dict[int, Future[SampledBatch]] = {}
        # Batches whose results the queue has not seen.
        self._unseen: dict[int, SampledBatch] = {}
        self._taken = first - 1
        self._thread = Thread()
        self._idle_since: float | None = None
        self._is_closed = False
        self._waited_s = 0.0
        if checkpoint is not None:
            self._restore(done, checkpoint.resolve().parent.parent / FOLDER)
        for index, path in stored(self._folder):
            if index >= first and index not in self._begun:
                path.unlink(missing_ok=True)

    def _first_batch(self, steps: int) -> int:
        """Return the number of the first batch of which no step is finished after ``steps`` steps."""
        return -(-steps // self._updates)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> StepPrompts:  # type: ignore[override]  # a list in the base class
        return StepPrompts(index, functools.partial(self._prompts_of, index))

    def order(self, epoch: int) -> Any:
        return self._batches.order(epoch)

    def _prompts_of(self, index: int) -> Sequence[RenderedPrompt]:
        if self._queue is not None:
            raise ConfigError(
                "rollout.ahead: with rollout.refill or data.curriculum, prompts are chosen when they are sampled; read "
                "them from the groups that run.sample_groups returns"
            )
        return self._batches[index]

    # ---- the steps -----------------------------------------------------------------------------------------------

    def take(self, sampler: Sampler, prompts: Sequence[RenderedPrompt], group_size: int, step: int, total: int) -> SampledBatch:
        """Return the batch of a step, and begin the batch ``rollout.ahead`` batches later, with ``sampler``.

        Args:
            prompts: what this object returns for the step.
            step: the number of finished steps.
            total: steps of the loop; later batches are not sampled.

        Raises:
            ConfigError: the recipe samples other prompts, or samples twice in a step.
            CookbookError: the batch could not be sampled.
        """
        number, is_first = divmod(step, self._updates)[0], step % self._updates == 0
        if not isinstance(prompts, StepPrompts) or prompts.batch != number or number <= self._taken or not is_first:
            raise ConfigError(
                "rollout.ahead: a recipe that samples ahead calls run.sample_groups once per batch, with the next batch of "
                "run.prompt_batches; set rollout.ahead=0 for other prompts"
            )
        last = self._first_batch(total)
        for index in range(number, min(number + self._ahead, last)):
            # At the start of a run; and of a continued one, whose earlier process had fewer steps.
            self._begin(index, sampler, group_size)
        batch = self.wait(number)
        self._taken = number
        del self._begun[number]
        if number + self._ahead < last:
            self._begin(number + self._ahead, sampler, group_size)
        waited_s, self._waited_s = self._waited_s, 0.0
        times = {"time/wait_rollouts_s": waited_s, "time/wait_weights_s": batch.idle_s}
        return replace(batch, metrics={**batch.metrics, "sync/version": float(batch.version), **times})

    def wait(self, index: int) -> SampledBatch:
        """Wait for a batch that has begun, and return it. Raises its error."""
        started = time.monotonic()
        try:
            return self._begun[index].result()
        finally:
            self._waited_s += time.monotonic() - started

    def wait_for_weights(self, step: int) -> None:
        """Wait for the batch of a step before weights are copied for a later batch, so that it can free its own copy."""
        if (number := step // self._updates) in self._begun:
            self.wait(number)

    def settle(self) -> None:
        """Wait for all batches that have begun, so that the sampler, the environment and the reward are free.

        Raises no error of a batch: its step does.
        """
        started = time.monotonic()
        for future in self._begun.values():
            future.exception()
        self._waited_s += time.monotonic() - started

    def before_checkpoint(self) -> None:
        """Wait until all batches that have begun are stored: later weights cannot repeat them. Raises their errors."""
        for index in sorted(self._begun):
            self.wait(index)

    def close(self) -> None:
        """End the thread. A batch that an error of the run leaves behind ends when its sampler or environment is closed."""
        self._is_closed = True
        self._thread.close()

    def _begin(self, index: int, sampler: Sampler, group_size: int) -> None:
        if index not in self._begun:
            self._begun[index] = self._thread.submit(functools.partial(self._sampled, index, sampler, group_size))

    # ---- on the thread -------------------------------------------------------------------------------------------

    def _sampled(self, index: int, sampler: Sampler, group_size: int) -> SampledBatch:
        """Choose the prompts of a batch, sample them, and store the result."""
        self._check_open()
        idle_s = 0.0 if self._idle_since is None else time.monotonic() - self._idle_since
        if (seen := self._unseen.pop(index - self._ahead, None)) is not None:
            self._observe(seen)
        prompts = list(self._batches[index])

        def further(count: int) -> Sequence[RenderedPrompt]:
            assert self._queue is not None
            more = self._queue.further(count)
            prompts.extend(more)
            return more

        refused = RejectedRows(self._data)
        sampled = self._sampling.groups(
            sampler,
            list(prompts),
            group_size,
            # The seeds are those of the step that trains the batch first.
            index * self._updates,
            further if self._sampling.config.refill > 1 else None,
            retrier=self._retrier,
            refusals=refused,
        )
        batch = SampledBatch(index, sampler.step, prompts, sampled, refused.found, idle_s=idle_s)
        if (own := self._queue) is not None:
            own.finish_step()
            batch = replace(batch, metrics=dict(own.metrics()), numbers=own.numbers(prompts), queue=own.state())
            self._unseen[index] = batch
        self._check_open()
        self._store(batch)
        self._idle_since = time.monotonic()
        return batch

    def _check_open(self) -> None:
        if self._is_closed:
            raise RolloutError("rollout.ahead: the run has ended")

    def _observe(self, batch: SampledBatch) -> None:
        """Show the results of a batch to the queue."""
        assert self._queue is not None and batch.numbers is not None
        groups = batch.sampled.groups
        self._queue.observe(groups, [batch.numbers[group.place] for group in groups])

    # ---- the stored batches --------------------------------------------------------------------------------------

    def prune(self, step: int, checkpoints: Sequence[int]) -> None:
        """Delete stored batches that neither the run nor a checkpoint needs, after ``step`` steps.

        ``checkpoints``: the steps of all checkpoints.
        """
        needed = [self._first_batch(saved) for saved in checkpoints]
        for index, path in stored(self._folder):
            if index < self._first_batch(step) and not any(first <= index < first + self._ahead for first in needed):
                path.unlink(missing_ok=True)

    def _path(self, index: int) -> Path:
        return self._folder / f"batch-{index:06d}.json"

    def _store(self, batch: SampledBatch) -> None:
        with writing_to(self._folder, "free disk space and run the same command to resume"):
            self._folder.mkdir(exist_ok=True)
            files.write_text(self._path(batch.index), json.dumps(_as_json(batch), default=_plain_number))

    def _restore(self, done: int, folder: Path) -> None:
        """Read the batches that the earlier process has sampled and not trained, up to that of the checkpoint's weights.

        Later batches are sampled again: the run computes their weights again.
        """
        first, every = self._first_batch(done), self._sampling.sync_every
        for index in range(first, first + self._ahead + 1):
            path = folder / self._path(index).name
            if not path.exists():
                if index < first + self._ahead:
                    log.info("rollout.ahead: %s is missing; the batch is sampled from the weights of the checkpoint", path)
                break
            batch = self._from_json(json.loads(path.read_text(encoding="utf-8")))
            # Between two steps of one batch, no batch has the weights of the checkpoint.
            has_weights = done % self._updates == 0 and batch.version == done // every * every
            if index == first + self._ahead and not has_weights:
                break
            future: Future[SampledBatch] = Future()
            future.set_result(batch)
            self._begun[index] = future
            if self._queue is not None:
                # The state of the checkpoint is that before the batch of its weights.
                if index == first + self._ahead:
                    if (seen := self._unseen.pop(first, None)) is not None:
                        self._observe(seen)
                    self._queue.restore(batch.queue, index + 1)
                self._unseen[index] = batch

    def _from_json(self, stored: JsonObject) -> SampledBatch:
        numbers, index = stored["numbers"], int(stored["index"])
        prompts = self._batches[index] if self._queue is None else self._queue.prompts(numbers)
        groups = [_group(prompts, one) for one in stored["groups"]]
        requests = FailedRequests(
            {int(place): RolloutError(text) for place, text in stored["failed"].items()}, stored["num_retries"]
        )
        left_out = [_trajectory(row) for row in stored["left_out"]]
        sampled = StepRollouts(groups, requests, left_out=left_out, **stored["step"])
        refused = [RejectedRow(**row) for row in stored["refused"]]
        return SampledBatch(index, stored["version"], prompts, sampled, refused, stored["metrics"], numbers, stored["queue"])


def clear(out: Path) -> None:
    """Delete the batches of a run that has sampled ahead, and no longer does."""
    for _, path in stored(out / FOLDER):
        path.unlink(missing_ok=True)


def stored(folder: Path) -> list[tuple[int, Path]]:
    """Return the stored batches by their numbers."""
    names = [(NAME.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(match[1]), path) for match, path in names if match is not None)


def _as_json(batch: SampledBatch) -> JsonObject:
    sampled = batch.sampled
    groups = [
        {
            **{name: value for name, value in vars(group).items() if name != "prompt"},
            "parts": [dict(parts) for parts in group.parts],
            "returns": [[turn.tolist() for turn in attempt] for attempt in group.returns],
            "trajectories": [_row(one) for one in group.trajectories],
        }
        for group in sampled.groups
    ]
    fields = ("sampling_s", "reward_s", "has_turns", "refills", "penalties")
    return {
        "index": batch.index,
        "version": batch.version,
        "groups": groups,
        "failed": {str(place): str(error) for place, error in sampled.requests.failed.items()},
        "num_retries": sampled.requests.num_retries,
        "left_out": [_row(one) for one in sampled.left_out],
        "step": {name: getattr(sampled, name) for name in fields},
        "refused": [vars(one) for one in batch.refused],
        "metrics": batch.metrics,
        "numbers": batch.numbers,
        "queue": batch.queue,
    }


def _group(prompts: Sequence[RenderedPrompt], row: JsonObject) -> RolloutGroup:
    trajectories = [_trajectory(one) for one in row["trajectories"]]
    returns = [[np.array(turn, np.float64) for turn in attempt] for attempt in row["returns"]]
    return RolloutGroup(prompts[row["place"]], **{**row, "trajectories": trajectories, "returns": returns})


def _row(trajectory: Trajectory) -> JsonObject:
    branches = [[vars(segment) for segment in branch] for branch in trajectory.branches]
    return {**vars(trajectory), "branches": branches, "parts": dict(trajectory.parts)}


def _trajectory(row: JsonObject) -> Trajectory:
    branches = tuple(tuple(Segment(**segment) for segment in branch) for branch in row["branches"])
    return Trajectory(**{**row, "branches": branches})


def _plain_number(value: Any) -> Any:
    """Return a number of numpy as one of Python, for JSON."""
    return value.item()
