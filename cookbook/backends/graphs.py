"""Forward passes that a backward pass may go on from, so that a loss computed elsewhere costs what a built-in one costs.

Somebody asks for a forward, computes a loss of its logprobs by himself, and asks for the gradient with a second call on the
same tokens. That a second call will come cannot be seen in the first. But steps repeat: what became of the k-th forward of
the step before tells what to expect of this one. A wrong guess costs memory or time, never a result.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from cookbook.engine.engine import Engine, Retained
from cookbook.engine.loss_gradient import LossFunction
from cookbook.types import Datum, ForwardBackwardOutput

REMEMBERED = 1024  # forwards of one version of the weights: nobody has more in a step, and an evaluation may have any number


@dataclass
class _Forward:
    """The ``place``-th forward since the weights changed; ``graph`` when it was kept and is still there."""

    place: int
    graph: Retained | None


@dataclass
class _Model:
    """What one engine was asked since its weights changed, by the tokens and targets asked about."""

    version: int
    forwards: dict[bytes, _Forward] = field(default_factory=dict)
    count: int = 0
    continued: set[int] = field(default_factory=set)  # places of forwards that got their backward
    expected: frozenset[int] = frozenset()  # those of the step before

    def at(self, version: int) -> None:
        if version != self.version:
            if self.count:
                self.expected = frozenset(self.continued)
            self.version, self.count = version, 0
            self.forwards.clear()
            self.continued.clear()

    @property
    def graphs(self) -> list[Retained]:
        return [one.graph for one in list(self.forwards.values()) if one.graph is not None]


class Graphs(Protocol):
    """What a trainer asks for its forward passes, and their graphs."""

    def forward(self, engine: Engine, data: Sequence[Datum], loss: LossFunction) -> ForwardBackwardOutput: ...
    def take(self, engine: Engine, data: Sequence[Datum]) -> Retained | None: ...
    def drop(self, engine: Engine) -> None: ...


class KeptGraphs:
    """The graphs of all trainers of one worker, which alone uses it; ``max_bytes`` bounds them together, 0: none is kept."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._models: weakref.WeakKeyDictionary[Engine, _Model] = weakref.WeakKeyDictionary()

    @property
    def num_bytes(self) -> int:
        """About what they hold in memory."""
        return sum(graph.num_bytes for model in list(self._models.values()) for graph in model.graphs)

    def forward(
        self, engine: Engine, data: Sequence[Datum], loss: LossFunction, keep: bool | None = None
    ) -> ForwardBackwardOutput:
        """As ``engine.forward``; with its graph when a backward is expected, or as ``keep`` says."""
        if not data or not (self.max_bytes or keep):
            return engine.forward(data, loss)
        model = self._model(engine)
        place, model.count = model.count, model.count + 1
        graph = None
        wanted = _estimate(engine, data)
        if keep is None:
            keep = place in model.expected and wanted <= self.max_bytes and _can_go_on(engine)
        if keep:
            self._make_room(wanted)
            graph, output = engine.forward_retained(data, loss)
        else:
            output = engine.forward(data, loss)
        if len(model.forwards) < REMEMBERED:
            model.forwards[_digest(data)] = _Forward(place, graph)
        self._make_room(0)
        return output

    def take(self, engine: Engine, data: Sequence[Datum]) -> Retained | None:
        """The graph of a forward of the same tokens and targets under the present weights; it is the caller's from now on."""
        model = self._model(engine)
        known = model.forwards.pop(_digest(data), None) if model.forwards else None
        if known is None:
            return None
        model.continued.add(known.place)
        return known.graph

    def drop(self, engine: Engine) -> None:
        """The weights have changed: what was kept of the old ones is worth nothing."""
        self._model(engine)

    def holds(self, engine: Engine, data: Sequence[Datum]) -> bool:
        """Whether the graph of a forward of the same tokens and targets is there."""
        known = self._model(engine).forwards.get(_digest(data))
        return known is not None and known.graph is not None

    def memory(self, engine: Engine) -> dict[str, Any] | None:
        """What decides about the engine's next forwards, as JSON has it; None while a graph is kept, which JSON has not."""
        model = self._model(engine)
        if model.graphs:
            return None
        forwards = {digest.hex(): one.place for digest, one in model.forwards.items()}
        return {
            "forwards": forwards,
            "count": model.count,
            "continued": sorted(model.continued),
            "expected": sorted(model.expected),
        }

    def remember(self, engine: Engine, memory: dict[str, Any]) -> None:
        """The inverse of :meth:`memory`, for the same weights in another process."""
        model = self._model(engine)
        model.forwards = {bytes.fromhex(digest): _Forward(place, None) for digest, place in memory["forwards"].items()}
        model.count = memory["count"]
        model.continued, model.expected = set(memory["continued"]), frozenset(memory["expected"])

    def _model(self, engine: Engine) -> _Model:
        model = self._models.setdefault(engine, _Model(engine.version))
        model.at(engine.version)
        return model

    def _make_room(self, wanted: int) -> None:
        """Lets go of the oldest graphs of whoever holds most until ``wanted`` bytes more fit."""
        while self.num_bytes and self.num_bytes + wanted > self.max_bytes:
            models = list(self._models.values())
            largest = max(models, key=lambda model: sum(graph.num_bytes for graph in model.graphs))
            oldest = min((one for one in largest.forwards.values() if one.graph is not None), key=lambda one: one.place)
            oldest.graph = None


def _can_go_on(engine: Engine) -> bool:
    """Not where a forward in training drops out and another does not; nor where the router's loss needs more of it."""
    return not (engine.passes.drops_out or engine.router_coefficient)


def _estimate(engine: Engine, data: Sequence[Datum]) -> int:
    tokens = sum(datum.model_input.length for datum in data)
    return min(int(tokens * engine.passes.bytes_per_token), engine.options.retain_bytes)


def _digest(data: Sequence[Datum]) -> bytes:
    """What the model makes its logprobs of. The engine compares the whole before it goes on."""
    found = hashlib.blake2b(digest_size=16)
    for datum in data:
        found.update(np.asarray(datum.model_input.tokens, dtype=np.int64).tobytes())
        for key in ("target_tokens", "temperature"):
            if key in datum.loss_fn_inputs:
                found.update(key.encode() + datum.loss_fn_inputs[key].array.tobytes())
    return found.digest()
