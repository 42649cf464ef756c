"""Calls of a reward, in this process or in workers. A call that raises, returns no number or hangs never counts as zero.

A slow reward in worker processes does not delay sampling, and a worker that hangs can be stopped.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import logging
import math
import queue
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, SupportsFloat

from cookbook.config.typed import construct_target
from cookbook.errors import BadRowError, ConfigError, CookbookError, DataError, RolloutError, described
from cookbook.futures import Awaiter
from cookbook.protocols import ServiceReward
from cookbook.sampling import workers
from cookbook.sampling.rewards.builtin import Limits, Python
from cookbook.sampling.rewards.weighted import Score, Weighted
from cookbook.sampling.workers import Handler, TraceError, WorkerEndedError, WorkerProcess, WorkerTimeoutError, trace_of
from cookbook.types import JsonObject

if TYPE_CHECKING:
    from cookbook.data import RenderedPrompt, Row
    from cookbook.protocols import Reward
    from cookbook.sampling.trajectory import Trajectory

log = logging.getLogger(__name__)

# Parameters of a reward that takes a group or a trajectory.
NAMES = ("completion", "row", "group", "trajectory")
# Arguments of ServiceReward.start.
SERVICE_NAMES = ("completion", "row", "trajectory")
HANDLER = "cookbook.sampling.rewards.runner:handler"

PendingReward = Callable[[], float]
"""Wait for a reward and return it. Raises RolloutError, which names the row, if the call gave no number."""
PendingScores = Callable[[], list[Score]]
"""Wait for the scores of a prompt's completions and return them. Raises RolloutError, which names the row, if a call failed."""


class RewardRunner:
    """Calls a reward as its :class:`Limits` say. Rewards do not depend on the process or the time of the call.

    ``key`` is the reward's key in the configuration, for errors.

    Raises:
        ConfigError: the reward has workers and cannot be constructed in another process, or has unknown parameters.
    """

    def __init__(self, reward: Reward | Weighted, key: str = "reward") -> None:
        self.reward = reward
        self._key = key
        self._awaiter = Awaiter()
        self._parts: dict[str, RewardRunner] = {}
        self._named: Sequence[str] = ()
        self._service: ServiceReward | None = None
        self._processes: list[WorkerProcess] = []
        if isinstance(reward, Weighted):
            self._parts = {name: RewardRunner(part, f"{key}.parts.{name}") for name, part in reward.parts.items()}
        else:
            self._function = _function(reward)
            # Python compares a value with a protocol member by member, too slowly for every completion.
            self._service = reward if isinstance(reward, ServiceReward) else None
            self._named = SERVICE_NAMES if self._service is not None else named_parameters(self._function)
            if isinstance(reward, Limits) and reward.workers and self._service is None:
                configuration = workers.configuration(reward, key)
                self._processes = [WorkerProcess(HANDLER, configuration, reward.timeout_s) for _ in range(reward.workers)]
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        # A thread waits for each process. Threads and processes start with their first call.
        self._threads = ThreadPoolExecutor(max(len(self._processes), 1), thread_name_prefix="reward")

    def submit(self, completion: str, row: Row) -> PendingReward:
        """Start the call for one completion of ``row``, whose prompt is not known."""
        messages = [{"role": "user", "content": ""}, {"role": "assistant", "content": completion}]
        pending = self.submit_group([completion], row, [messages])
        return lambda: pending()[0].value

    def submit_attempts(self, prompt: RenderedPrompt, attempts: Sequence[Trajectory]) -> PendingScores:
        """Start the calls for all attempts at a prompt."""
        messages = [self._messages(prompt, attempt) for attempt in attempts]
        return self.submit_group([attempt.text for attempt in attempts], prompt.row, messages)

    def submit_group(self, completions: Sequence[str], row: Row, trajectories: Sequence[Sequence[JsonObject]]) -> PendingScores:
        """Start the calls for all completions of a prompt. Without workers, a call is made when its result is asked for.

        Args:
            trajectories: the messages of each attempt, with ``role`` and ``content``, from the prompt to its end.
        """
        if isinstance(self.reward, Weighted):
            of_parts = {name: part.submit_group(completions, row, trajectories) for name, part in self._parts.items()}
            combine = self.reward.combine
            return lambda: combine({name: pending() for name, pending in of_parts.items()})
        results = [self._start(one) for one in arguments(self._named, completions, row.values, trajectories)]
        return lambda: [score for result in results for score in self._scores(result(), row.where)]

    def _messages(self, prompt: RenderedPrompt, attempt: Trajectory) -> list[JsonObject]:
        """Return the messages of an attempt; empty if the reward does not read them."""
        if not self._parts and "trajectory" not in self._named:
            return []
        if attempt.branches and attempt.branches[0][0].tokens != prompt.tokens:
            # An environment has added its first observation.
            return attempt.messages()
        # The prompt's own messages: its tokens as text would have the marks of the chat template.
        own = [{"role": "user", "content": prompt.text}] if prompt.example is None else prompt.example.prompt_messages
        return [*own, *attempt.messages()[1:]]

    def immediate(self) -> list[RewardRunner]:
        """Return the runners of the rewards that run in the main process: of this reward, or of its parts."""
        if self._parts:
            return [one for part in self._parts.values() for one in part.immediate()]
        return [] if self._processes or self._service is not None else [self]

    def fingerprint(self) -> str:
        """Text that differs between different rewards, and is the same in every process."""
        if isinstance(self.reward, Weighted):
            return json.dumps([self.reward.by_name(), {name: part.fingerprint() for name, part in self._parts.items()}])
        if isinstance(self.reward, Limits):
            return self.reward.fingerprint()
        kind = type(self.reward)
        return repr(self.reward) if dataclasses.is_dataclass(kind) else f"{kind.__module__}:{kind.__qualname__}"

    def close(self) -> None:
        """Stop the processes and their current calls."""
        for part in self._parts.values():
            part.close()
        if self._service is not None:
            self._service.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.retire()
        self._threads.shutdown()
        self._awaiter.close()

    def _start(self, given: Arguments) -> Callable[[], list[Score] | RewardFailure]:
        if self._service is not None:
            answer = self._service.start(**given.by_name)
            return lambda: call(lambda **_: answer(), given, self._awaiter)
        if self._processes:
            return self._threads.submit(self._call_worker, given).result
        return lambda: call(self._function, given, self._awaiter)

    def _call_worker(self, given: Arguments) -> list[Score] | RewardFailure:
        process = self._idle.get()
        try:
            return unpacked(process.call([given.by_place, given.by_name]))
        except TypeError as error:
            return RewardFailure(
                f"the row cannot be sent to a worker ({error}); set reward.workers=0 and reward.timeout_s=null"
            )
        except WorkerTimeoutError:
            assert isinstance(self.reward, Limits)
            limit = f"{self.reward.timeout_s:g} s"
            return RewardFailure(f"the reward has not returned after {limit}; fix the reward or row, or raise reward.timeout_s")
        except WorkerEndedError as error:
            return RewardFailure(f"the reward ended its process ({error}); fix the reward or row")
        finally:
            self._idle.put(process)

    def _scores(self, result: list[Score] | RewardFailure, where: str) -> list[Score]:
        if not isinstance(result, RewardFailure):
            return result
        if result.message.startswith("the reward raised"):
            # The trace is for log.txt; the terminal shows one line.
            log.info("%s: the reward's own trace", where, exc_info=result.cause)
        kind = BadRowError if result.of_row else RolloutError
        raise kind(f"{where}: {result.message.replace('reward.', f'{self._key}.')}") from result.cause


