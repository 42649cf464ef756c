"""Rows of JSON, one a line, in a file that only grows; a resumed run first cuts what came after its checkpoint."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO


class JsonLines:
    """A file of JSON objects. Every row starts with its ``step``; a row is on the disk when :meth:`write` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        if self._file is None:
            self._file = self.path.open("a", encoding="utf-8")
        row = {"step": step, **{key: _plain(value) for key, value in values.items() if key != "step"}}
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._file.flush()

    def read(self) -> list[dict[str, Any]]:
        """All whole rows. A last line that a kill cut short is left out."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
        return rows

    def keep_until(self, step: int) -> None:
        """Drops the rows of later steps: the run goes on from ``step``, and would write them again."""
        kept = [row for row in self.read() if row["step"] <= step]
        aside = self.path.with_suffix(".tmp")
        aside.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept), encoding="utf-8")
        os.replace(aside, self.path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
