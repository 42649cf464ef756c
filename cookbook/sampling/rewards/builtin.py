"""Rewards: those that compare a completion with a column of its row, the user's own function, and the limits of their calls."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from cookbook.config import python_file
from cookbook.errors import ConfigError, DataError
from cookbook.types import JsonObject

if TYPE_CHECKING:
    from cookbook.protocols import Reward

# A sign counts only if no number or word ends before it: "10-3" is 10 and 3. Thousands come in groups of three: "1,2,3" is
# three numbers and "1,234" one. Currency and percent signs are ignored.
NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)\]])[-−]\s?)?[$€£]?(?P<sign2>(?<=[$€£])-)?"  # noqa: RUF001
    r"(?P<digits>\d{1,3}(?:,\d{3})+(?![\d])(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
)
# GSM8K writes its final answer after this mark.
GOLD_MARK = "####"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Base class of rewards with the two options that limit a call.

    ``workers`` processes call the reward while sampling continues; 0 calls it in this process, one completion after another.
    ``timeout_s`` limits one call, in seconds; only a process can be stopped, so a limit needs ``workers``. Neither option
    changes a reward's value.

    Raises:
        ConfigError: a number out of its bounds, or a time limit without workers.
    """

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
    """1 if the completion's last number equals the gold number: in the column, the first after ``####``, else the last."""

    column: str = "answer"

    def __call__(self, completion: str, row: JsonObject) -> float:
        value = cell(row, self.column)
        gold = _gold(str(value))
        if gold is None:
            raise DataError(f'"{self.column}" holds no number, got {value!r}; set reward.column to a column with numbers')
        return float(_last(completion) == gold)


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


def _gold(text: str) -> Decimal | None:
    _, mark, after = text.partition(GOLD_MARK)
    match = NUMBER.search(after) if mark else None
    return _decimal(match) if match else _last(text)


def _last(text: str) -> Decimal | None:
    matches = [*NUMBER.finditer(text)]
    return _decimal(matches[-1]) if matches else None


def _decimal(match: re.Match[str]) -> Decimal:
    value = Decimal(match["digits"].replace(",", ""))
    return -value if match["sign"] or match["sign2"] else value
