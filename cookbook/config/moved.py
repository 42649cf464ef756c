"""New places of modules and classes that have moved. A stored ``_target_`` is followed; a user's import becomes an error."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path


@functools.cache
def moved_names() -> dict[str, str]:
    """Return today's name of each name in ``moved.txt``.

    A user who has followed a module to its new place may still ask that module for the earlier name of a class, so the class
    is listed there too.
    """
    lines = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    rows = dict(line.split(maxsplit=1) for line in lines if not line.startswith("#"))
    for name, new in list(rows.items()):
        module, _, last = name.rpartition(".")
        rows.setdefault(f"{_followed(module, rows)}.{last}", new)
    return rows


def new_name(name: str) -> str:
    """Return today's name of a module or of something in it: ``package.module.Class`` or ``package.module:Class``."""
    return _followed(name, moved_names()) if name.startswith("cookbook.") else name


def _followed(name: str, names: Mapping[str, str]) -> str:
    """Replace the longest part of ``name`` that has moved, counted from its start."""
    parts = re.split(r"(?=[.:])", name)
    for length in range(len(parts), 0, -1):
        if (new := names.get("".join(parts[:length]))) is not None:
            return new + "".join(parts[length:])
    return name


def moved_import(error: ImportError) -> str | None:
    """Return a clause that names the new place of what an import did not find; None if it has no new place."""
    name = error.name or ""
    if match := re.match(r"cannot import name '(\w+)' from 'cookbook", str(error)):
        name = f"{name}.{match[1]}"
    new = new_name(name)
    return None if new == name else f"imports {name}, which is now {new}; change the import"
