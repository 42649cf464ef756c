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
    text = None
    with contextlib.suppress(DataError):  # what stands in a column that is not read here is nobody's business
        text = _answer(Cells(row, config))
    return row if text is None else Row(row.where, {**row.values, ANSWER: text})


def _answer(cells: Cells) -> str | None:
    roles = ("completion", "chosen") if cells.has("prompt") else ("messages", "chosen")
    role = next((role for role in roles if cells.has(role)), None)
    if role is None:
        return None
    last = cells.messages(role, "assistant")[-1]
    return last.content if last.role == "assistant" else None
