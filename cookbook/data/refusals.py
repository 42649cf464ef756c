"""Rows that cannot be used, and what becomes of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from cookbook.data.config import DataConfig
from cookbook.data.rows import EmptyRowError
from cookbook.errors import DataError

log = logging.getLogger(__name__)

Policy = Literal["on_bad_row", "on_empty", "on_long"]


@dataclass(frozen=True)
class Refusal:
    """A row that cannot be used.

    ``reason`` begins with its place, ``where``; ``policy`` is the key of ``data`` that decides; ``fatal``: a run stops there,
    else it leaves the row out.
    """

    where: str
    reason: str
    policy: Policy
    fatal: bool


class Refusals:
    """Takes the rows that cannot be used, and raises for those that ``data.on_bad_row``, ``on_empty`` or ``on_long`` fails on.

    Args:
        collect: raise for none: whoever asks wants to see them all.
    """

    def __init__(self, config: DataConfig, *, collect: bool = False) -> None:
        self._config = config
        self.collects = collect
        self.found: list[Refusal] = []  # each row once
        self.unused: dict[str, None] = {}  # columns, and fields of messages, that hold something and train nothing
        self._places: set[str] = set()

    @property
    def skips_bad_rows(self) -> bool:
        """Whether a bad row is no reason to stop looking at the others."""
        return self.collects or self._config.on_bad_row == "skip"

    def add(self, where: str, policy: Policy, reason: str) -> None:
        """Raises DataError where the policy fails."""
        fatal = getattr(self._config, policy) != "skip"
        if fatal and not self.collects:
            raise DataError(reason)
        if where in self._places:
            return
        self._places.add(where)
        self.found.append(Refusal(where, reason, policy, fatal))

    def add_error(self, where: str, error: DataError) -> None:
        """What reading or rendering the row has raised. Raises it again where the policy fails."""
        self.add(where, "on_empty" if isinstance(error, EmptyRowError) else "on_bad_row", str(error))

    def note_unused(self, columns: Iterable[str], fields: Iterable[str]) -> None:
        """Note the columns, and the fields of messages, that are not used. The log gets one line of them, once."""
        names = [*columns, *(f"{field} of messages" for field in fields)]
        new = [name for name in names if name not in self.unused]
        self.unused |= dict.fromkeys(new)
        if new and not self.collects:
            log.warning("data: columns not used for training: %s", ", ".join(new))

    def check_left(self, since: int, num_rows: int, num_left: int) -> None:
        """Raises DataError when those added after the first ``since`` have left none of ``num_rows`` rows over."""
        if not self.collects and not num_left and len(self.found) > since:
            raise DataError(f"data: all {num_rows} rows were left out; the first: {self.found[since].reason}")

    def warn(self, num_rows: int) -> None:
        """Log how many rows are left out, for callers that do not report them."""
        if self.found:
            log.warning("data: left out %d of %d rows; the first: %s", len(self.found), num_rows, self.found[0].reason)
