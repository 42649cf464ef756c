"""The answer that a row already has, whatever form it is in."""

from __future__ import annotations

import contextlib

from cookbook.data.cells import Cells
from cookbook.data.config import DataConfig
from cookbook.data.rows import Row
from cookbook.errors import DataError

ANSWER = "answer"  # the column that the shipped rewards read


def with_answer(row: Row, config: DataConfig) -> Row:
    """The row as rewards see it: with its answer's text in a column ``answer``, where it has an answer and no such column.

    That is the last message of a conversation, a completion, or the chosen one of two.
    """
    if row.values.get(ANSWER) is not None:
        return row
    text = _written(row, config)
    return row if text is None else Row(row.where, {**row.values, ANSWER: text})


def answer_text(row: Row, config: DataConfig) -> str | None:
    """Text of the answer that the row has as a message, a completion or the chosen side, else in its column ``answer``."""
    text = _written(row, config)
    return str(row.values[ANSWER]) if text is None and row.values.get(ANSWER) is not None else text


def _written(row: Row, config: DataConfig) -> str | None:
    with contextlib.suppress(DataError):  # a column that is not read here may hold anything
        return _answer(Cells(row, config))
    return None


def _answer(cells: Cells) -> str | None:
    roles = ("completion", "chosen") if cells.has("prompt") else ("messages", "chosen")
    role = next((role for role in roles if cells.has(role)), None)
    if role is None:
        return None
    last = cells.messages(role, "assistant")[-1]
    return last.content if last.role == "assistant" else None
