"""Which rows a run trains on, and which it holds out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from cookbook import paths, terminal
from cookbook.data.config import DataConfig
from cookbook.data.files import JSON_LINES, SUFFIXES, existing, read_csv, read_json, read_json_lines
from cookbook.data.hub import read_folder, read_hub, read_table
from cookbook.data.refusals import Refusals
from cookbook.data.rows import Row
from cookbook.errors import ConfigError, DataError

HELD_OUT = b"held out"  # keeps this draw apart from others of the same seed


def load_rows(
    config: DataConfig,
    which: Literal["train", "eval"] = "train",
    seed: int = 0,
    eval_limit: int | None = None,
    refusals: Refusals | None = None,
) -> list[Row]:
    """The rows to train on, or those held out, in the order of the data.

    Held-out rows come from ``eval_path`` or ``eval_name``; else from ``eval_split`` of the training data, when that has
    splits; else ``eval_fraction`` of the training rows is drawn by ``seed`` and leaves them; else there are none.

    Args:
        seed: of the drawn rows.
        eval_limit: the first so many of the held-out rows; ``config.limit`` says it of the training rows.
        refusals: gets the rows that cannot be read and ``config.on_bad_row`` skips; they do not count for a limit. Without
            it the log tells how many there are.

    Raises:
        DataError: nothing to read, or a row that cannot be read.
    """
    if refusals is None:
        refusals = Refusals(config)
        rows = load_rows(config, which, seed, eval_limit, refusals)
        refusals.warn(len(rows) + len(refusals.found))
        return rows
    if which == "eval":
        return _held_out(config, seed, eval_limit, refusals)
    rows = _read(config, config.name, config.path, config.split, config.limit, refusals)
    if _carves(config):
        held = _drawn(len(rows), config.eval_fraction, seed)
        rows = [row for index, row in enumerate(rows) if index not in held]
    return rows


def _held_out(config: DataConfig, seed: int, limit: int | None, refusals: Refusals) -> list[Row]:
    if config.eval_path or config.eval_name:
        split = config.eval_split or config.split
        return _read(config, config.eval_name, config.eval_path, split, limit, refusals, "eval_")
    if _carves(config):
        rows = _read(config, config.name, config.path, config.split, config.limit, refusals)
        held = _drawn(len(rows), config.eval_fraction, seed)
        return [row for index, row in enumerate(rows) if index in held][:limit]
    if config.eval_split and not _is_one_file(config):
        return _read(config, config.name, config.path, config.eval_split, limit, refusals)
    return []


def _carves(config: DataConfig) -> bool:
    elsewhere = config.eval_path or config.eval_name or (config.eval_split and not _is_one_file(config))
    return config.eval_fraction > 0 and not elsewhere


def _is_one_file(config: DataConfig) -> bool:
    return config.path is not None and existing(config.path, "data.path").is_file()


def _drawn(count: int, fraction: float, seed: int) -> set[int]:
    """Indices of the held-out rows: at least one, and never the last one left to train on."""
    if count < 2:
        raise DataError(f"data.eval_fraction: cannot hold rows out of {count}; set data.eval_fraction=0 or add rows")
    held = min(max(1, round(count * fraction)), count - 1)
    return set(np.random.default_rng((seed, *HELD_OUT)).permutation(count)[:held].tolist())


def _read(
    config: DataConfig,
    name: str | None,
    path: str | None,
    split: str,
    limit: int | None,
    refusals: Refusals,
    prefix: str = "",
) -> list[Row]:
    """The first ``limit`` rows; the path goes before the name."""
    if path is not None:
        place = existing(path, f"data.{prefix}path")
        where, in_a_file = str(place), place.is_file()
        rows = _from_file(place, limit, refusals) if in_a_file else _from_folder(place, config.subset, split, limit, refusals)
    elif name is not None:
        rows, where = read_hub(name, config.subset, split, config.streaming, limit), f"{name}[{split}]"
    else:
        raise ConfigError("data: no data given; pass data.path=<file or folder> or data.name=<hub id>")
    before = len(refusals.found)
    found = []
    with terminal.doing(f"reading {paths.shown(place) if path is not None else where}", noun="rows") as activity:
        for row in islice(rows, limit):
            found.append(row)
            activity.count += 1
    refusals.check_left(before, len(refusals.found) - before, len(found))
    if not found and len(refusals.found) == before:
        raise DataError(f"{where}: holds no rows; give a file with at least one")
    return found


def _from_file(path: Path, limit: int | None, refusals: Refusals) -> Iterator[Row]:
    suffix = path.suffix.lower()
    if suffix in JSON_LINES:
        return read_json_lines(path, refusals)
    if suffix == ".json":
        return read_json(path, refusals)
    if suffix == ".csv":
        return read_csv(path, refusals)
    if suffix in SUFFIXES:
        return read_table(path, limit)
    raise DataError(f"{path}: cannot read {suffix or 'a file without a suffix'}; give one of {', '.join(SUFFIXES)}")


def _from_folder(path: Path, subset: str | None, split: str, limit: int | None, refusals: Refusals) -> Iterator[Row]:
    """``<split>.jsonl`` (or another suffix) in it is read by line; any other layout by ``datasets``."""
    for suffix in SUFFIXES:
        if (file := path / f"{split}{suffix}").is_file():
            return _from_file(file, limit, refusals)
    return read_folder(path, subset, split, limit)
