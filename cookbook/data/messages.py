"""Chat messages, in the OpenAI shape (``role``, ``content``) or ShareGPT's (``from``, ``value``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True)
class Message:
    """``weight`` scales an answer's loss; ``extra`` is what else the chat template may read, such as ``tool_calls``."""

    role: str
    content: str
    weight: float = 1.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As chat templates take it."""
        return {"role": self.role, "content": self.content, **self.extra}


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


def _message(item: Any, place: str) -> Message:
    if not isinstance(item, Mapping):
        raise DataError(f'{place} must be an object with "role" and "content", got {type(item).__name__}')
    values = {key: value for key, value in item.items() if value is not None}  # Arrow fills absent keys with None
    if "from" in values and "value" in values:
        values = _from_sharegpt(values, place)
    role, content = values.pop("role", None), values.pop("content", "" if "tool_calls" in values else None)
    if not isinstance(role, str):
        raise DataError(f'{place} has no "role"; give system, user, assistant or tool')
    if not isinstance(content, str):
        found = "none" if content is None else type(content).__name__
        raise DataError(f'{place} needs "content" that is text, got {found}; cookbook trains text only')
    return Message(role, content, _weight(values.pop("weight", None), role, place), values)


def _from_sharegpt(values: dict[str, Any], place: str) -> dict[str, Any]:
    speaker = values.pop("from")
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        raise DataError(f'{place} is "from" {speaker!r}; expected one of {", ".join(SHAREGPT_ROLES)}')
    return {"role": SHAREGPT_ROLES[speaker], "content": values.pop("value"), **values}


def _weight(weight: Any, role: str, place: str) -> float:
    if weight is None:
        return 1.0
    if not isinstance(weight, int | float) or not 0 <= weight <= 1:
        raise DataError(f'{place} has "weight" {weight!r}; give a number from 0 (not trained) to 1')
    if weight and role != "assistant":
        raise DataError(f'{place} has "weight" {weight:g} on a {role} message; only assistant messages are trained')
    return float(weight)
