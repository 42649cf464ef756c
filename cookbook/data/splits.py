"""Splits by name, slices of splits and their sums, in the words of ``datasets``: ``train[:10%]+test``; mixtures of sources."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from cookbook.data.rows import Row
from cookbook.errors import ConfigError, DataError

T = TypeVar("T")
# Makes the draws of a mixture independent of others with the same seed.
MIXTURE = b"mixture"
PART = re.compile(r"(?P<name>[^\[\]+\s]+)(\[(?P<start>-?\d[\d_]*%?)?:(?P<stop>-?\d[\d_]*%?)?\])?")
FORMS = "write train, train[:1000], train[90%:] or train+test"


class SplitReader(Protocol):
    """The rows of one split."""

    def count(self) -> int:
        """Return the number of rows."""

    def between(self, start: int, stop: int | None) -> Iterator[Row]:
        """Return the rows from ``start`` to ``stop``, exclusive; None: to the end."""


class SequentialReader:
    """A split that has to be read from its start, such as a text file. Counting its rows keeps them."""

    def __init__(self, read: Callable[[], Iterator[Row]]) -> None:
        self._read = read
        self._rows: list[Row] | None = None

    def count(self) -> int:
        if self._rows is None:
            self._rows = list(self._read())
        return len(self._rows)

    def between(self, start: int, stop: int | None) -> Iterator[Row]:
        return islice(self._read() if self._rows is None else self._rows, start, stop)


def _not_counted() -> int:
    raise ConfigError(
        "data.split: a percentage or a negative number needs the number of rows; give numbers of rows, "
        "or set data.streaming=false"
    )


@dataclass(frozen=True)
class SplitPart:
    """One part of a sum: a split, or a slice of it. A bound is None, a number, or a number with ``%``."""

    text: str
    name: str
    start: str | None
    stop: str | None

    @property
    def is_whole(self) -> bool:
        return self.start is None and self.stop is None

    def bounds(self, count: Callable[[], int]) -> tuple[int, int | None]:
        """Return the first row and the one after the last. ``count`` is called only if a bound depends on it.

        Source: ``datasets.ReadInstruction``. One bound with ``%`` makes both percentages, rounded to the closest row.
        """
        texts = [self.start or "", self.stop or ""]
        percent = any("%" in text for text in texts)
        numbers = [int(text.rstrip("%")) if text else None for text in texts]
        if percent and any(number is not None and abs(number) > 100 for number in numbers):
            raise ConfigError(f"data.split: a percentage above 100, got {self.text!r}; {FORMS}")
        rows = [_row(number, percent, count) for number in numbers]
        return rows[0] or 0, rows[1]


def _row(number: int | None, percent: bool, count: Callable[[], int]) -> int | None:
    if number is None or (number >= 0 and not percent):
        return number
    row = round(number * count() / 100) if percent else number
    return row if row >= 0 else max(count() + row, 0)


def parts(split: str, key: str = "data.split") -> list[SplitPart]:
    """Return the parts of a sum of splits.

    Raises:
        ConfigError: a part is neither a name nor a slice. ``key`` names ``split`` in the error.
    """
    result = []
    for text in split.split("+"):
        match = PART.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f"{key}: cannot read {split!r} at {text.strip()!r}; {FORMS}")
        result.append(SplitPart(text.strip(), match["name"], match["start"], match["stop"]))
    return result


def read(
    split: str, reader: Callable[[str], SplitReader], key: str = "data.split", *, streaming: bool = False
) -> Iterator[Row]:
    """Yield the rows of a sum of splits, part by part. ``reader`` gives the rows of a split by name.

    Raises:
        ConfigError: the split cannot be read; or ``streaming`` is set, and a bound depends on the number of rows.
        DataError: two parts have a row in common.
    """
    readers: dict[str, SplitReader] = {}
    taken: list[tuple[str, int, float]] = []
    for part in parts(split, key):
        rows_of_split = readers[part.name] if part.name in readers else readers.setdefault(part.name, reader(part.name))
        start, stop = part.bounds(_not_counted if streaming else rows_of_split.count)
        end = float("inf") if stop is None else stop
        if any(part.name == name and start < last and first < end for name, first, last in taken):
            raise DataError(f"{key}: {split} has rows twice; drop {part.text}, or repeat rows with data.mix")
        taken.append((part.name, start, end))
        yield from rows_of_split.between(start, max(start, stop) if stop is not None else None)


def overlap(
    split: str, eval_split: str, reader: Callable[[str], SplitReader], *, one_name: bool = False, streaming: bool = False
) -> str | None:
    """Return the part of ``eval_split`` that has a row of ``split``; None if they have no row in common.

    Args:
        one_name: all names mean the same rows, as for a file.
        streaming: the number of rows is unknown, and bounds that depend on it raise ConfigError.
    """
    readers: dict[str, SplitReader] = {}

    def bounds(part: SplitPart) -> tuple[int, float]:
        def count() -> int:
            if part.name not in readers:
                readers[part.name] = reader(part.name)
            return readers[part.name].count()

        start, stop = part.bounds(_not_counted if streaming else count)
        return start, float("inf") if stop is None else stop

    for held_out in parts(eval_split, "data.eval_split"):
        for trained in parts(split):
            if one_name or held_out.name == trained.name:
                (start, stop), (first, last) = bounds(trained), bounds(held_out)
                if max(start, first) < min(stop, last):
                    return held_out.text
    return None


# ---- mixtures: how many rows of each source, which ones, and their order, as pure functions of sizes, weights and seed


def mixture_counts(sizes: Sequence[int], weights: Sequence[float] | None, until: str) -> list[int]:
    """Return the number of rows of each source in the mixture; without weights, all rows.

    The rows are in the ratio of the weights, rounded, at least one of each source. With ``first_exhausted``, the mixture is as
    large as it can be without a repeated row; with ``all_exhausted``, as small as it can be with every row.

    Source: ``datasets.interleave_datasets``, whose draws come close to these numbers.
    """
    if weights is None:
        return list(sizes)
    # Exact: 0.7 and 0.3 of 700 and 300 rows are all of them.
    exact = [Fraction(str(weight)) for weight in weights]
    ends = [size / weight for size, weight in zip(sizes, exact, strict=True)]
    total = min(ends) if until == "first_exhausted" else max(ends)
    return [max(1, round(total * weight)) for weight in exact]


def mixture_order(counts: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the source of each row. Sources alternate: every stretch of rows has close to the shares of the whole."""
    places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    sources = np.repeat(np.arange(len(counts)), counts)
    # A stable sort, so that equal places have the order of the sources.
    return np.asarray(sources[np.argsort(places, kind="stable")], dtype=np.int64)


