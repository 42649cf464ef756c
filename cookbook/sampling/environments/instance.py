"""One environment during one episode: the user's object, its tools, and the answers to what the model says."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

from cookbook.config.typed import construct_target
from cookbook.errors import described, shortened
from cookbook.futures import Awaiter
from cookbook.sampling.environments.config import Contract, EnvironmentConfig, tools_of
from cookbook.sampling.environments.tool_calls import Calls, ToolCall, parse_calls
from cookbook.sampling.workers import GradeError, Handler, trace_of
from cookbook.types import JsonObject

# Exceptions of the user's code that end an episode or fail a tool. SystemExit and CancelledError do not inherit from Exception.
FAILURES = (Exception, SystemExit, asyncio.CancelledError)


class EnvironmentFailedError(Exception):
    """A method of an environment has returned something that the contract does not allow."""


@dataclass
class Reply:
    """Answer of an environment. Lists of messages go through the chat template; None ends the episode.

    ``calls``, ``malformed_calls`` and ``failed_calls`` count calls of tools in the turn. ``opponent_moves``: the observation is
    for the other player of a game, whose turn is next.
    """

    observation: str | list[JsonObject] | None
    done: bool = False
    calls: int = 0
    malformed_calls: int = 0
    failed_calls: int = 0
    opponent_moves: bool = False


@dataclass(frozen=True)
class EarnedReward:
    """Reward of an episode, with its named parts if it has any, and the rewards of its turns if it is their sum."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    by_turn: Sequence[float] = ()


Grade = Callable[[object, JsonObject, Awaiter], tuple[float, Mapping[str, float]]]
"""A reward function that sees the environment: returns the reward and its parts. Raises GradeError: the function failed."""


class Instance:
    """The user's object, called as its contract says. ``rewards`` are those that ``step`` has returned."""

    def __init__(self, environment: object, contract: Contract) -> None:
        self._environment: Any = environment
        self._contract = contract
        self._tools = tools_of(environment)
        # Lives as long as the episode.
        self._awaiter = Awaiter()
        self._rewards: list[float] = []
        # The rewards of each turn of the trained side. Those of an opponent's move belong to the turn before it.
        self._by_turn: list[float] = []

    def reset(self, values: JsonObject, seed: int) -> Reply:
        """Begin the episode of a row. The seed is for a ``reset`` that takes it, if the row has no column of that name."""
        contract = self._contract
        available = {"seed": seed, **values}
        arguments = {key: value for key, value in available.items() if contract.takes_all or key in contract.columns}
        # The environment may change its arguments, and the row is used again.
        arguments = copy.deepcopy(arguments)
        observation = self._awaiter.result(self._environment.reset(**arguments))
        return self._reply(_observation(observation, "reset"))

    def act(self, text: str, read: Calls | None = None) -> Reply:
        """Answer a completion: by ``step``, or by the results of the tools that it calls. Without a call, it is the last.

        ``read`` are the calls as read from the tokens; None: they are read from the text.
        """
        if not self._tools:
            if not self._opponent_moves:
                self._by_turn.append(0.0)
            return self._step(self._awaiter.result(self._environment.step(text)))
        calls = (
            parse_calls(text, self._contract.tools)
            if read is None
            else [call if isinstance(call, str) else ToolCall(*call) for call in read]
        )
        reply = Reply([], done=not calls)
        assert isinstance(reply.observation, list)
        for call in calls:
            content, name = self._called(call, reply)
            reply.observation.append({"role": "tool", "name": name, "content": content})
        reply.opponent_moves = self._opponent_moves
        return reply

    def reward(self, ended: JsonObject | None = None, grade: Grade | None = None) -> EarnedReward | None:
        """Return the reward of the episode: of ``get_reward``, else the sum of the rewards of ``step``, else of ``grade``.

        None: all of them are missing. ``ended`` has the ``text`` of the last completion and the ``trajectory``, all messages.
        """
        ended = ended or {}
        if (names := self._contract.reward_arguments) is not None:
            arguments = {name: ended["text" if name == "completion" else name] for name in names}
            return _earned(self._awaiter.result(self._environment.get_reward(**arguments)))
        if self._rewards:
            # A sum of finite numbers may overflow.
            return EarnedReward(_number(sum(self._rewards), "step"), by_turn=self._by_turn)
        return None if grade is None else EarnedReward(*grade(self._environment, ended, self._awaiter))

    def close(self) -> None:
        """Call the environment's ``close``, if it has one."""
        try:
            if callable(close := getattr(self._environment, "close", None)):
                self._awaiter.result(close())
        finally:
            self._awaiter.close()

    def _called(self, call: ToolCall | str, reply: Reply) -> tuple[str, str]:
        """Return the text of a tool's result, or of its failure, and the name of the tool."""
        if isinstance(call, str):
            reply.malformed_calls += 1
            return f"error: the call could not be read: {call}", ""
        tool = self._tools.get(call.name)
        if tool is None:
            reply.malformed_calls += 1
            return f"error: no tool is called {call.name!r}; there are {', '.join(sorted(self._tools))}", call.name
        reply.calls += 1
        try:
            result = self._awaiter.result(tool(**call.arguments))
            return (result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)), call.name
        # The model gets the error as an answer, as in TRL.
        except FAILURES as error:
            reply.failed_calls += 1
            return f"error: {error}", call.name

    def _step(self, result: object) -> Reply:
        """Read what ``step`` returned: an observation, or a tuple of observation, reward and whether it is done."""
        done = None
        if isinstance(result, tuple):
            if len(result) not in (2, 3):
                raise EnvironmentFailedError(f"step returned {len(result)} values; return observation, reward and done")
            observation, reward = result[:2]
            done = bool(result[2]) if len(result) == 3 else None
            if reward is not None:
                self._rewards.append(_number(reward, "step"))
                # An opponent that begins may earn a reward before the first turn.
                self._by_turn = self._by_turn or [0.0]
                self._by_turn[-1] += self._rewards[-1]
            result = observation
        said = _observation(result, "step")
        if said is None and done is False:
            raise EnvironmentFailedError("step returned no observation with done=False; return text, or done=True")
        return self._reply(said, done=said is None if done is None else done)

    def _reply(self, said: str | list[JsonObject] | None, *, done: bool = False) -> Reply:
        return Reply(said, done, opponent_moves=self._opponent_moves)

    @property
    def _opponent_moves(self) -> bool:
        return getattr(self._environment, "opponent_moves", False) is True


