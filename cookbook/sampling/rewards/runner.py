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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, SupportsFloat

from cookbook.config.typed import construct_target
from cookbook.data.reasoning import without_reasoning
from cookbook.errors import BadRowError, ConfigError, CookbookError, DataError, RolloutError, described
from cookbook.futures import Awaiter
from cookbook.protocols import ModelReward, ServiceReward
from cookbook.sampling import workers
from cookbook.sampling.rewards.builtin import Limits, Python
from cookbook.sampling.rewards.signature import Arguments, Judged, Signature, Style, arguments
from cookbook.sampling.rewards.weighted import Parts, Score, Weighted
from cookbook.sampling.workers import (
    GradeError,
    Handler,
    TraceError,
    WorkerEndedError,
    WorkerProcess,
    WorkerTimeoutError,
    trace_of,
)
from cookbook.types import JsonObject
from cookbook.utils.words import counted

if TYPE_CHECKING:
    from cookbook.data import RenderedPrompt, Row
    from cookbook.protocols import Reward
    from cookbook.sampling.trajectory import Trajectory

log = logging.getLogger(__name__)

# Arguments of ServiceReward.start.
SERVICE = Signature(Style.single, ("completion", "row", "trajectory"))
HANDLER = "cookbook.sampling.rewards.runner:handler"

