"""Configuration of environments: the options that all have, and the user's own class."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

from cookbook.config import python_file
from cookbook.errors import ConfigError, CookbookError, described
from cookbook.types import JsonObject

# Methods that belong to the contract. All other public methods are tools, unless the class has `step`.
CONTRACT = frozenset({"reset", "step", "get_reward", "close"})
# Parameters of `get_reward`, if it has any: the text of the last completion, and all messages.
REWARD_ARGUMENTS = ("text", "completion", "trajectory")
# Parameters of `reset` that are not columns of the data.
NUMBERED = frozenset({"seed", "index"})


@dataclass(frozen=True)
class Contract:
    """Methods that a class offers.

    ``tools`` are schemas for chat templates; ``columns`` are the parameters that ``reset`` names, ``required`` those without a
    default. ``takes_all``: it takes all columns of a row. ``reward_range``: the lowest and the highest reward of an episode, if
    the class declares them; ``cookbook check env`` compares. ``ignored``: public methods of a class with ``step``, which are no
    tools.
    """

    tools: list[JsonObject]
    columns: frozenset[str]
    required: frozenset[str]
    takes_all: bool
    reward_range: tuple[float, float] | None = None
    ignored: tuple[str, ...] = ()
    # Parameters of get_reward; None: the class has no get_reward.
    reward_arguments: tuple[str, ...] | None = None

    @property
    def reads_rows(self) -> bool:
        """Whether ``reset`` asks for columns of the data; otherwise the rows are numbers."""
        return self.takes_all or bool(self.columns - NUMBERED)

    @classmethod
    def of(cls, environment: object) -> Contract:
        """Return the contract of an environment.

        Raises:
            ConfigError: it has no ``reset``, nothing to answer the model with, a tool without a description, or a
                ``reward_range`` that is no pair of numbers.
        """
        name = type(environment).__name__
        reset = getattr(environment, "reset", None)
        if not callable(reset):
            raise ConfigError(
                f"env: {name} has no method reset; define reset(self, **row), which returns the first observation"
            )
        tools = tools_of(environment)
        if not tools and not callable(getattr(environment, "step", None)):
            raise ConfigError(f"env: {name} has neither step(text) nor a public method as a tool; define one of them")
        parameters = inspect.signature(reset).parameters.values()
        named = [
            parameter for parameter in parameters if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        ]
        return cls(
            [_schema(name, tool) for tool in tools.values()],
            columns=frozenset(parameter.name for parameter in named),
            required=frozenset(parameter.name for parameter in named if parameter.default is parameter.empty),
            takes_all=any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters),
            reward_range=_reward_range(environment),
            ignored=() if tools else tuple(public_methods(environment)),
            reward_arguments=_reward_arguments(environment),
        )


def _reward_arguments(environment: object) -> tuple[str, ...] | None:
    get_reward = getattr(environment, "get_reward", None)
    if not callable(get_reward):
        return None
    names = []
    for name, parameter in inspect.signature(get_reward).parameters.items():
        if name in REWARD_ARGUMENTS:
            names.append(name)
        elif parameter.default is parameter.empty and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(
                f"env: {type(environment).__name__}.get_reward has the parameter {name!r}; it may have "
                f"{', '.join(REWARD_ARGUMENTS)}; give {name} a default, or read it in reset"
            )
    return tuple(names)


def _reward_range(environment: object) -> tuple[float, float] | None:
    declared = getattr(environment, "reward_range", None)
    if declared is None or callable(declared):
        return None
    try:
        low, high = map(float, declared)
    except (TypeError, ValueError):
        low, high = 1.0, 0.0
    if not low <= high:
        raise ConfigError(
            f"env: {type(environment).__name__}.reward_range must be the lowest and the highest reward of an episode, such as "
            f"(0.0, 1.0), got {declared!r}"
        )
    return low, high


def tools_of(environment: object) -> dict[str, Callable[..., object]]:
    """Return the public methods by name; none if the environment has ``step``."""
    return {} if callable(getattr(environment, "step", None)) else public_methods(environment)


def public_methods(environment: object) -> dict[str, Callable[..., object]]:
    """Return the public methods by name, without those of the contract."""
    kind = type(environment)
    names = [name for name in dir(kind) if not name.startswith("_") and name not in CONTRACT]
    return {name: getattr(environment, name) for name in names if inspect.isroutine(getattr(kind, name))}


def _schema(name: str, tool: Callable[..., object]) -> JsonObject:
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    try:
        schema: JsonObject = get_json_schema(tool)
    except (DocstringParsingException, TypeHintParsingException, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"env: the tool {name}.{getattr(tool, '__name__', tool)} cannot be described to the model ({reason}); give it a "
            "docstring with a line for each argument and type hints, or begin its name with _"
        ) from None
    return schema


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Base class of the entries of the group ``env``. ``conf/env/python.yaml`` explains each field.

    Raises:
        ConfigError: a number out of its bounds, or a time limit without workers.
    """

    max_turns: int = 8
    rows: int = 1000
    chat: bool = True
    lockstep: bool = True
    on_error: Literal["drop", "fail", "end"] = "drop"
    error_reward: float = 0.0
    gamma: float | None = None
    workers: int = field(default=1, repr=False)
    timeout_s: float | None = field(default=60.0, repr=False)

    # Whether an episode whose model has exceeded a limit may end without a reward of its own, and then gets error_reward.
    ends_refused_episodes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for key, least in {"max_turns": 1, "rows": 1, "workers": 0}.items():
            if (number := getattr(self, key)) < least:
                raise ConfigError(f"env.{key} must be at least {least}, got {number}")
        if self.gamma is not None and not 0 <= self.gamma <= 1:
            raise ConfigError(f"env.gamma must be between 0 and 1, got {self.gamma}; null: one credit for all turns")
        if self.error_reward and self.on_error != "end" and not self.ends_refused_episodes:
            raise ConfigError(
                f"env.error_reward={self.error_reward:g} has no effect with env.on_error={self.on_error}: such an episode is "
                "not trained; remove env.error_reward, or set env.on_error=end"
            )
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(f"env.timeout_s must be above 0, got {self.timeout_s}; null sets no limit")
        if self.timeout_s is not None and not self.workers:
            limit = f"env.timeout_s={self.timeout_s:g}"
            raise ConfigError(
                f"{limit} needs env.workers of at least 1: no call can be stopped in this process; add env.timeout_s=null"
            )

    @property
    def failed_episodes(self) -> str:
        """The end of a sentence about episodes that end by an error: how a run treats them."""
        return "are left out" if self.on_error != "end" else f"end with the reward env.error_reward={self.error_reward:g}"

    def make(self) -> object:
        """Return a new environment, which plays one episode."""
        raise NotImplementedError

    @cached_property
    def contract(self) -> Contract:
        """The methods that the environment offers.

        Raises:
            ConfigError: the environment cannot be constructed or lacks a method, or a tool cannot be described.
        """
        try:
            environment = self.make()
        except CookbookError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"env: the environment cannot be constructed ({described(error)}); give the class an __init__ "
                "without arguments that raises nothing"
            ) from error
        return Contract.of(environment)

    def fingerprint(self) -> str:
        """Fingerprint: the same in every process, and different for different environments."""
        return repr(self)


@dataclass(frozen=True, kw_only=True)
class PythonEnvironment(EnvironmentConfig):
    """The user's own environment: ``target`` is ``file.py:Class``, with a path relative to the current folder.

    The class needs no arguments; a function without arguments that returns an environment will do. A class written for TRL's
    ``environment_factory`` runs unchanged. docs/guide/environments.md explains its methods.

    Raises:
        ConfigError: the file or class does not exist, or the file cannot be imported. Other errors of the file pass through.
    """

    target: str

    def __post_init__(self) -> None:
        super().__post_init__()
        # A mistake in the file shows before a model is loaded.
        _ = self._factory

    def make(self) -> object:
        return self._factory()

    @cached_property
    def _factory(self) -> Callable[[], object]:
        factory: Callable[[], object] = python_file.named(self.target, "env.target", signature=" as a class without arguments")
        return factory

    def fingerprint(self) -> str:
        return f"{self!r} {digest_of(self.target)}"


def digest_of(target: str) -> str:
    """Return the SHA-256 of the file that ``file.py:name`` names, in hexadecimal."""
    return hashlib.sha256(Path(target.rpartition(":")[0]).expanduser().read_bytes()).hexdigest()
