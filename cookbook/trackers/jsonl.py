"""Rows of JSON, one a line, in a file that only grows; a resumed run first cuts what came after its checkpoint."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from cookbook import atomic
from cookbook.errors import ConfigError


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
        """All whole rows. A last line that a kill cut short is left out."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").split("\n"):  # text may hold other line ends
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
        return rows

    def keep_until(self, step: int) -> None:
        """Drops the rows of later steps: the run goes on from ``step``, and would write them again."""
        if not self.path.exists():
            return
        kept = [row for row in self.read() if row["step"] <= step]
        whole = "".join(map(_line, kept))
        if whole.encode() == self.path.read_bytes():
            return
        with self._writing():
            atomic.write_text(self.path, whole)

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


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