Scores = list[Score | None]
"""Scores of completions; None: the reward does not apply to the completion."""
PendingReward = Callable[[], float]
"""Wait for a reward and return it. Raises RolloutError, which names the row, if the call gave no number."""
PendingScores = Callable[[], list[Score]]
"""Wait for the scores of a prompt's completions and return them. Raises RolloutError, which names the row, if a call failed."""
PendingCall = Callable[[], "Scores | RewardFailure"]
"""Wait for one call of a reward, or make it, and return its scores."""


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
        self._signature = Signature(Style.place)
        # Optimizer steps that are finished, for rewards that change with them.
        self.step = 0
        self._service: ServiceReward | None = None
        self._model: ModelReward | None = None
        self._processes: list[WorkerProcess] = []
        if isinstance(reward, Weighted):
            self._parts = {name: RewardRunner(part, f"{key}.parts.{name}") for name, part in reward.parts.items()}
        else:
            self._function = function_of(reward)
            # Python compares a value with a protocol member by member, too slowly for every completion.
            self._model = reward if isinstance(reward, ModelReward) else None
            self._service = reward if isinstance(reward, ServiceReward) and self._model is None else None
            self._signature = SERVICE if self._service is not None else Signature.of(self._function)
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

    def check(self, columns: Collection[str], *, has_environment: bool = False) -> None:
        """Check that the parameters of the function are arguments that it can get, before anything is sampled.

        Raises:
            ConfigError: a parameter is unknown, or needs an environment.
        """
        for part in self._parts.values():
            if part.reads_environments:
                raise ConfigError(f"{part._key}: a function of environments cannot be one of several rewards; use it alone")
            part.check(columns, has_environment=has_environment)
        if not self._parts and self._service is None:
            try:
                self._signature.check(columns, has_environment=has_environment)
            except ConfigError as error:
                raise ConfigError(str(error).replace("reward:", f"{self._key}:", 1)) from None

    @property
    def reads_environments(self) -> bool:
        """Whether the function gets environments, so that it is called where they are."""
        return self._signature.reads_environments

    def grader(self) -> str | None:
        """Return the configuration with which environments call the function, as JSON; None if it gets no environment."""
        if not self.reads_environments:
            return None
        reward = workers.configuration(self.reward, self._key).decode()
        return workers.configuration(EnvironmentGrader(reward), self._key).decode()

    def submit_attempts(self, prompt: RenderedPrompt, attempts: Sequence[Trajectory]) -> PendingScores:
        """Start the calls for all attempts at a prompt."""
        judged = Judged(
            [attempt.text for attempt in attempts],
            prompt.row.values,
            [self._messages(prompt, attempt) for attempt in attempts],
            _prompt_of(prompt),
            [[token for turn in attempt.turns for token in turn.tokens] for attempt in attempts],
        )
        opened = [[turn.opened for turn in attempt.turns] for attempt in attempts]
        return self._submit(judged, prompt.row.where, opened, attempts)

    def _check_steps(self, score: Score, attempt: Trajectory, where: str) -> None:
        """Raise RolloutError unless a list of rewards has one number per turn or per token of the attempt."""
        counts = len(attempt.turns), attempt.num_sampled_tokens
        if score.steps and len(score.steps) not in counts:
            raise RolloutError(
                f"{where}: the reward returned {counted(len(score.steps), 'number')} for a completion of "
                f"{counted(counts[1], 'token')} in {counted(counts[0], 'turn')}; return one number, one per turn, or one per "
                "token"
            )

    def submit_group(self, completions: Sequence[str], row: Row, trajectories: Sequence[Sequence[JsonObject]]) -> PendingScores:
        """Start the calls for all completions of a prompt. Without workers, a call is made when its result is asked for.

        Args:
            trajectories: the messages of each attempt, with ``role`` and ``content``, from the prompt to its end.
        """
        return self._submit(Judged(completions, row.values, trajectories), row.where, [[] for _ in completions])

    def _submit(
        self, judged: Judged, where: str, opened: Sequence[Sequence[str]], attempts: Sequence[Trajectory] = ()
    ) -> PendingScores:
        """Start the calls of the reward, or of each of its parts. Rewards of turns or tokens must fit the ``attempts``."""
        runners = self._parts or {"": self}
        calls: dict[str, list[PendingCall]] = {}
        for name, runner in runners.items():
            runner.step = self.step
            calls[name] = runner._start_calls(judged, opened)

        def result() -> list[Score]:
            by_name: dict[str, Scores] = {}
            for name, runner in runners.items():
                by_name[name] = []
                for pending in calls[name]:
                    by_name[name] += runner._checked(pending(), where)
            if isinstance(self.reward, Weighted):
                scores = self.reward.combine(by_name, where)
            else:
                scores = [self._applied(score, where) for score in by_name[""]]
            if attempts:
                for score, attempt in zip(scores, attempts, strict=True):
                    self._check_steps(score, attempt, where)
            return scores

        return result

    def _start_calls(self, judged: Judged, opened: Sequence[Sequence[str]]) -> list[PendingCall]:
        """Start the calls of one reward: one call per completion, or one for the group."""
        judged = dataclasses.replace(judged, step=self.step)
        if isinstance(self.reward, Limits) and self.reward.answer_only:
            judged = _without_reasoning(judged, opened)
        try:
            calls = arguments(self._signature, judged)
        except DataError as error:
            failure = RewardFailure(f"{self._key}: {error}", error, of_row=True)
            return [lambda: failure]
        return [self._start(call_arguments) for call_arguments in calls]

    def _applied(self, score: Score | None, where: str) -> Score:
        if score is None:
            # None means that a reward does not apply, and it is the only one.
            raise RolloutError(f"{where}: the reward returned NoneType, not a number; return one float")
        return score

    def _messages(self, prompt: RenderedPrompt, attempt: Trajectory) -> list[JsonObject]:
        """Return the messages of an attempt; empty if the reward does not read them."""
        if not self._parts and not self._signature.reads_messages:
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
            return [runner for part in self._parts.values() for runner in part.immediate()]
        is_elsewhere = self._processes or self._service is not None or self._model is not None
        return [] if is_elsewhere else [self]

    @property
    def normalized(self) -> Mapping[str, float] | None:
        """The weights of the rewards that are normalized one by one; None: only their sum is."""
        if not isinstance(self.reward, Weighted) or self.reward.normalize is None:
            return None
        return {name: weight for name, weight in self.reward.by_name().items() if weight}

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

    def _start(self, inputs: Arguments) -> PendingCall:
        """Start a call. Without workers and service, the function is called when the result is asked for."""
        if self._model is not None:
            try:
                result = self._model.start(**inputs.by_name)
            except CookbookError as error:
                failure = RewardFailure(f"reward: {error}", error, of_row=isinstance(error, DataError))
                return lambda: failure
            return lambda: call(lambda **_: result(), inputs, self._awaiter)
        if self._service is not None:
            answer = self._service.start(**inputs.by_name)
            return lambda: call(lambda **_: answer(), inputs, self._awaiter)
        if self._processes:
            return self._threads.submit(self._call_worker, inputs).result
        return partial(call, self._function, inputs, self._awaiter)

    def _call_worker(self, inputs: Arguments) -> Scores | RewardFailure:
        process = self._idle.get()
        try:
            return unpacked(process.call([inputs.by_place, inputs.by_name, inputs.size]))
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

    def _checked(self, result: Scores | RewardFailure, where: str) -> Scores:
        """Return the scores of a call. Raise the error of a call that has failed, with the row ``where``."""
        if not isinstance(result, RewardFailure):
            return result
        if result.message.startswith("the reward raised"):
            # The trace is for log.txt; the terminal shows one line.
            log.info("%s: the reward's own trace", where, exc_info=result.cause)
        kind = BadRowError if result.of_row else RolloutError
        raise kind(f"{where}: {result.message.replace('reward.', f'{self._key}.')}") from result.cause


