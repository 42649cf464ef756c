"""One row seen through ``data.columns``: cookbook's names for columns on the left, the dataset's on the right."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cookbook.data.config import DataConfig
from cookbook.data.messages import CALLS, Message, as_text, parse_messages
from cookbook.data.rows import EmptyRowError, Row
from cookbook.errors import DataError
from cookbook.suggest import did_you_mean

REMEDY = "remove the row or set data.on_empty=skip"
SHAREGPT_COLUMN = "conversations"
TOOLS = "tools"
MEDIA = re.compile(r"(image|picture|video|audio)s?(_(url|path|file|byte)s?)?")
# Columns that change the text of a conversation in OpenAI's fine-tuning and in TRL.
NEEDED = ("functions", "chat_template_kwargs")
# Fields of an assistant message; as columns they would go untrained. "reasoning" often is a comment on the row.
ANSWER = (*CALLS, "reasoning_content", "thinking")


@dataclass(frozen=True)
class Cells:
    """A row, and what its columns are called."""

    row: Row
    config: DataConfig

    @property
    def where(self) -> str:
        return self.row.where

    def column(self, role: str) -> str:
        """The dataset's name for ``role``: ShareGPT's own where ``messages`` was not named and is not there."""
        name = str(getattr(self.config.columns, role))
        values = self.row.values
        if name == "messages" and values.get(name) is None and values.get(SHAREGPT_COLUMN) is not None:
            return SHAREGPT_COLUMN
        return name

    def has(self, role: str) -> bool:
        return self.row.values.get(self.column(role)) is not None

    def value(self, role: str) -> Any:
        """Raises DataError where the column is missing or null."""
        column, values = self.column(role), self.row.values
        if (value := values.get(column)) is not None:
            return value
        if column in values:
            raise DataError(f'{self.where}: "{column}" is null; mend or remove the row')
        columns = ", ".join(values) or "none"
        raise DataError(
            f'{self.where}: no column "{column}", the row has {columns}; set data.columns.{role}.{did_you_mean(column, values)}'
        )

    def text(self, role: str) -> str:
        """Raises DataError unless it is text, EmptyRowError when that is empty."""
        text = as_text(self.value(role), f'{self.where}: "{self.column(role)}"')
        if not text:
            raise EmptyRowError(f'{self.where}: "{self.column(role)}" is empty; {REMEDY}')
        return text

    def is_text(self, role: str) -> bool:
        """Whether the column does not hold messages."""
        return isinstance(self.value(role), str | int | float)

    def messages(self, role: str, speaker: str = "user") -> tuple[Message, ...]:
        """The messages of a column; text becomes one message of ``speaker``."""
        if role != "messages" and self.is_text(role):
            return (Message(speaker, self.text(role)),)
        return parse_messages(self.value(role), self.where, self.column(role))

    def tools(self) -> tuple[Any, ...] | None:
        """Tool schemas for the chat template, from a ``tools`` column that holds a list or its JSON text."""
        for name in NEEDED:
            if self.row.values.get(name):
                raise DataError(f'{self.where}: "{name}" would change the text, and is not read; remove the column')
        tools = self.row.values.get(TOOLS)
        if isinstance(tools, str) and tools.strip():
            try:
                tools = json.loads(tools)
            except json.JSONDecodeError as error:
                raise DataError(f'{self.where}: "tools" is broken JSON: {error}; give a list of tool schemas') from None
        if not tools or isinstance(tools, str):
            return None
        if not isinstance(tools, Sequence):
            raise DataError(f'{self.where}: "tools" must be a list of tool schemas, got {type(tools).__name__}')
        for index, tool in enumerate(tools):
            if not isinstance(tool, Mapping):
                raise DataError(f'{self.where}: "tools"[{index}] must be a tool schema, an object, got {type(tool).__name__}')
        return tuple(tools)

    def check_columns(self) -> None:
        """Raises DataError if a column holds images, sound or videos: the text would be trained without them."""
        for name, value in self.row.values.items():
            parts = value if isinstance(value, list | tuple) else [value]
            if (_is_medium(name) and any(parts)) or any(map(_is_file, parts)):
                remedy = "cookbook trains text only, so remove the row, or the column if the text does not need it"
                raise DataError(f'{self.where}: "{name}" holds media, and the text would be trained without; {remedy}')

    def check_answer(self, roles: Collection[str]) -> None:
        """Raises DataError if an answer's reasoning or calls are in a column of their own, which none of ``roles`` reads."""
        used = {*map(self.column, roles)}
        for name in ANSWER:
            if name not in used and self.row.values.get(name):
                remedy = "move it into the assistant message, or remove the column"
                raise DataError(f'{self.where}: "{name}" is part of an answer, and is not read as a column; {remedy}')

    def unused(self, roles: Collection[str]) -> Iterator[str]:
        """Names of columns that hold something, and are neither one of ``roles`` nor tools."""
        used = {*map(self.column, roles)}
        for name, value in self.row.values.items():
            if name not in used and value not in (None, "", [], {}) and not (name == TOOLS and self.has_tools()):
                yield name

    def has_tools(self) -> bool:
        """Whether the row has tool schemas; a column of that name may hold anything else."""
        try:
            return self.tools() is not None
        except DataError:
            return False


@functools.cache
def _is_medium(column: str) -> bool:
    return MEDIA.fullmatch(column.lower()) is not None


def _is_file(value: Any) -> bool:
    """Whether the value is an image, sound or video as ``datasets`` reads it."""
    return isinstance(value, Mapping) and value.keys() == {"bytes", "path"}
