"""One run of a recipe, from its configuration to its report. ``Run`` and ``Step`` are loaded when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cookbook.run.run import Run, Step

__all__ = ["Run", "Step"]


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(importlib.import_module("cookbook.run.run"), name)
    raise AttributeError(f"module 'cookbook.run' has no attribute {name!r}")
