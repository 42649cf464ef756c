"""A row of a dataset, as it was read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cookbook.errors import DataError


class EmptyRowError(DataError):
    """A row with nothing to train on: ``data.on_empty`` decides what becomes of it."""


@dataclass(frozen=True)
class Row:
    """``where`` names the row in errors and logs, the same in every run: ``file:line``, or ``name[split]:index``."""

    where: str
    values: Mapping[str, Any]