def mixed(sources: Sequence[Sequence[T]], counts: Sequence[int], seed: int) -> list[T]:
    """Return ``counts[i]`` rows of source i, interleaved.

    A source with more rows gives a draw by ``seed``, in its order. A source with fewer rows is repeated, and the incomplete
    repetition is such a draw.
    """
    chosen = []
    for index, (rows, count) in enumerate(zip(sources, counts, strict=True)):
        whole, remainder = divmod(count, len(rows))
        draw = np.random.default_rng((seed, *MIXTURE, index)).permutation(len(rows))[:remainder]
        chosen.append(iter([*rows] * whole + [rows[row] for row in sorted(draw.tolist())]))
    return [next(chosen[source]) for source in mixture_order(counts)]


def interleaved(sources: Sequence[Callable[[], Iterator[T]]], weights: Sequence[float], until: str) -> Iterator[T]:
    """Yield the rows of sources of unknown size, in the ratio of the weights; each source is read in its order.

    With ``first_exhausted``, the rows end when a row of an exhausted source is due. With ``all_exhausted``, an exhausted
    source is read again, and the rows end when the last source is exhausted. A source has at least one row.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    # The next row of each source is due at this share of its weight: the order of mixture_order.
    due = [(Fraction(1, 2) / weight, index) for index, weight in enumerate(exact)]
    heapq.heapify(due)
    opened = [source() for source in sources]
    unfinished = set(range(len(sources)))
    while True:
        share, index = due[0]
        row = next(opened[index], None)
        if row is None:
            unfinished.discard(index)
            if until == "first_exhausted" or not unfinished:
                return
            opened[index] = sources[index]()
            row = next(opened[index])
        yield row
        heapq.heapreplace(due, (share + 1 / exact[index], index))
