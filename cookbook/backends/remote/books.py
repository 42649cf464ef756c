"""Which weights on the server this run still needs."""

from __future__ import annotations

import itertools
import weakref
from pathlib import Path
from typing import Any

from cookbook.backends.remote import pointers
from cookbook.backends.remote.server import Server


class Books:
    """Deletes on the server what no pointer below ``folder`` and no sampler refers to any more.

    It knows what it has seen there: pointers that vanish (a run keeps its newest few), and samplers that nobody holds.
    """

    def __init__(self, server: Server, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._known = {path for _, path in pointers.below(folder)}
        self._samplers: dict[str, weakref.ref[Any]] = {}
        self._numbers = itertools.count()

    def number(self) -> int:
        """A new one, for names."""
        return next(self._numbers)

    def lagging(self, path: str, sampler: Any) -> None:
        """``sampler`` holds on to the weights saved as ``path``."""
        self._samplers[path] = weakref.ref(sampler)
        self._known.add(path)

    def sweep(self, *, closing: bool = False) -> None:
        """Waits for the server. ``closing``: nobody samples any more."""
        pointed = {path for _, path in pointers.below(self._folder)}
        held = {path for path, sampler in self._samplers.items() if sampler() is not None and not closing}
        for path in self._known - pointed - held:
            self._samplers.pop(path, None)
            self._server.delete(path)
        self._known = pointed | held