def function_of(reward: Reward) -> Callable[..., object]:
    """Return the function that the runner calls: the user's own, whose parameters decide what it gets."""
    return reward.function if isinstance(reward, Python) else reward


def handler(configuration: JsonObject) -> Handler:
    """Construct a reward in a worker process. Its requests are the arguments of a call, by place and by name."""
    function = function_of(construct_target(configuration, "reward"))
    awaiter = Awaiter()
    return lambda request: packed(call(function, Arguments(*request), awaiter))


@dataclass(frozen=True)
class EnvironmentGrader:
    """A reward function with the parameter ``environment`` or ``environments``, called in the process of the environment.

    It is called once per episode, so that TRL's lists have one item. ``reward`` is its configuration as JSON.
    """

    reward: str

    @cached_property
    def _reward(self) -> Any:
        return construct_target(json.loads(self.reward), "reward")

    @cached_property
    def _function(self) -> Callable[..., object]:
        return function_of(self._reward)

    def __call__(self, environment: object, ended: JsonObject, awaiter: Awaiter) -> tuple[float, Parts]:
        signature = Signature.of(self._function)
        row = ended["row"]
        judged = Judged([ended["text"]], row, [ended["trajectory"]], _own_prompt(row), step=ended["step"])
        if isinstance(self._reward, Limits) and self._reward.answer_only:
            judged = _without_reasoning(judged, [ended["opened"]])
        try:
            [inputs] = arguments(signature, judged)
        except DataError as error:
            raise GradeError(f"reward: {error}") from None
        seen = {"environment": environment, "environments": [environment]}
        by_name = {**inputs.by_name, **{name: seen[name] for name in signature.names & seen.keys()}}
        result = call(self._function, dataclasses.replace(inputs, by_name=by_name), awaiter)
        if isinstance(result, RewardFailure):
            raise GradeError(result.message) from result.cause
        [score] = result
        if score is None:
            raise GradeError("the reward returned NoneType, not a number; return one float")
        if score.steps:
            raise GradeError("the reward returned a list for an environment; return one number, and rewards of turns from step")
        return score.value, score.parts


# ---- one call ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RewardFailure:
    """Reason why a call gave no number. ``message`` follows the location of the row; ``cause`` is what the reward raised.

    ``of_row``: the row is at fault, for any completion.
    """

    message: str
    cause: BaseException | None = None
    of_row: bool = False


def part_means(parts: Sequence[Parts], prefix: str) -> dict[str, float]:
    """Return the mean of each part as a metric ``prefix + name``.

    A part that a score lacks counts as 0, as in the sum. A part that is None, because the reward is
    not applicable, is left out of the mean.
    """
    names = dict.fromkeys(name for scores in parts for name in scores)
    means = {}
    for name in names:
        values = [value for scores in parts if (value := scores.get(name, 0.0)) is not None]
        if values:
            means[f"{prefix}{name}"] = math.fsum(values) / len(values)
    return means


def _prompt_of(prompt: RenderedPrompt) -> object:
    """Return the prompt of the data: the text, or the list of messages of a conversation."""
    return _own_prompt(prompt.row.values) or prompt.question or prompt.text


def _own_prompt(row: JsonObject) -> object:
    for column in ("prompt", "messages"):
        value = row.get(column)
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            # The answer of the data may follow the prompt.
            own = list(value)
            while column == "messages" and own and own[-1].get("role") == "assistant":
                own.pop()
            return own
        if isinstance(value, str):
            return value
    return ""


def _without_reasoning(judged: Judged, opened: Sequence[Sequence[str]]) -> Judged:
    """Return the completions and messages of the model without reasoning; those whose reasoning is unfinished are empty.

    ``opened`` are for each completion the tags that the prompts of its turns have already opened, so that the text of a turn
    begins inside of reasoning.
    """
    pairs = zip(opened, judged.completions, strict=True)
    completions = [without_reasoning((tags[-1] if tags else "") + text) or "" for tags, text in pairs]
    trajectories = []
    for tags, messages in zip(opened, judged.trajectories, strict=True):
        said = [dict(message) for message in messages]
        answers = [message for message in said if message.get("role") == "assistant"]
        # The prompt of the data may have earlier answers, which no turn has sampled.
        before = [""] * (len(answers) - len(tags)) + list(tags)
        for tag, message in zip(before[len(before) - len(answers) :], answers, strict=True):
            message["content"] = without_reasoning(tag + str(message.get("content", ""))) or ""
        trajectories.append(said)
    return dataclasses.replace(judged, completions=completions, trajectories=trajectories)


