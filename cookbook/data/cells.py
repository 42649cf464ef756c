"""One row seen through ``data.columns``: cookbook's names for columns on the left, the dataset's on the right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cookbook.data.config import DataConfig
from cookbook.data.messages import Message, parse_messages
from cookbook.data.rows import EmptyRowError, Row
from cookbook.errors import DataError
from cookbook.suggest import did_you_mean

REMEDY = "remove the row or set data.on_empty=skip"
SHAREGPT_COLUMN = "conversations"


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
        value = self.value(role)
        if not isinstance(value, str):
            raise DataError(f'{self.where}: "{self.column(role)}" must be text, got {type(value).__name__}')
        if not value:
            raise EmptyRowError(f'{self.where}: "{self.column(role)}" is empty; {REMEDY}')
        return value

    def is_text(self, role: str) -> bool:
        return isinstance(self.value(role), str)

    def messages(self, role: str, speaker: str = "user") -> tuple[Message, ...]:
        """The messages of a column; text becomes one message of ``speaker``."""
        if role != "messages" and self.is_text(role):
            return (Message(speaker, self.text(role)),)
        return parse_messages(self.value(role), self.where, self.column(role))

    def tools(self) -> tuple[Any, ...] | None:
        """Tool schemas for the chat template, from a ``tools`` column that holds a list or its JSON text."""
        tools = self.row.values.get("tools")
        if isinstance(tools, str):
            try:
                tools = json.loads(tools)
            except json.JSONDecodeError as error:
                raise DataError(f'{self.where}: "tools" is broken JSON: {error}; give a list of tool schemas') from None
        if tools and (not isinstance(tools, Sequence) or isinstance(tools, str)):
            raise DataError(f'{self.where}: "tools" must be a list of tool schemas, got {type(tools).__name__}')
        return tuple(tools) if tools else None
