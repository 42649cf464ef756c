"""Rows of large data: the JSON text of each row in a memory-mapped file, decoded when the row is used."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import overload

import numpy as np

from cookbook.data import cache
from cookbook.data.rows import RejectedRow, Row
from cookbook.types import Array, JsonObject

# Rows that stay in memory as objects: below this number, a file saves neither time nor memory that matters.
MIN_ROWS = 4096
BLOCK = 256
COLUMNS = {"values": "u1", "values_end": "i8", "places": "u1", "places_end": "i8"}


def select(rows: Sequence[Row], indices: Sequence[int]) -> Sequence[Row]:
    """Return the rows of these indices, in this order. Many rows of a table stay in the table."""
    if isinstance(rows, RowTable) and len(indices) >= MIN_ROWS:
        return rows.select(np.asarray(indices, dtype=np.int64))
    return [rows[index] for index in indices]


def rows_digest(rows: Sequence[Row]) -> str:
    """Return a digest of the rows' values in order. The location of the rows does not matter."""
    if isinstance(rows, RowTable):
        return rows.values_digest[:16]
    sha = hashlib.sha256()
    for row in rows:
        sha.update(json.dumps(row.values, default=str).encode())
    return sha.hexdigest()[:16]


class RowTable(Sequence[Row]):
    """Rows in columns. A row is decoded each time it is used; it equals the row that was added.

    Args:
        facts: ``digests``, if they are known.
        writer: the writer of the arrays, if they are not in the cache yet.
    """

    def __init__(
        self, arrays: dict[str, Array], facts: JsonObject | None = None, writer: cache.TableWriter | None = None
    ) -> None:
        self._arrays = arrays
        self._writer = writer
        self._values, self._values_end = arrays["values"].data, arrays["values_end"]
        self._places, self._places_end = arrays["places"].data, arrays["places_end"]
        self._selected = arrays.get("selected")
        if facts is not None:
            self.values_digest, self.identity = facts["digests"]

    def __len__(self) -> int:
        return len(self._values_end if self._selected is None else self._selected)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return select(self, range(*index.indices(len(self))))
        number = self._number(index)
        return Row(text_at(self._places, self._places_end, number), json.loads(self._json(number).decode("ascii")))

    def __iter__(self) -> Iterator[Row]:
        return map(self.__getitem__, range(len(self)))

    def place(self, index: int) -> str:
        """Return ``where`` of a row."""
        return text_at(self._places, self._places_end, self._number(index))

    def select(self, indices: Array) -> RowTable:
        """Return these rows, in this order, without a copy of their values."""
        selected = indices if self._selected is None else self._selected[indices]
        return RowTable({**self._arrays, "selected": selected}, writer=self._writer)

    @cached_property
    def values_digest(self) -> str:
        """SHA-256 of the values in order."""
        if self._selected is None:
            return hashlib.sha256(self._values).hexdigest()
        sha = hashlib.sha256()
        for number in self._selected.tolist():
            sha.update(self._json(number))
        return sha.hexdigest()

    @cached_property
    def identity(self) -> str:
        """Digest of the values, of their order and of ``where`` of each row."""
        selected = b"" if self._selected is None else self._selected.tobytes()
        return hashlib.sha256(
            b"".join([self.values_digest.encode(), hashlib.sha256(self._places).digest(), selected])
        ).hexdigest()

    def save(self, key: str, rejected: Sequence[RejectedRow]) -> None:
        """Keep the rows in the cache, with the rows that were rejected while they were read."""
        writer = self._writer
        if writer is None:
            return
        if self._selected is not None:
            writer.add_column("selected", self._selected)
        facts = {"rows": len(self), "first": self.place(0) if len(self) else "", "digests": [self.values_digest, self.identity]}
        writer.commit(key, {**facts, "rejected": [(refusal.where, refusal.policy, refusal.reason) for refusal in rejected]})

    def _number(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        return index if self._selected is None else int(self._selected[index])

    def _json(self, number: int) -> bytes:
        return bytes(self._values[self._values_end[number - 1] if number else 0 : self._values_end[number]])


class RaggedEnds:
    """Ends of texts or lists of different lengths, which follow each other in one array. Blocks are added in order."""

    def __init__(self) -> None:
        self._ends: Counter[str] = Counter()

    def ends(self, name: str, sizes: Sequence[int]) -> Array:
        """Return the ends in the array ``name`` of further items with these sizes."""
        ends = np.cumsum(sizes, dtype=np.int64) + self._ends[name]
        self._ends[name] += sum(sizes)
        return ends

    def texts(self, name: str, texts: Sequence[bytes]) -> dict[str, Array]:
        """Return the columns ``name`` and ``name_end`` of further texts; :func:`text_at` returns one of them."""
        return {name: np.frombuffer(b"".join(texts), np.uint8), f"{name}_end": self.ends(name, [*map(len, texts)])}


def text_at(content: memoryview | Array, ends: Array, number: int) -> str:
    return bytes(content[ends[number - 1] if number else 0 : ends[number]]).decode("utf-8", "surrogatepass")


class _NotJsonError(TypeError):
    """A value that JSON cannot represent."""


def _refused(value: object) -> str:
    raise _NotJsonError(type(value).__name__)


class RowBuffer:
    """Rows as they are read: objects in memory, and from ``min_rows`` on a table.

    Args:
        setting: ``data.cache``.
    """

    def __init__(self, setting: str | bool, min_rows: int | None = None) -> None:
        self._setting = setting
        self._min_rows = MIN_ROWS if min_rows is None else min_rows
        self._objects: list[Row] = []
        self._writer: cache.TableWriter | None = None
        self._ends = RaggedEnds()
        # The table's rows before those of ``_objects`` are in the file. Values such as dates have no JSON text.
        self._is_json = True
        self._encode = json.JSONEncoder(default=_refused).encode
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, row: Row) -> None:
        """Add a row."""
        self._objects.append(row)
        self._count += 1
        if self._is_json and self._count >= self._min_rows and len(self._objects) >= BLOCK:
            self._flush()

    def rows(self) -> Sequence[Row]:
        """Return all rows; none can be added afterwards."""
        if self._is_json and self._count >= self._min_rows:
            self._flush()
        if self._writer is None:
            return self._objects
        return RowTable(self._writer.arrays(), writer=self._writer)

    def _flush(self) -> None:
        """Move the rows from memory to the table; or back into memory, if one of them has no JSON text."""
        try:
            # A row with further fields would lose them in the table.
            if any(type(row) is not Row or row.source is not None for row in self._objects):
                raise _NotJsonError
            values = [self._encode(row.values).encode() for row in self._objects]
        except _NotJsonError:
            self._is_json = False
            if self._writer is not None:
                self._objects = [*RowTable(self._writer.arrays()), *self._objects]
                self._writer = None
            return
        if self._writer is None:
            self._writer = cache.TableWriter(cache.location(self._setting), COLUMNS)
        places = [row.where.encode("utf-8", "surrogatepass") for row in self._objects]
        self._writer.append(**self._ends.texts("values", values), **self._ends.texts("places", places))
        self._objects = []


def as_table(rows: Sequence[Row], setting: str | bool) -> RowTable | None:
    """Return the rows as a table; None if a value has no JSON text."""
    if isinstance(rows, RowTable):
        return rows
    buffer = RowBuffer(setting, min_rows=0)
    for row in rows:
        buffer.append(row)
    table = buffer.rows()
    return table if isinstance(table, RowTable) else None
