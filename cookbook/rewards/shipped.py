"""Rewards that compare a completion with a column of its row. Each returns 1.0 or 0.0."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from cookbook.errors import ConfigError, DataError
from cookbook.rewards.limits import Limits

# A sign counts only where no number or word ends before it: "10-3" is 10 and 3. Thousands come in groups of three, so
# that "1,2,3" is three numbers and "1,234" one. Currency and percent signs are left where they are.
NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)\]])[-−]\s?)?[$€£]?(?P<sign2>(?<=[$€£])-)?"  # noqa: RUF001
    r"(?P<digits>\d{1,3}(?:,\d{3})+(?![\d])(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
)
GOLD_MARK = "####"  # GSM8K writes its final answer behind it


@dataclass(frozen=True)
class Number(Limits):
    """The last number of the completion equals the gold number: the first one behind ``####``, else the last."""

    column: str = "answer"

    def __call__(self, completion: str, row: Mapping[str, Any]) -> float:
        value = _cell(row, self.column)
        gold = _gold(str(value))
        if gold is None:
            raise DataError(f'"{self.column}" holds no number, got {value!r}; give a column that does as reward.column')
        return float(_last(completion) == gold)


@dataclass(frozen=True)
class Exact(Limits):
    """The completion is the text of a column."""

    column: str = "answer"
    strip: bool = True
    ignore_case: bool = False

    def __call__(self, completion: str, row: Mapping[str, Any]) -> float:
        return float(self._plain(completion) == self._plain(str(_cell(row, self.column))))

    def _plain(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text


@dataclass(frozen=True)
class Format(Limits):
    """The completion matches a regular expression, anywhere in it or as a whole; ``.`` matches line breaks too.

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
            raise ConfigError(f"reward.pattern: {error}, got {self.pattern!r}; mend the regular expression") from None

    def __call__(self, completion: str, row: Mapping[str, Any]) -> float:
        match = re.fullmatch if self.whole else re.search
        return float(match(self.pattern, completion, re.DOTALL) is not None)


def _cell(row: Mapping[str, Any], column: str) -> Any:
    if row.get(column) is None:
        raise DataError(f'no column "{column}", the row has {", ".join(row) or "none"}; set reward.column')
    return row[column]


def _gold(text: str) -> Decimal | None:
    _, mark, behind = text.partition(GOLD_MARK)
    found = NUMBER.search(behind) if mark else None
    return _decimal(found) if found else _last(text)


def _last(text: str) -> Decimal | None:
    found = None
    for found in NUMBER.finditer(text):  # noqa: B007
        pass
    return _decimal(found) if found else None


def _decimal(match: re.Match[str]) -> Decimal:
    value = Decimal(match["digits"].replace(",", ""))
    return -value if match["sign"] or match["sign2"] else value
