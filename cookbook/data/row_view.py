"""A row read through ``data.columns``, which maps cookbook's names of columns to the dataset's."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cookbook.data.messages import CALLS, ChatMessage, as_text, messages_in_text, parse_messages
from cookbook.data.rows import Columns, DataConfig, EmptyRowError, Row
from cookbook.errors import DataError
from cookbook.types import JsonObject
from cookbook.utils.suggest import did_you_mean
from cookbook.utils.template_options import TEMPLATE_OPTIONS, checked_options

REMEDY = "remove the row or set data.on_empty=skip"
SHAREGPT_COLUMN = "conversations"
# Labels of KTO, as texts.
DESIRABLE, UNDESIRABLE = ("true", "1", "1.0"), ("false", "0", "0.0")
# Columns that may hold messages.
HOLD_MESSAGES = frozenset({"messages", "prompt", "completion", "chosen", "rejected"})
TOOLS = "tools"
SYSTEM = "system"
MEDIA = re.compile(r"(image|picture|video|audio)s?(_(url|path|file|byte)s?)?", re.IGNORECASE)
# A column that changes the text of a conversation in OpenAI's fine-tuning.
FUNCTIONS = "functions"
# Fields of an assistant message; as columns they would go untrained. "reasoning" often is a comment on the row.
ANSWER_FIELDS = (*CALLS, "reasoning_content", "thinking")

ANSWER = "answer"  # the column that the shipped rewards read


@dataclass(frozen=True)
class RowView:
    """A row with the configured names of its columns, which are those of its source if the row is of a mixture."""

    row: Row
    config: DataConfig

    def __post_init__(self) -> None:
        if self.row.source is not None:
            object.__setattr__(self, "config", self.row.source.config)

    @property
    def key(self) -> str:
        """The configuration key of the row's source: ``data``, or an entry of ``data.mix``."""
        return "data" if self.row.source is None else self.row.source.key

    @property
    def where(self) -> str:
        return self.row.where

    def column(self, role: str) -> str:
        """The dataset's name for ``role``; ShareGPT's name if ``messages`` has its default name and is missing."""
        name = str(getattr(self.config.columns, role))
        values = self.row.values
        if name == "messages" and values.get(name) is None and values.get(SHAREGPT_COLUMN) is not None:
            return SHAREGPT_COLUMN
        return name

    def has(self, role: str) -> bool:
        return self.row.values.get(self.column(role)) is not None

    def value(self, role: str) -> object:
        """Return the value of a column. Raise DataError if it is missing or null."""
        column, values = self.column(role), self.row.values
        if (value := values.get(column)) is not None:
            return messages_in_text(value) if role in HOLD_MESSAGES else value
        if column in values:
            raise DataError(f'{self.where}: "{column}" is null; fix or remove the row')
        columns = ", ".join(values) or "none"
        remedy = f"set {self.key}.columns.{role}.{did_you_mean(column, values)}"
        raise DataError(f'{self.where}: no column "{column}", the row has {columns}; {remedy}')

    def text(self, role: str) -> str:
        """Return the text of a column. Raise DataError if it is not text, EmptyRowError if it is empty."""
        text = as_text(self.value(role), f'{self.where}: "{self.column(role)}"')
        if not text:
            raise EmptyRowError(f'{self.where}: "{self.column(role)}" is empty; {REMEDY}')
        return text

    def is_text(self, role: str) -> bool:
        """Whether the column does not hold messages."""
        return isinstance(self.value(role), str | int | float)

    def messages(self, role: str, speaker: str = "user") -> tuple[ChatMessage, ...]:
        """The messages of a column; text becomes one message of ``speaker``."""
        if role != "messages" and self.is_text(role):
            return (ChatMessage(speaker, self.text(role)),)
        return parse_messages(self.value(role), self.where, self.column(role))

    def tools(self) -> tuple[object, ...] | None:
        """Tool schemas for the chat template, from a ``tools`` column that holds a list or its JSON text."""
        if self.row.values.get(FUNCTIONS):
            raise DataError(f'{self.where}: "{FUNCTIONS}" would change the text, and is not read; remove the column')
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
        return tuple(_schema(tool, f'{self.where}: "tools"[{index}]') for index, tool in enumerate(tools))

    def template_options(self) -> JsonObject:
        """Options of the chat template for this row, from a column ``chat_template_kwargs``: an object or its JSON text."""
        try:
            return checked_options(self.row.values.get(TEMPLATE_OPTIONS))
        except ValueError as error:
            raise DataError(f'{self.where}: "{TEMPLATE_OPTIONS}": {error}') from None

    def system(self) -> str | None:
        """Text of the system message: of a column ``system``, else ``data.system``."""
        text = self.row.values.get(SYSTEM)
        return text if isinstance(text, str) and text else self.config.system

    def has_label(self) -> bool:
        """Whether the row is one of KTO: a label, true or false, 1 or 0, says whether its answer is desirable.

        CSV has the label as text.
        """
        return self._label() in (*DESIRABLE, *UNDESIRABLE)

    def _label(self) -> str:
        value = self.row.values.get(self.column("label"))
        return str(value).lower() if isinstance(value, bool | int | float | str) else ""

    def check_label(self) -> None:
        """Raise EmptyRowError if the row is one of KTO whose answer is undesirable: nothing of it would be trained on."""
        if (label := self._label()) in UNDESIRABLE:
            other = DESIRABLE[UNDESIRABLE.index(label)]
            raise EmptyRowError(
                f'{self.where}: "{self.column("label")}" is {label}, an answer to avoid as in KTO, so nothing is trained on; '
                f"set data.on_empty=skip to train on the rows with {other}, or rename the column if it means something else"
            )

    def desirable(self) -> bool:
        """Return the label of KTO. Raise DataError if it is neither true, false, 1 nor 0."""
        value = self.value("label")
        if not self.has_label():
            raise DataError(
                f'{self.where}: "{self.column("label")}" must be true, false, 1 or 0, got {value!r}; fix or remove the row'
            )
        return self._label() in DESIRABLE

    def check_columns(self) -> None:
        """Raise DataError if a column holds images, sound or videos: the text would be trained without them."""
        for name, value in self.row.values.items():
            parts = value if isinstance(value, list | tuple) else [value]
            # `datasets` reads an image, sound or video as such an object.
            has_file = any(isinstance(part, dict) and len(part) == 2 and part.keys() == {"bytes", "path"} for part in parts)
            if has_file or (MEDIA.fullmatch(name) and any(parts)):
                remedy = "cookbook trains text only, so remove the row, or the column if the text does not need it"
                raise DataError(f'{self.where}: "{name}" holds media, and the text would be trained without; {remedy}')

    def check_answer(self, roles: Collection[str]) -> None:
        """Raise DataError if an answer's reasoning or calls are in a column of their own, which none of ``roles`` reads."""
        used = {*map(self.column, roles)}
        for name in ANSWER_FIELDS:
            if name not in used and self.row.values.get(name):
                remedy = "move it into the assistant message, or remove the column"
                raise DataError(f'{self.where}: "{name}" is part of an answer, and is not read as a column; {remedy}')

    def check_context(self) -> None:
        """Raise DataError if the prompt is an instruction in the format of Alpaca, and would lose its ``input``."""
        name = self.column("input")
        if self.column("prompt") == Columns.instruction and self.row.values.get(name):
            raise DataError(
                f'{self.where}: "{name}" belongs to "{Columns.instruction}", and would be left out; '
                f"set {self.key}.format=alpaca and drop {self.key}.columns.prompt, or rename the column"
            )

    def unused(self, roles: Collection[str]) -> Iterator[str]:
        """Yield the names of non-empty columns that are neither one of ``roles`` nor tools, options or a system message."""
        # A label that is neither true, false, 1 nor 0 is not KTO's.
        used = {self.column(role) for role in roles if role != "label" or self.has_label()}
        if self.row.values.get(SYSTEM) == self.system():
            used.add(SYSTEM)
        for name, value in self.row.values.items():
            is_read = (name == TOOLS and self.has_tools()) or name == TEMPLATE_OPTIONS
            if name not in used and value not in (None, "", [], {}) and not is_read:
                yield name

    def has_tools(self) -> bool:
        """Whether the row has tool schemas; a column of that name may hold anything else."""
        try:
            return self.tools() is not None
        except DataError:
            return False


