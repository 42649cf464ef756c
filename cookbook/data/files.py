"""Rows from JSON and CSV, with the line of every mistake. Reads as far as it is asked to, one line at a time."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cookbook.data.refusals import Refusals
from cookbook.data.rows import Row
from cookbook.errors import DataError
from cookbook.suggest import did_you_mean

JSON_LINES = (".jsonl", ".ndjson")
SUFFIXES = (*JSON_LINES, ".json", ".csv", ".parquet")


def existing(path: str, key: str) -> Path:
    """``path`` as a file or folder that is there.

    Raises:
        DataError: it is not, with the nearest name in the same folder.
    """
    found = Path(path).expanduser()
    if found.exists():
        return found
    siblings = [entry.name for entry in found.parent.iterdir()] if found.parent.is_dir() else []
    raise DataError(f"{key}: {path} does not exist; give a file or folder.{did_you_mean(found.name, siblings)}")


def read_json_lines(path: Path, refusals: Refusals) -> Iterator[Row]:
    """One JSON object per line. Lines of white space alone hold no row.

    Raises:
        DataError: ``file:line`` of what is not UTF-8, not JSON, or not an object, where ``refusals`` does not take it.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                if text := _utf8(line, where).strip():
                    yield Row(where, _object(_parse(text, where), where))
            except DataError as error:
                refusals.add_error(where, error)


def read_json(path: Path, refusals: Refusals) -> Iterator[Row]:
    """A file that is one JSON array of objects, or JSON lines under another name.

    Raises:
        DataError: where it is neither; of an element that is no object, as :func:`read_json_lines`.
    """
    text = _utf8(path.read_bytes(), str(path))
    if not text.lstrip().startswith("["):
        yield from read_json_lines(path, refusals)
        return
    for index, value in enumerate(_parse(text, str(path), many_lines=True)):
        where = f"{path}[{index}]"
        try:
            yield Row(where, _object(value, where))
        except DataError as error:
            refusals.add_error(where, error)


def read_csv(path: Path, refusals: Refusals) -> Iterator[Row]:
    """A table with a line of column names. Every cell is text, spelled as in the file: CSV has no numbers.

    A row is named after its first line; a quoted cell may go over several.

    Raises:
        DataError: no line of names, or two equal ones; of a row with other cells than names, as :func:`read_json_lines`.
    """
    csv.field_size_limit(sys.maxsize)
    with path.open("rb") as file:
        decoded = (_utf8(line, f"{path}:{number}") for number, line in enumerate(file, start=1))
        lines = csv.reader(decoded, strict=True)  # else an open quote would swallow the rest of the file
        names: list[str] = []
        while True:
            where = f"{path}:{lines.line_num + 1}"
            try:
                cells = next(lines, None)
            except csv.Error as error:
                raise DataError(f"{where}: broken CSV: {error}; mend the line") from None
            if cells is None:
                return
            if not cells:  # an empty line
                continue
            if not names:
                names = cells
                if twice := [name for name in names if names.count(name) > 1]:
                    raise DataError(f"{where}: the column {twice[0]!r} is there twice; rename one of them")
            elif len(cells) == len(names):
                yield Row(where, dict(zip(names, cells, strict=True)))
            else:
                message = f"{len(cells)} cells under {len(names)} column names; quote cells that hold commas or line ends"
                refusals.add_error(where, DataError(f"{where}: {message}"))


def _utf8(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start}; save the file as UTF-8") from None


def _parse(text: str, where: str, many_lines: bool = False) -> Any:
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        place = f"{where}:{error.lineno}" if many_lines else where
        raise DataError(f"{place}: broken JSON at column {error.colno}: {error.msg}; mend or remove the line") from None
    except _DuplicateKeyError as error:
        raise DataError(f"{where}: the key {error} is given twice in one object; keep one of them") from None
    except (ValueError, RecursionError) as error:  # a number of more digits than Python reads, brackets without end
        raise DataError(f"{where}: cannot be read: {str(error).partition(';')[0]}; mend or remove the line") from None


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: a row must be a JSON object with a key per column, got {type(value).__name__}")
    return value


class _DuplicateKeyError(Exception):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON keeps the last of two equal keys in silence; half of a preference pair could vanish that way."""
    values = dict(pairs)
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _DuplicateKeyError(json.dumps(next(key for key in keys if keys.count(key) > 1)))
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
