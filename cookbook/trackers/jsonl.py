"""Rows of JSON, one a line, in a file that only grows; a resumed run first cuts what came after its checkpoint."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from cookbook import atomic
from cookbook.errors import ConfigError

log = logging.getLogger("cookbook")


class JsonLines:
    """A file of JSON objects. Every row starts with its ``step``; a row has left the process when :meth:`write` returns.

    Raises:
        ConfigError: the disk refuses.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last: dict[str, Any] = {}
        """Values of the last row that this process wrote."""
        self._file: TextIO | None = None

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        with self._writing():
            self._file = self._file or self.path.open("a", encoding="utf-8")
            self.last = {key: _plain(value) for key, value in values.items() if key != "step"}
            self._file.write(_line({"step": step, **self.last}))
            self._file.flush()

    def read(self) -> list[dict[str, Any]]:
        """Return all whole rows. Damaged lines are left out and reported; a last line that a kill cut short is left out."""
        rows, damaged = self._read()
        if damaged:
            log.warning("%s: damaged in %s; the other rows are used", self.path, _lines(damaged))
        return rows

    def keep_until(self, step: int) -> None:
        """Drop the rows of later steps, which the resumed run writes again. A file with damaged lines is copied first."""
        if not self.path.exists():
            return
        rows, damaged = self._read()
        whole = "".join(_line(row) for row in rows if row["step"] <= step)
        if whole.encode() == self.path.read_bytes():
            return
        with self._writing():
            if damaged:
                copy = _free_name(self.path)
                shutil.copy2(self.path, copy)
                log.warning("%s: damaged in %s; the other rows are used, and %s is a copy", self.path, _lines(damaged), copy)
            atomic.write_text(self.path, whole)

    def _read(self) -> tuple[list[dict[str, Any]], list[int]]:
        """Return the rows, and the numbers of the lines that are none."""
        rows, damaged = [], []
        lines = self.path.read_bytes().split(b"\n") if self.path.exists() else []  # text may hold other line ends
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line.decode())
                if not (isinstance(row, dict) and isinstance(row.get("step"), int)):
                    raise ValueError("not a row of a run")
                rows.append(row)
            except ValueError:
                if number < len(lines):  # the last line ends a whole file, or was cut short by a kill
                    damaged.append(number)
        return rows, damaged

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # of a row that could not be written: that has been said
                self._file.close()
            self._file = None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"out: cannot write {self.path}: {error.strerror}; make room, then the same command goes on"
            ) from None


def _lines(numbers: Sequence[int]) -> str:
    first = f"line {numbers[0]}"
    return first if len(numbers) == 1 else f"{len(numbers)} lines ({first} is the first)"


def _free_name(path: Path) -> Path:
    """Return ``path`` with the suffix ``.damaged-N``, with the first N that is free."""
    return next(name for n in itertools.count(1) if not (name := path.with_name(f"{path.name}.damaged-{n}")).exists())


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
