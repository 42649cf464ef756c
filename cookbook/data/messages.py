"""Chat messages, in the OpenAI shape (``role``, ``content``) or ShareGPT's (``from``, ``value``)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cookbook.data.rows import EmptyRowError
from cookbook.errors import DataError

SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function": "tool",
    "observation": "tool",
    **{role: role for role in ("system", "user", "assistant", "tool")},
}
TRAIN = ("train", "trainable")  # names of the flag in axolotl and in Tinker
REASONING = ("reasoning_content", "thinking", "reasoning")
CALLS = ("tool_calls", "function_call")


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    ``weight`` scales an answer's loss; ``extra`` holds further fields that a chat template may read, such as ``tool_calls``.
    """

    role: str
    content: str
    weight: float = 1.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The message in the shape that chat templates read."""
        return {"role": self.role, "content": self.content, **self.extra}

    @property
    def said(self) -> tuple[str, ...]:
        """Names of the further fields that hold something."""
        return tuple(name for name, value in self.extra.items() if value not in ("", [], {})) if self.extra else ()

    @property
    def is_empty(self) -> bool:
        """Whether the message has neither text nor reasoning nor a tool call."""
        return not self.content.strip() and not set(self.said) & {*REASONING, *CALLS}

    def texts(self) -> Iterator[tuple[str, str]]:
        """Each text that an answer consists of, with the name of its field; of a tool call its name and its arguments."""
        yield "content", self.content
        yield from ((name, self.extra[name]) for name in REASONING if isinstance(self.extra.get(name), str))
        yield from self.call_texts()

    def call_texts(self) -> Iterator[tuple[str, str]]:
        """The texts in the message's tool calls."""
        for call in self.extra.get("tool_calls") or ():
            function = call.get("function", call)
            yield from (("tool_calls", text) for text in _strings([function.get("name"), function.get("arguments")]))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | Sequence):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(part)


def parse_messages(value: Any, where: str, column: str) -> tuple[Message, ...]:
    """The messages of one column.

    Raises:
        EmptyRowError: there are none.
        DataError: not messages, naming ``where``, the column and the place in it.
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise DataError(f'{where}: "{column}" must be a list of messages, got {type(value).__name__}')
    if not value:
        raise EmptyRowError(
            f'{where}: "{column}" has no messages, so nothing would be trained on; remove the row or set data.on_empty=skip'
        )
    return tuple(_message(item, f'{where}: "{column}"[{index}]') for index, item in enumerate(value))


def as_text(value: Any, place: str) -> str:
    """``value`` as the text that a dataset's author sees. A whole number has one spelling, so it is text too.

    Raises:
        DataError: the value is something else; a fraction such as 1.50 has lost its spelling by now.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float | bool):
        raise DataError(
            f"{place} must be text, got the {type(value).__name__} {value}; write it in quotes, as it is to be read"
        )
    raise DataError(f"{place} must be text, got {'none' if value is None else type(value).__name__}")


def _message(item: Any, place: str) -> Message:
    if not isinstance(item, Mapping):
        raise DataError(f'{place} must be an object with "role" and "content", got {type(item).__name__}')
    # Arrow fills absent keys with None. An empty list of calls is none either, and some templates trip over it.
    values = {key: value for key, value in item.items() if value is not None and value != [] and value != {}}
    if "from" in values and "value" in values:
        values = _from_sharegpt(values, place)
    role = values.pop("role", None)
    content = values.pop("content", "" if set(values) & {*CALLS, *REASONING} else None)
    if not isinstance(role, str):
        raise DataError(f'{place} has no "role"; give system, user, assistant or tool')
    weight = _weight(values, role, place)
    if "tool_calls" in values:
        values["tool_calls"] = _tool_calls(values["tool_calls"], place)
    return Message(role, _content(content, place), weight, values)


def _content(content: Any, place: str) -> str:
    if isinstance(content, Sequence) and not isinstance(content, str):
        return "".join(_part(part, f'{place} "content"[{index}]') for index, part in enumerate(content))
    if content is None or isinstance(content, Mapping):
        found = "none" if content is None else "an object"
        raise DataError(f'{place} needs "content" that is text, got {found}; cookbook trains text only')
    return as_text(content, f'{place} "content"')


def _part(part: Any, place: str) -> str:
    """The text of one content part, ``{"type": "text", "text": ...}``."""
    if not isinstance(part, Mapping):
        raise DataError(f'{place} must be an object with "type" and "text", got {type(part).__name__}')
    kind = part.get("type")
    others = [key for key, value in part.items() if key not in ("type", "text") and value not in (None, "", [], {})]
    if kind != "text" or others:
        found = f'"type" {kind!r}' if kind != "text" else f'"{others[0]}"'
        raise DataError(f"{place} has {found}; cookbook trains text only, so mend or remove the row")
    return as_text(part.get("text"), f'{place} "text"')


def _from_sharegpt(values: dict[str, Any], place: str) -> dict[str, Any]:
    speaker = values.pop("from")
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        raise DataError(f'{place} is "from" {speaker!r}; expected one of {", ".join(SHAREGPT_ROLES)}')
    if twice := {"role", "content"} & set(values):
        raise DataError(f'{place} has "from" and "value", and "{min(twice)}" too; keep one of the two forms')
    return {"role": SHAREGPT_ROLES[speaker], "content": values.pop("value"), **values}


def _weight(values: dict[str, Any], role: str, place: str) -> float:
    """Take the weight, and the flags that say the same, out of a message's fields."""
    if "train_detail" in values:
        raise DataError(f'{place} has "train_detail", and cookbook trains a message whole or not at all; give "train" instead')
    given = {name: values.pop(name) for name in ("weight", *TRAIN) if name in values}
    for name, value in given.items():
        right = isinstance(value, bool) if name in TRAIN else isinstance(value, int | float) and 0 <= value <= 1
        if not right:
            expected = "true or false" if name in TRAIN else "a number from 0 (not trained) to 1"
            raise DataError(f'{place} has "{name}" {value!r}; give {expected}')
        if value and role != "assistant":
            stated = str(value).lower() if name in TRAIN else f"{value:g}"
            raise DataError(f'{place} has "{name}" {stated} on a {role} message; only assistant messages are trained')
    if len({bool(value) for value in given.values()}) > 1:
        stated = ", ".join(f'"{name}" {json.dumps(value)}' for name, value in given.items())
        raise DataError(f"{place} contradicts itself with {stated}; keep one of them")
    if not given:
        return 1.0
    return float(given.get("weight", next(iter(given.values()))))


def _tool_calls(calls: Any, place: str) -> list[Mapping[str, Any]]:
    """Calls with their arguments as objects, which chat templates print as JSON: text would come out in quotes."""
    if not isinstance(calls, Sequence) or isinstance(calls, str) or not all(isinstance(call, Mapping) for call in calls):
        raise DataError(f'{place} "tool_calls" must be a list of objects with "function", got {type(calls).__name__}')
    return [_with_object(call, f'{place} "tool_calls"[{index}]') for index, call in enumerate(calls)]


def _with_object(call: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    if "function" in call:
        if not isinstance(call["function"], Mapping):
            raise DataError(f'{place} "function" must be an object with "name" and "arguments", got {call["function"]!r}')
        return {**call, "function": _with_object(call["function"], place)}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        found = json.loads(arguments) if arguments.strip() else {}
    except ValueError as error:
        raise DataError(f'{place} has "arguments" that are broken JSON: {error}; mend or remove the row') from None
    return {**call, "arguments": found}
