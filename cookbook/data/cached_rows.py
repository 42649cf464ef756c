"""Rows of local files that are parsed once: the next start with the same files and options takes them from the cache."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from cookbook import terminal
from cookbook.data import cache, row_table
from cookbook.data.row_table import RowTable, as_table
from cookbook.data.rows import DataConfig, RejectedRows, Row
from cookbook.data.source import load_rows, local_files
from cookbook.types import JsonObject
from cookbook.utils.files import sha256

# The rows of files of at least this size are cached. Smaller files are parsed in a fraction of a second.
MIN_BYTES = 1 << 20
# Keys of `data` that do not change the rows. A key that is not named here changes the name of the entry.
WITHOUT_EFFECT = frozenset(
    {
        "cache",
        "shuffle",
        "shuffle_buffer",
        "curriculum",
        "max_length",
        "on_long",
        "train_on",
        "train_empty_reasoning",
        "chat",
        "system",
    }
)


def load(
    config: DataConfig, which: Literal["train", "eval"], seed: int, eval_limit: int | None, refusals: RejectedRows
) -> Sequence[Row]:
    """Return the rows as :func:`load_rows`, with the same rejected rows in ``refusals``.

    Raises:
        DataError: as :func:`load_rows`.
    """
    root, files = cache.location(config.cache), local_files(config, which)
    limit = eval_limit if which == "eval" and (config.eval_path or config.eval_name) else config.limit
    # A reader stops after the limit; the digest reads whole files.
    if root is None or files is None or (limit is not None and limit < row_table.MIN_ROWS):
        return load_rows(config, which, seed, eval_limit, refusals)
    if (stats := _stats(files)) is None or sum(size for size, _ in stats) < MIN_BYTES:
        return load_rows(config, which, seed, eval_limit, refusals)
    key = _key(config, which, seed, eval_limit, files, stats)
    if (table := cache.find(root, key)) is not None:
        restore_rejected(refusals, table.facts)
        return few_as_list(RowTable(dict(table.arrays), table.facts))
    own = RejectedRows(config, collect=refusals.collects)
    rows = load_rows(config, which, seed, eval_limit, own)
    for refusal in own.found:
        refusals.add(refusal.where, refusal.policy, refusal.reason)
    # Files that another process has changed since they were digested belong to another key.
    if not rows or (stored := as_table(rows, config.cache)) is None or _stats(files) != stats:
        return rows
    stored.save(key, own.found)
    return few_as_list(stored)


def few_as_list(rows: RowTable) -> Sequence[Row]:
    """Return a table of few rows as objects in memory."""
    return rows if len(rows) >= row_table.MIN_ROWS else list(rows)


def restore_rejected(refusals: RejectedRows, facts: JsonObject) -> None:
    """Add the rejected rows that a table of the cache names."""
    for where, policy, reason in facts["rejected"]:
        refusals.add(where, policy, reason)


def _stats(files: Sequence[Path]) -> list[tuple[int, int]] | None:
    """Return size and time of change of each file; None if a file cannot be read, so that its reader raises the error."""
    if not all(os.access(path, os.R_OK) for path in files):
        return None
    return [(status.st_size, status.st_mtime_ns) for status in (path.stat() for path in files)]


def _key(
    config: DataConfig, which: str, seed: int, eval_limit: int | None, files: Sequence[Path], stats: list[tuple[int, int]]
) -> str:
    options = {name: value for name, value in asdict(config).items() if name not in WITHOUT_EFFECT}
    with terminal.doing("computing the digest of the data files"):
        digests = [(str(path), _digest(path, *stat)) for path, stat in zip(files, stats, strict=True)]
    limit, draw = (eval_limit if which == "eval" else None), (seed if config.eval_fraction else None)
    return cache.key_of("rows", which, options, limit, draw, digests)


@functools.lru_cache(maxsize=1024)
def _digest(path: Path, num_bytes: int, changed_ns: int) -> str:
    """Return the digest of a file's content, computed once for its two splits while size and time of change stay."""
    return sha256(path)