def _schema(tool: object, place: str) -> object:
    """Return the schema of a tool, which may be its JSON text."""
    if isinstance(tool, str):
        with contextlib.suppress(ValueError):
            tool = json.loads(tool)
    if not isinstance(tool, Mapping):
        raise DataError(f"{place} must be a tool schema, an object, got {type(tool).__name__}")
    return tool


def with_answer(row: Row, config: DataConfig) -> Row:
    """Return the row for rewards: with the text of its answer in a column ``answer``, if it has an answer and no such column.

    The answer is the last message of a conversation, the completion, or the chosen side.
    """
    if row.values.get(ANSWER) is not None:
        return row
    text = _written(row, config)
    return row if text is None else replace(row, values={**row.values, ANSWER: text})


def answer_text(row: Row, config: DataConfig) -> str | None:
    """Text of the answer that the row has as a message, a completion or the chosen side, else in its column ``answer``."""
    text = _written(row, config)
    return str(row.values[ANSWER]) if text is None and row.values.get(ANSWER) is not None else text


def _written(row: Row, config: DataConfig) -> str | None:
    cells = RowView(row, config)
    roles: tuple[str, ...] = ("completion", "chosen") if cells.has("prompt") else ("messages", "chosen")
    roles += ("output",) if cells.has("instruction") else ()
    role = next((role for role in roles if cells.has(role)), None)
    # A column that the recipe does not read may hold any value.
    with contextlib.suppress(DataError):
        cells.check_label()
        last = cells.messages(role, "assistant")[-1] if role else None
        return last.content if last and last.role == "assistant" else None
    return None
