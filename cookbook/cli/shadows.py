"""Says which of the user's files are used instead of packaged ones: a ``./conf`` may belong to another project."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from cookbook import paths


def note_conf(names: Iterable[str]) -> None:
    """For each ``group/option`` that ``./conf`` and the packaged conf both have, one line on stderr."""
    for name in names:
        _note("conf", f"{name}.yaml")


def note_recipe(name: str) -> None:
    """The same for a recipe's file."""
    _note("recipes", f"{name}.py")


def _note(kind: str, name: str) -> None:
    having = [folder for folder in paths.overlays(kind) if (folder / name).is_file()]
    if len(having) > 1:
        print(f"using ./{kind}/{name} instead of the packaged one", file=sys.stderr)
