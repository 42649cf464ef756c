"""Arguments of reward functions: parameters name the completion, the row, columns of the row, or lists over the group.

Functions of other projects are called as these call them: TRL's with lists over the completions of a prompt
(``f(prompts, completions, **kwargs)``), verl's with ``solution_str`` and ``ground_truth``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from cookbook.errors import ConfigError, DataError
from cookbook.types import JsonObject
from cookbook.utils.suggest import did_you_mean

# Parameters of a function that judges one completion; the columns of the row have their own names.
SINGLE = ("completion", "prompt", "row", "trajectory", "environment", "step")
# Other names of the completion: verl's, and a common one.
COMPLETIONS = ("solution_str", "text")
# Of a function that judges the group in one call; `trajectory` is then a list.
GROUP = ("group", "prompt", "row", "trajectory", "step")
# Of a function in the style of TRL: lists with an item for each completion, as the columns of the row are.
LISTS = ("completions", "prompts", "completion_ids", "environments", "trainer_state", "step")
LIST_MARKS = frozenset({"completions", "prompts", "completion_ids", "environments", "trainer_state"})
# Of verl; other rows may lack these columns.
OPTIONAL = frozenset({"data_source", "extra_info"})
ENVIRONMENTS = frozenset({"environment", "environments"})


class Style(Enum):
    """How a function is called."""

    # Once for each completion, by place: its parameters cannot be read.
    place = "place"
    # Once for each completion, by name.
    single = "single"
    # Once for all completions of a prompt, by name.
    group = "group"
    # Once for all completions of a prompt, with lists.
    lists = "lists"


@dataclass(frozen=True)
class Signature:
    """The parameters of a reward function.

    ``required`` and ``optional`` are names, without and with a default; ``takes_all``: it has ``**kwargs``.
    """

    style: Style
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    takes_all: bool = False

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.required) | frozenset(self.optional)

    @property
    def reads_environments(self) -> bool:
        """Whether the function gets environments, so that it has to run in their process."""
        return bool(self.names & ENVIRONMENTS)

    @property
    def reads_messages(self) -> bool:
        """Whether the function may get the messages of an episode."""
        return self.style is not Style.place and (self.takes_all or bool(self.names & {"trajectory", "completions"}))

    @classmethod
    def of(cls, function: Callable[..., object]) -> Signature:
        """Return the signature of a function.

        Raises:
            ConfigError: the parameters of several ways to call it, or a parameter that can only be given by place.
        """
        try:
            parameters = inspect.signature(function).parameters
        # A built-in function may have none.
        except (TypeError, ValueError):
            return cls(Style.place)
        named = {
            name: parameter
            for name, parameter in parameters.items()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        }
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        if any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in parameters.values()) or not (named or takes_all):
            return cls(Style.place)
        style = Style.lists if LIST_MARKS & named.keys() else Style.group if "group" in named else Style.single
        if not named:
            style = Style.lists
        for first, others in ((Style.lists, ("group", "completion")), (Style.group, ("completion",))):
            for other in others:
                if style is first and other in named:
                    mark = "group" if style is Style.group else next(name for name in named if name in LIST_MARKS)
                    raise ConfigError(
                        f"reward: the function has the parameters {mark!r} and {other!r}, which are for different calls; "
                        "use one"
                    )
        required = tuple(name for name, parameter in named.items() if parameter.default is parameter.empty)
        return cls(style, required, tuple(name for name in named if name not in required), takes_all)

    def check(self, columns: Collection[str], *, has_environment: bool = False) -> None:
        """Check the names against the columns of the data.

        Raises:
            ConfigError: a parameter is not known; or it is an environment, and the run has none.
        """
        if self.reads_environments and not has_environment:
            name = next(name for name in (*self.required, *self.optional) if name in ENVIRONMENTS)
            raise ConfigError(
                f"reward: the function has the parameter {name!r}, and the run has no environment; choose one with env=, or "
                "remove the parameter"
            )
        for name in self.required:
            if name not in self.known and name not in columns and not self._is_of_verl(name, columns):
                allowed = [*self.known, *(column for column in columns if column not in self.known)]
                hint = did_you_mean(name, allowed)
                raise ConfigError(
                    f"reward: the function has the parameter {name!r}, which is neither an argument nor a column of the data; "
                    f"use {', '.join(allowed)}, or give {name} a default.{hint}"
                )

    @property
    def known(self) -> tuple[str, ...]:
        """Names that are no columns."""
        return {Style.group: GROUP, Style.lists: LISTS}.get(self.style, (*SINGLE, *COMPLETIONS))

    def _is_of_verl(self, name: str, columns: Collection[str]) -> bool:
        if "solution_str" not in self.names:
            return False
        return name in OPTIONAL or (name == "ground_truth" and bool({"reward_model", "answer"} & set(columns)))


@dataclass(frozen=True)
class Arguments:
    """Arguments of one call, JSON-compatible if the row is. ``size``: completions that it judges; None: one completion."""

    by_place: Sequence[object] = ()
    by_name: JsonObject = field(default_factory=dict)
    size: int | None = None


@dataclass(frozen=True)
class Judged:
    """The completions of a prompt, and what a reward may know about them. ``token_ids`` may be empty."""

    completions: Sequence[str]
    row: JsonObject
    trajectories: Sequence[Sequence[JsonObject]]
    prompt: object = ""
    token_ids: Sequence[Sequence[int]] = ()
    step: int = 0


def arguments(signature: Signature, judged: Judged) -> list[Arguments]:
    """Return the arguments of each call for the completions of a prompt: one call per completion, or one for all.

    Raises:
        DataError: the row lacks a column that the function needs.
    """
    row, step, count = judged.row, judged.step, len(judged.completions)
    if signature.style is Style.place:
        return [Arguments([completion, row]) for completion in judged.completions]
    if signature.style is Style.group:
        trajectories = [list(messages) for messages in judged.trajectories]
        values = {"group": list(judged.completions), "prompt": judged.prompt, "row": row, "trajectory": trajectories}
        return [Arguments(by_name=_chosen(signature, {**values, "step": step}, row), size=count)]
    if signature.style is Style.lists:
        return [Arguments(by_name=_lists(signature, judged), size=count)]
    result = []
    for completion, trajectory in zip(judged.completions, judged.trajectories, strict=True):
        values = {"completion": completion, "prompt": judged.prompt, "row": row, "trajectory": list(trajectory), "step": step}
        # A column of the same name comes first.
        values |= {name: completion for name in COMPLETIONS if name not in row}
        result.append(Arguments(by_name=_chosen(signature, values, row)))
    return result


def _lists(signature: Signature, judged: Judged) -> JsonObject:
    """Return the arguments in the style of TRL. Of a conversation, a completion is the list of its messages."""
    count = len(judged.completions)
    is_chat = isinstance(judged.prompt, list)
    completions: list[Any] = list(judged.completions)
    if is_chat:
        completions = [_said(trajectory, judged.prompt) for trajectory in judged.trajectories]
    values: JsonObject = {
        "prompts": [judged.prompt] * count,
        "completions": completions,
        "completion_ids": [list(tokens) for tokens in judged.token_ids] or [[]] * count,
        "trainer_state": {"global_step": judged.step},
        "step": judged.step,
    }
    columns = {name: [value] * count for name, value in judged.row.items() if name not in ("prompt", "completion")}
    return _chosen(signature, values, columns)


def _said(trajectory: Sequence[JsonObject], prompt: object) -> list[JsonObject]:
    """Return the messages after the prompt, whose number of messages is known."""
    assert isinstance(prompt, list)
    after = list(trajectory[len(prompt) :]) if len(trajectory) > len(prompt) else list(trajectory[-1:])
    return [{**message, "role": "user" if message.get("role") == "environment" else message.get("role")} for message in after]


def _chosen(signature: Signature, values: Mapping[str, object], columns: Mapping[str, object]) -> JsonObject:
    """Return the arguments that the signature takes: of the call, else columns.

    A column named step or trajectory comes first: no other tool passes these, so such a function means its data.
    """
    available = {**columns, **values, **{name: columns[name] for name in ("step", "trajectory") if name in columns}}
    if "solution_str" in signature.names:
        available = {**_of_verl(columns), **available}
    if signature.takes_all:
        return available
    for name in signature.required:
        if name not in available and name not in ENVIRONMENTS:
            raise DataError(f'no column "{name}", the row has {", ".join(columns) or "none"}; give the parameter a default')
    return {name: available[name] for name in signature.names if name in available}


def _of_verl(row: Mapping[str, object]) -> JsonObject:
    """Return verl's arguments: the right answer is in a column of that name, in that of the reward model, or the answer."""
    model = row.get("reward_model")
    gold = model.get("ground_truth") if isinstance(model, Mapping) else None
    fields: dict[str, object] = {"data_source": row.get("data_source", ""), "extra_info": row.get("extra_info")}
    if gold is not None or "answer" in row:
        fields["ground_truth"] = row["answer"] if gold is None else gold
    return fields
