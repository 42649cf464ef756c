"""Which forward passes of a run were kept: noted, so that its log can be replayed with the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cookbook.backends.graphs import KeptGraphs
from cookbook.engine.engine import Engine, Retained
from cookbook.engine.loss_gradient import LossFunction
from cookbook.errors import BackendError
from cookbook.types import Datum, ForwardBackwardOutput


class RunGraphs:
    """One run's side of the graphs that all runs share.

    Memory decides whether a graph is kept, and with it the order of roundings. ``forced`` repeats the decision of an earlier
    process; None leaves it to the shared graphs. Used by the worker alone, but for ``forced``.
    """

    def __init__(self, shared: KeptGraphs) -> None:
        self.forced: bool | None = None
        self._shared = shared
        self._decided: bool | None = None

    def forward(self, engine: Engine, data: Sequence[Datum], loss: LossFunction) -> ForwardBackwardOutput:
        output = self._shared.forward(engine, data, loss, self.forced)
        self._decided = self._shared.holds(engine, data)
        return output

    def take(self, engine: Engine, data: Sequence[Datum]) -> Retained | None:
        graph = self._shared.take(engine, data)
        if self.forced and graph is None:
            raise BackendError("replay: a forward pass that was kept is gone, other runs need memory; raise server.graphs_gb")
        if self.forced is False:
            graph = None
        self._decided = graph is not None
        return graph

    def drop(self, engine: Engine) -> None:
        self._shared.drop(engine)

    def decided(self) -> bool | None:
        """Whether the call that has just ended kept or used a graph; None: it did not ask."""
        decided, self._decided = self._decided, None
        return decided

    def memory(self, engine: Engine) -> dict[str, Any] | None:
        return self._shared.memory(engine)

    def remember(self, engine: Engine, memory: dict[str, Any]) -> None:
        self._shared.remember(engine, memory)