def _observation(value: object, method: str) -> str | list[JsonObject] | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise EnvironmentFailedError(f"{method} returned {type(value).__name__}; return text, a list of messages, or None")
    for message in value:
        if not (isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)):
            raise EnvironmentFailedError(f"{method} returned a message without the texts role and content, got {message!r}")
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise EnvironmentFailedError(f"{method} returned messages that are not JSON ({error}); return plain values") from None
    return value or None


def _earned(value: object) -> EarnedReward:
    """Read what ``get_reward`` returned: a number, or named parts, whose sum is the reward."""
    if not isinstance(value, Mapping):
        return EarnedReward(_number(value, "get_reward"))
    if not value or not all(isinstance(name, str) and name.split() == [name] for name in value):
        raise EnvironmentFailedError(f"get_reward returned the parts {value!r}; return one or more, named without spaces")
    parts = {name: _number(part, f"get_reward, as {name!r},") for name, part in value.items()}
    return EarnedReward(_number(sum(parts.values()), "get_reward"), parts)


def _number(value: object, method: str) -> float:
    try:
        number = float(value) if isinstance(value, float | int | SupportsFloat) else float("nan")
    except (TypeError, ValueError):
        number = float("nan")
    if not abs(number) < float("inf"):
        raise EnvironmentFailedError(f"{method} returned {value!r} as the reward; return a finite number")
    return number


class Instances:
    """The environments of the episodes of one process. A call is ``(episode, method, arguments)``; the answer is JSON."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._instances: dict[int, Instance] = {}
        # Reward functions of environments, by their configuration.
        self._graders: dict[str | None, Grade] = {}

    def __call__(self, request: tuple[int, str, list[Any]]) -> JsonObject:
        """Make the call. An exception of the user's code becomes ``{"failure": message, "trace": text}``."""
        episode, method, arguments = request
        try:
            return {"result": self._result(episode, method, arguments)}
        except EnvironmentFailedError as error:
            return {"failure": shortened(str(error)), "trace": None}
        except GradeError as error:
            return {"failure": str(error), "trace": trace_of(error.__cause__), "fatal": True}
        except FAILURES as error:
            name = called_method(method, self._config.contract)
            return {"failure": f"{name} raised {described(error)}", "trace": trace_of(error)}

    def close(self) -> None:
        """End all episodes."""
        for episode in list(self._instances):
            self(_end(episode))

    def _result(self, episode: int, method: str, arguments: list[Any]) -> object:
        if method == "reset":
            self._instances[episode] = Instance(self._config.make(), self._config.contract)
            return dataclasses.asdict(self._instances[episode].reset(*arguments))
        if method == "act":
            return dataclasses.asdict(self._instances[episode].act(*arguments))
        if method == "reward":
            ended = arguments[0] if arguments else {}
            grader = ended.get("grader")
            if grader is not None and grader not in self._graders:
                self._graders[grader] = construct_target(json.loads(grader), "reward")
            earned = self._instances[episode].reward(ended, self._graders.get(grader))
            return None if earned is None else dataclasses.asdict(earned)
        if (instance := self._instances.pop(episode, None)) is not None:
            instance.close()
        return None


def called_method(call: str, contract: Contract) -> str:
    """Return the name of the user's method behind a call of :class:`Instances`, for error messages."""
    return {"act": "a tool" if contract.tools else "step", "reward": "get_reward"}.get(call, call)


def _end(episode: int) -> tuple[int, str, list[Any]]:
    return episode, "close", []


def handler(configuration: JsonObject) -> Handler:
    """Construct the environments of a worker process."""
    config: EnvironmentConfig = construct_target(configuration, "env")
    # The schemas of tools import transformers: that belongs to the start of the process, not to the first call and its limit.
    _ = config.contract
    return Instances(config)
