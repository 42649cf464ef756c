"""Rewards: those that compare a completion with a column of its row, the user's own function, and the limits of their calls."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from cookbook.config import python_file
from cookbook.errors import ConfigError, DataError
from cookbook.sampling.rewards import answers
from cookbook.types import JsonObject

if TYPE_CHECKING:
    from cookbook.protocols import Reward

# GSM8K writes its final answer after this mark.
GOLD_MARK = "####"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Base class of rewards, with the options that all have.

    ``answer_only``: the reward gets completions without their reasoning, and an empty text if the reasoning is unfinished.
    ``workers`` processes call the reward while sampling continues; 0 calls it in this process, one completion after another.
    ``timeout_s`` limits one call, in seconds; only a process can be stopped, so a limit needs ``workers``. These two
    options change no value.

    Raises:
        ConfigError: a number out of its bounds, or a time limit without workers.
    """

    answer_only: bool = False
    workers: int = field(default=0, repr=False)
    timeout_s: float | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ConfigError(f"reward.workers must be at least 0, got {self.workers}")
        if self.timeout_s is None:
            return
        if not self.timeout_s > 0:
            raise ConfigError(f"reward.timeout_s must be above 0, got {self.timeout_s}; null sets no limit")
        if not self.workers:
            limit = f"reward.timeout_s={self.timeout_s:g}"
            raise ConfigError(f"{limit} needs reward.workers of at least 1: no call can be stopped in this process")

    def fingerprint(self) -> str:
        """Return a text that differs between rewards of different values, and is the same in every process."""
        return repr(self)


@dataclass(frozen=True)
class Number(Limits):
    """1 if the completion's number equals the gold number: in the column, the first after ``####``, else the last.

    The number of a completion is that of its final answer, if the answer is marked by a box or ``####``, else its last number.
    Numbers are those of :func:`cookbook.sampling.rewards.answers.numbers`. Unfinished reasoning has no answer.
    """

    column: str = "answer"
    answer_only: bool = field(default=True, kw_only=True)

    def __call__(self, completion: str, row: JsonObject) -> float:
        value = cell(row, self.column)
        gold = _gold(str(value))
        if gold is None:
            raise DataError(f'"{self.column}" holds no number, got {value!r}; set reward.column to a column with numbers')
        text = answers.without_reasoning(completion) if self.answer_only else completion
        return float(text is not None and _answered(text) == gold)


@dataclass(frozen=True)
class Exact(Limits):
    """1 if the completion equals the text of a column."""

    column: str = "answer"
    strip: bool = True
    ignore_case: bool = False

    def __call__(self, completion: str, row: JsonObject) -> float:
        return float(self._plain(completion) == self._plain(str(cell(row, self.column))))

    def _plain(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text


@dataclass(frozen=True)
class Format(Limits):
    """1 if the completion matches a regular expression, anywhere or (``whole``) entirely; ``.`` matches line breaks too.

    Raises:
        ConfigError: ``pattern`` is not a regular expression.
    """

    pattern: str = r"####\s*\S+\s*$"
    whole: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(f"reward.pattern: {error}, got {self.pattern!r}; fix the regular expression") from None

    def __call__(self, completion: str, row: JsonObject) -> float:
        match = re.fullmatch if self.whole else re.search
        return float(match(self.pattern, completion, re.DOTALL) is not None)


@dataclass(frozen=True)
class Python(Limits):
    """Reward that calls ``target``, ``file.py:function``, with a path relative to the current folder.

    ``function(completion, row)`` returns a number, or a mapping of named parts, whose sum is the reward; ``row`` is the
    dataset's row as it was read. A function with a parameter ``trajectory`` gets the messages from the prompt on. A function
    with a parameter ``group`` gets all completions of the prompt and returns a list. A function may be ``async``. A class is
    constructed once per process, without arguments, and its instance is called. The file's folder joins the import path, so
    that the file may import modules of that folder. By default one worker process calls the function, with a time limit: it
    may be slow or hang.

    Raises:
        ConfigError: the file or function does not exist, or the file cannot be imported. Other errors of the file pass through.
    """

    target: str
    workers: int = field(default=1, repr=False, kw_only=True)
    timeout_s: float | None = field(default=60.0, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        # A mistake in the file shows before a model is loaded.
        _ = self.function

    def __call__(self, completion: str, row: JsonObject) -> float | Mapping[str, float]:
        return self.function(completion, row)

    def fingerprint(self) -> str:
        """Return the fields and the SHA-256 of the file's text; imported files are not included."""
        return f"{self!r} {hashlib.sha256(Path(self.target.rpartition(':')[0]).expanduser().read_bytes()).hexdigest()}"

    @cached_property
    def function(self) -> Reward:
        """The user's function, or the instance of the user's class."""
        function: Reward | type[Reward] = python_file.named(self.target, "reward.target", signature="(completion, row)")
        return function() if isinstance(function, type) else function


def cell(row: JsonObject, column: str) -> object:
    """Return a value of the row. Raises DataError: the row has no such column."""
    if row.get(column) is None:
        raise DataError(f'no column "{column}", the row has {", ".join(row) or "none"}; set reward.column')
    return row[column]


def gold_text(value: object) -> str:
    """Return the text of a row's answer: what follows ``####``, as GSM8K writes it, else all of it."""
    before, mark, after = str(value).partition(GOLD_MARK)
    return after if mark else before


def _answered(text: str) -> answers.Value | None:
    """Return the number of a completion: in its last box, or behind its last ``####``; the later of both; else the last number.

    A box without a number is an answer without a number.
    """
    _, mark, after = text.rpartition(GOLD_MARK)
    marked = answers.first_number(after.strip().partition("\n")[0]) if mark else None
    box = answers.last_box(text if marked is None else after)
    if box is not None and box.content is not None:
        # Behind the brace, a minus is a sign even before a space.
        return answers.last_number("{" + box.content)
    return answers.last_number(text) if marked is None else marked


def _gold(text: str) -> answers.Value | None:
    _, mark, after = text.partition(GOLD_MARK)
    marked = answers.first_number(after) if mark else None
    return answers.last_number(text) if marked is None else marked
