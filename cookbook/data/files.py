"""Reading of local files: the files that a path, a pattern or a list names, and the rows of a file.

JSON and CSV are read line by line, so that every error names its line, and only as far as rows are requested.
"""

from __future__ import annotations

import codecs
import csv
import functools
import glob
import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from cookbook.data.rows import RejectedRows, Row
from cookbook.errors import DataError
from cookbook.utils.suggest import did_you_mean

# Second suffixes of the text formats.
COMPRESSED = (".gz", ".zst")


def places(path: str | Sequence[str], key: str) -> list[Path]:
    """Return the files and folders that ``path`` names: one, a pattern with ``*``, ``?``, ``[]`` or ``**``, or a list of these.

    The files of a pattern are sorted by name; a list keeps its order. ``key`` names ``path`` in errors.

    Raises:
        DataError: a file does not exist, a pattern has no file, or a file is named twice.
    """
    matches = [place for pattern in ([path] if isinstance(path, str) else path) for place in _matches(pattern, key)]
    if twice := next((place for place, times in Counter(matches).items() if times > 1), None):
        raise DataError(f"{key}: {twice} is named twice; name every file once, or repeat its rows with data.mix")
    if not matches:
        raise DataError(f"{key}: the list is empty; name a file or folder")
    return matches


def _matches(path: str, key: str) -> list[Path]:
    place = Path(path).expanduser()
    if place.exists() or not glob.has_magic(path):
        return [existing(path, key)]
    # Path.glob takes no absolute pattern, and matches hidden files.
    names = glob.glob(str(place), recursive=True)  # noqa: PTH207
    files = sorted(file for name in names if (file := Path(name)).is_file())
    if not files:
        raise DataError(f"{key}: no file matches {path}; give a pattern of existing files, such as 'chats/*.jsonl'")
    return files


def existing(path: str, key: str) -> Path:
    """Return ``path`` as an existing file or folder.

    Raises:
        DataError: the path does not exist; the error suggests the nearest name in the same folder.
    """
    place = Path(path).expanduser()
    if place.exists():
        return place
    siblings = [entry.name for entry in place.parent.iterdir()] if place.parent.is_dir() else []
    raise DataError(f"{key}: {path} does not exist; give a file or folder.{did_you_mean(place.name, siblings)}")


def kind_of(file: Path) -> str:
    """Return the suffix without that of a compression: ``.jsonl`` of ``chats.jsonl.gz``."""
    suffix = file.suffix.lower()
    return Path(file.stem).suffix.lower() if suffix in COMPRESSED else suffix


def check_same_format(files: Sequence[Path], key: str) -> None:
    """Raise DataError if the files differ in format: a number of JSON would be text in CSV."""
    first, *others = files
    for other in others:
        if FORMATS.get(kind_of(other)) != FORMATS.get(kind_of(first)):
            raise DataError(
                f"{key}: {first} and {other} differ in format, {kind_of(first) or 'none'} and {kind_of(other) or 'none'}; "
                "give files of one format, or an entry of data.mix for each"
            )


def read_file(path: Path, refusals: RejectedRows) -> Iterator[Row]:
    """Return the rows of a text file.

    Raises:
        DataError: the suffix is unknown; or as the reader of the format.
    """
    kind = kind_of(path)
    if kind not in READERS:
        name = f"{kind}{path.suffix}" if path.suffix.lower() in COMPRESSED else path.suffix
        raise DataError(
            f"{path}: cannot read {name or 'a file without a suffix'}; give one of {', '.join(FORMATS)}, the text formats also "
            f"with {' or '.join(COMPRESSED)}"
        )
    return READERS[kind](path, refusals)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file, decompressed.

    Raises:
        DataError: the compressed file is damaged or cut off.
    """
    suffix = path.suffix.lower()
    if suffix not in COMPRESSED:
        with path.open("rb") as file:
            yield file
        return
    import gzip
    import zlib

    import zstandard

    try:
        with path.open("rb") as raw:
            unpacked = gzip.GzipFile(fileobj=raw) if suffix == ".gz" else io.BufferedReader(_ZstdFile(raw))
            yield cast("BinaryIO", unpacked)
    except (gzip.BadGzipFile, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise DataError(f"{path}: cannot be decompressed ({error}); make or download the file again") from None


class _ZstdFile(io.RawIOBase):
    """A zstd file, decompressed frame by frame. The reader of zstandard takes a file that was cut off for a whole one."""

    def __init__(self, raw: BinaryIO) -> None:
        import zstandard

        self._raw, self._new_frame = raw, zstandard.ZstdDecompressor().decompressobj
        self._frame, self._unread = self._new_frame(), b""
        self._has_frame = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer``. Raises EOFError: the file ends within a frame."""
        while not self._unread:
            content = self._frame.unused_data if self._frame.eof else b""
            content = content or self._raw.read(io.DEFAULT_BUFFER_SIZE)
            if self._frame.eof:
                self._frame, self._has_frame = self._new_frame(), False
            if not content:
                if self._has_frame:
                    raise EOFError("it ends too early")
                return 0
            self._has_frame = True
            self._unread = self._frame.decompress(content)
        count = min(len(buffer), len(self._unread))
        buffer[:count], self._unread = self._unread[:count], self._unread[count:]
        return count