def _function(reward: Reward) -> Callable[..., object]:
    """Return the function that the runner calls: the user's own, whose parameters decide what it gets."""
    return reward.function if isinstance(reward, Python) else reward


def handler(configuration: JsonObject) -> Handler:
    """Construct a reward in a worker process. Its requests are the arguments of a call, by place and by name."""
    function = _function(construct_target(configuration, "reward"))
    awaiter = Awaiter()
    return lambda request: packed(call(function, Arguments(*request), awaiter))


# ---- one call ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RewardFailure:
    """Reason why a call gave no number. ``message`` follows the location of the row; ``cause`` is what the reward raised.

    ``of_row``: the row is at fault, for any completion.
    """

    message: str
    cause: BaseException | None = None
    of_row: bool = False


def part_means(parts: Sequence[Mapping[str, float]], prefix: str) -> dict[str, float]:
    """Return the mean of each part as a metric ``prefix + name``. A part that a score lacks counts as 0, as in the sum."""
    names = dict.fromkeys(name for one in parts for name in one)
    return {f"{prefix}{name}": math.fsum(one.get(name, 0.0) for one in parts) / len(parts) for name in names}


@dataclass(frozen=True)
class Arguments:
    """Arguments of one call, JSON-compatible if the row is."""

    by_place: Sequence[object] = ()
    by_name: JsonObject = field(default_factory=dict)

    @property
    def group_size(self) -> int | None:
        """Completions that the call judges together; None for a call about one completion."""
        return len(self.by_name["group"]) if "group" in self.by_name else None


