"""``cookbook cache``: rows and tokens of large data that runs keep on disk."""

from __future__ import annotations

import time
from pathlib import Path

from cookbook.data import cache
from cookbook.errors import ConfigError
from cookbook.utils import tables

DAY_S = 24 * 3600.0


def print_list(folder: Path | None, *, table: bool) -> None:
    """Print a line for each table in the cache, the least recently used first, and the sum of their sizes.

    Raises:
        ConfigError: the cache is off.
    """
    root = _root(folder)
    entries = cache.entries(root)
    if entries:
        rows = [
            (
                entry.path.name.partition("-")[0],
                f"{entry.facts['rows']:,}" if entry.facts else "damaged",
                _megabytes(entry.num_bytes),
                f"{max(0.0, time.time() - entry.used_s) / DAY_S:.1f} days ago",
                entry.facts.get("first", ""),
            )
            for entry in entries
        ]
        tables.show("cache", ("holds", "number", "size", "last used", "first row"), rows, table=table)
    print(f"{root}: {_number(entries)}, {_megabytes(sum(entry.num_bytes for entry in entries))}")


def clear(folder: Path | None, unused_days: float) -> None:
    """Remove the tables that no run has used for this number of days.

    Raises:
        ConfigError: the cache is off, or the disk refuses.
    """
    root = _root(folder)
    try:
        removed = cache.clear(root, unused_days * DAY_S)
    except OSError as error:
        raise ConfigError(f"cache: cannot clear {root}: {error}; change its permissions, or remove it yourself") from None
    print(f"{root}: removed {_number(removed)}, {_megabytes(sum(entry.num_bytes for entry in removed))}")


def _root(folder: Path | None) -> Path:
    root = cache.location(cache.AUTO if folder is None else str(folder))
    if root is None:
        where = f"${cache.CACHE}" if folder is None or str(folder) == cache.AUTO else "--folder"
        raise ConfigError(f"cache: {where} is {cache.OFF}; name a folder with --folder")
    return root


def _number(entries: list[cache.CacheEntry]) -> str:
    return "1 entry" if len(entries) == 1 else f"{len(entries)} entries"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