def read_json_lines(path: Path, refusals: RejectedRows) -> Iterator[Row]:
    """Yield one row per line, a JSON object. Blank lines hold no row.

    Raises:
        DataError: a line is not UTF-8, not JSON or not an object, and ``refusals`` does not accept it. Names ``file:line``.
    """
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                if text := _utf8(line, where).strip():
                    yield Row(where, _object(_parse(text, where), where))
            except DataError as error:
                refusals.add_error(where, error)


def read_json(path: Path, refusals: RejectedRows) -> Iterator[Row]:
    """Yield the rows of a JSON array of objects, or of JSON lines in a file with another suffix.

    Raises:
        DataError: the file is neither; an element is not an object, and ``refusals`` does not accept it.
    """
    with _opened(path) as file:
        text = _utf8(file.read(), str(path))
    if not text.lstrip().startswith("["):
        yield from read_json_lines(path, refusals)
        return
    values = _parse(text, str(path), many_lines=True)
    for index, value in enumerate(values if isinstance(values, list) else [values]):
        where = f"{path}[{index}]"
        try:
            yield Row(where, _object(value, where))
        except DataError as error:
            refusals.add_error(where, error)


def read_csv(path: Path, refusals: RejectedRows, delimiter: str = ",") -> Iterator[Row]:
    """Yield the rows of a table with a line of column names. Every cell is text as in the file: CSV has no numbers.

    A row is named after its first line; a quoted cell may have several lines.

    Raises:
        DataError: two columns have one name; or a row has more or fewer cells than names, and ``refusals`` does not accept it.
    """
    csv.field_size_limit(sys.maxsize)
    with _opened(path) as file:
        decoded = (_utf8(line, f"{path}:{number}") for number, line in enumerate(file, start=1))
        # strict: otherwise an open quote would take the rest of the file as one cell.
        lines = csv.reader(decoded, delimiter=delimiter, strict=True)
        names: list[str] = []
        while True:
            where = f"{path}:{lines.line_num + 1}"
            try:
                cells = next(lines, None)
            except csv.Error as error:
                raise DataError(f"{where}: broken CSV: {error}; fix the line") from None
            if cells is None:
                return
            if not cells:  # an empty line
                continue
            if not names:
                names = cells
                if twice := [name for name in names if names.count(name) > 1]:
                    raise DataError(f"{where}: two columns are called {twice[0]!r}; rename one of them")
            elif len(cells) == len(names):
                yield Row(where, dict(zip(names, cells, strict=True)))
            else:
                message = f"{len(cells)} cells under {len(names)} column names; quote cells that hold commas or line ends"
                refusals.add_error(where, DataError(f"{where}: {message}"))


def _utf8(raw: bytes, where: str) -> str:
    try:
        # The codec utf-8-sig, which leaves out the same mark, is written in Python.
        return raw.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start}; save the file as UTF-8") from None


def _parse(text: str, where: str, many_lines: bool = False) -> object:
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        place = f"{where}:{error.lineno}" if many_lines else where
        raise DataError(f"{place}: broken JSON at column {error.colno}: {error.msg}; fix or remove the line") from None
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    except (ValueError, RecursionError) as error:
        # A number of more digits than Python reads, or nesting that is too deep.
        raise DataError(f"{where}: cannot be read: {str(error).partition(';')[0]}; fix or remove the line") from None


def _object(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: a row must be a JSON object with a key per column, got {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Reject equal keys. Python's reader keeps the last one silently, which could drop half of a preference pair."""
    values = dict(pairs)
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = json.dumps(next(key for key in keys if keys.count(key) > 1))
        raise DataError(f"the key {twice} is given twice in one object; keep one of them")
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


READERS: Mapping[str, Callable[[Path, RejectedRows], Iterator[Row]]] = {
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": functools.partial(read_csv, delimiter="\t"),
}
PARQUET = ".parquet"
# Suffix -> format. Files of one format are read together.
FORMATS: Mapping[str, str] = {
    ".jsonl": "JSON",
    ".ndjson": "JSON",
    ".json": "JSON",
    ".csv": "CSV",
    ".tsv": "TSV",
    PARQUET: "Parquet",
}