def call(reward: Callable[..., object], inputs: Arguments, awaiter: Awaiter) -> Scores | RewardFailure:
    """Return the score of the completion, or of each completion of the group; None: the reward does not apply."""
    by_name = inputs.by_name
    if isinstance(state := by_name.get("trainer_state"), Mapping):
        # TRL's functions read trainer_state.global_step.
        by_name = {**by_name, "trainer_state": SimpleNamespace(**state)}
    try:
        value = awaiter.result(reward(*inputs.by_place, **by_name))
    except CookbookError as error:
        return RewardFailure(f"reward: {error}", error, of_row=isinstance(error, DataError))
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001 - the reward is the user's code
        return RewardFailure(f"the reward raised {described(error)}; fix the reward or row", error)
    size = inputs.size
    if size is None:
        score = _score(value, is_of_verl="solution_str" in by_name)
        return score if isinstance(score, RewardFailure) else [score]
    # An array of no dimension has __iter__, and no length.
    if not isinstance(value, Iterable) or isinstance(value, str | Mapping) or not getattr(value, "shape", True):
        kind = type(value).__name__
        return RewardFailure(f"the reward returned {kind} for a group of {size}; return a list of {size} numbers")
    scores: Scores = []
    for item in (values := list(value)):
        score = _score(item)
        if isinstance(score, RewardFailure):
            return score
        scores.append(score)
    if len(values) != size:
        return RewardFailure(f"the reward returned {len(values)} values for a group of {size}; return one per completion")
    return scores


def _score(value: object, *, is_of_verl: bool = False) -> Score | RewardFailure | None:
    if value is None:
        return None
    if (steps := _steps(value)) is not None:
        numbers = [_number(step, f" at index {index}") for index, step in enumerate(steps)]
        if failures := [number for number in numbers if isinstance(number, RewardFailure)]:
            return failures[0]
        finite = [number for number in numbers if not isinstance(number, RewardFailure)]
        total = _number(math.fsum(finite), " as the sum of its list")
        return total if isinstance(total, RewardFailure) else Score(total, steps=tuple(finite))
    if not isinstance(value, Mapping):
        number = _number(value, "")
        return number if isinstance(number, RewardFailure) else Score(number)
    if not value:
        return RewardFailure("the reward returned no parts; return one number or at least one part")
    # Of verl's mappings, the score is the reward, and the rest are notes, of which numbers are parts.
    is_of_verl = is_of_verl and "score" in value
    parts: dict[str, float] = {}
    for name, part in value.items():
        if is_of_verl and name != "score" and not isinstance(part, float | int):
            continue
        if not isinstance(name, str) or not name or any(mark.isspace() for mark in name):
            return RewardFailure(f"the reward's parts have the name {name!r}; use a text without spaces")
        number = _number(part, f" as {name!r}")
        if isinstance(number, RewardFailure):
            return number
        parts[name] = number
    if is_of_verl:
        return Score(parts["score"], parts)
    # A sum of finite numbers may overflow.
    total = _number(sum(parts.values()), " as the sum of its parts")
    return total if isinstance(total, RewardFailure) else Score(total, parts)


def _steps(value: object) -> list[object] | None:
    """Return the rewards of turns or tokens: of a list, tuple or array of one dimension; None: the value is one reward."""
    if isinstance(value, list | tuple) or (isinstance(value, Iterable) and len(getattr(value, "shape", ())) == 1):
        return list(value) or None
    return None


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


def packed(result: Scores | RewardFailure) -> object:
    """Return the result as JSON-compatible values, with the traceback of a failure's cause as text."""
    if isinstance(result, RewardFailure):
        return {"message": result.message, "trace": trace_of(result.cause), "of_row": result.of_row}
    return [None if score is None else [score.value, dict(score.parts), list(score.steps)] for score in result]


def unpacked(answer: list[tuple[float, dict[str, float | None], list[float]] | None] | JsonObject) -> Scores | RewardFailure:
    """Return the result of a call that a worker has packed."""
    if isinstance(answer, list):
        return [None if score is None else Score(score[0], score[1], tuple(score[2])) for score in answer]
    cause = None if answer["trace"] is None else TraceError(answer["trace"])
    return RewardFailure(answer["message"], cause, answer["of_row"])