def named_parameters(function: Callable[..., object]) -> list[str]:
    """Return the parameters of a reward that has one named ``group`` or ``trajectory``; empty for any other reward.

    Raises:
        ConfigError: the reward also has parameters that cookbook does not know.
    """
    try:
        parameters = inspect.signature(function).parameters
    # A built-in function has none.
    except (TypeError, ValueError):
        return []
    if not {"group", "trajectory"} & parameters.keys():
        return []
    given = [name for name in NAMES if name in parameters and not (name == "completion" and "group" in parameters)]
    for name, one in parameters.items():
        if name not in given and one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            kinds = "group, row and trajectory" if "group" in parameters else "completion, row and trajectory"
            raise ConfigError(f"reward: the function has a parameter {name!r}; use {kinds}, or give {name} a default")
    return given


def arguments(
    named: Sequence[str], completions: Sequence[str], row: JsonObject, trajectories: Sequence[Sequence[JsonObject]]
) -> list[Arguments]:
    """Return the arguments of each call for the completions of a prompt: one call per completion, or one for the group.

    With ``group``, ``trajectory`` is a list with the trajectory of each completion.
    """
    if "group" in named:
        values = {"group": list(completions), "row": row, "trajectory": [list(one) for one in trajectories]}
        return [Arguments(by_name={name: values[name] for name in named})]
    if not named:
        return [Arguments([completion, row]) for completion in completions]
    both = zip(completions, trajectories, strict=True)
    each = [{"completion": completion, "row": row, "trajectory": list(trajectory)} for completion, trajectory in both]
    return [Arguments(by_name={name: values[name] for name in named}) for values in each]


def call(reward: Callable[..., object], given: Arguments, awaiter: Awaiter) -> list[Score] | RewardFailure:
    """Return the score of the completion, or of each completion of the group."""
    try:
        value = awaiter.result(reward(*given.by_place, **given.by_name))
    except CookbookError as error:
        return RewardFailure(f"reward: {error}", error, of_row=isinstance(error, DataError))
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001 - the reward is the user's code
        return RewardFailure(f"the reward raised {described(error)}; fix the reward or row", error)
    size = given.group_size
    if size is None:
        score = _score(value)
        return score if isinstance(score, RewardFailure) else [score]
    # An array of no dimension has __iter__, and no length.
    if not isinstance(value, Iterable) or isinstance(value, str | Mapping) or not getattr(value, "shape", True):
        kind = type(value).__name__
        return RewardFailure(f"the reward returned {kind} for a group of {size}; return a list of {size} numbers")
    scores = []
    for one in (values := list(value)):
        score = _score(one)
        if isinstance(score, RewardFailure):
            return score
        scores.append(score)
    if len(values) != size:
        return RewardFailure(f"the reward returned {len(values)} values for a group of {size}; return one per completion")
    return scores


def _score(value: object) -> Score | RewardFailure:
    if not isinstance(value, Mapping):
        number = _number(value, "")
        return number if isinstance(number, RewardFailure) else Score(number)
    if not value:
        return RewardFailure("the reward returned no parts; return one number or at least one part")
    parts = {}
    for name, part in value.items():
        if not isinstance(name, str) or not name or any(mark.isspace() for mark in name):
            return RewardFailure(f"the reward's parts have the name {name!r}; use a text without spaces")
        number = _number(part, f" as {name!r}")
        if isinstance(number, RewardFailure):
            return number
        parts[name] = number
    # A sum of finite numbers may overflow.
    total = _number(sum(parts.values()), " as the sum of its parts")
    return total if isinstance(total, RewardFailure) else Score(total, parts)


def _number(value: object, place: str) -> float | RewardFailure:
    try:
        number = float(value) if isinstance(value, float | int | SupportsFloat) else None
    # An array of several numbers.
    except (TypeError, ValueError):
        number = None
    if number is None:
        remedy = "await it, with asyncio.gather if there are several" if inspect.isawaitable(value) else "return one float"
        return RewardFailure(f"the reward returned {type(value).__name__}{place}, not a number; {remedy}")
    if not math.isfinite(number):
        return RewardFailure(f"the reward returned {number}{place}; return a finite number")
    return number


# The form in which a worker sends the result of a call.


def packed(result: list[Score] | RewardFailure) -> object:
    """Return the result as JSON-compatible values, with the traceback of a failure's cause as text."""
    if isinstance(result, RewardFailure):
        return {"message": result.message, "trace": trace_of(result.cause), "of_row": result.of_row}
    return [[score.value, dict(score.parts)] for score in result]


def unpacked(answer: list[tuple[float, dict[str, float]]] | JsonObject) -> list[Score] | RewardFailure:
    """Return the result of a call that a worker has packed."""
    if isinstance(answer, list):
        return [Score(value, parts) for value, parts in answer]
    cause = None if answer["trace"] is None else TraceError(answer["trace"])
    return RewardFailure(answer["message"], cause, answer["of_row"])
