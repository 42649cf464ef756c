"""Autograd graphs of forward passes, kept for a later backward pass on the same tokens.

A client with a custom loss first requests a forward pass, computes the loss from the logprobs, and then requests the gradient
on the same tokens. If the graph of the forward pass was kept, the gradient needs no second forward pass.

When a forward pass is requested, it is unknown whether a backward pass will follow, so this is predicted. Training steps
repeat: if a backward pass followed the k-th forward pass of the last step, one is expected for the k-th forward pass of this
step. A wrong prediction costs memory or time, but does not change results.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from cookbook.engine.engine import Engine
from cookbook.engine.forward import Retained
from cookbook.engine.loss_gradient import LossFunction
from cookbook.types import Datum, ForwardBackwardOutput, JsonObject

# Limit on the forward passes that are tracked per version of the weights. A training step has fewer; an evaluation may have
# more.
MAX_FORWARDS = 1024


@dataclass
class _Forward:
    """The ``index``-th forward pass since the weights changed. ``graph`` is None if it was not kept, or was freed."""

    index: int
    graph: Retained | None


@dataclass
class _Model:
    """Forward passes of one engine since its weights changed.

    Attributes:
        forwards: the passes by a digest of their tokens and targets.
        continued: indices of the passes that a backward pass followed.
        expected: ``continued`` of the last step.
    """

    version: int
    forwards: dict[bytes, _Forward] = field(default_factory=dict)
    count: int = 0
    continued: set[int] = field(default_factory=set)
    expected: frozenset[int] = frozenset()

    def advance_to(self, version: int) -> None:
        if version != self.version:
            if self.count:
                self.expected = frozenset(self.continued)
            self.version, self.count = version, 0
            self.forwards.clear()
            self.continued.clear()

    @property
    def graphs(self) -> list[Retained]:
        return [forward.graph for forward in list(self.forwards.values()) if forward.graph is not None]


class Graphs(Protocol):
    """Interface through which a trainer computes forward passes and reuses their graphs."""

    def forward(self, engine: Engine, data: Sequence[Datum], loss: LossFunction) -> ForwardBackwardOutput: ...
    def take(self, engine: Engine, data: Sequence[Datum]) -> Retained | None: ...
    def drop(self, engine: Engine) -> None: ...
    def has_graphs(self, engine: Engine) -> bool: ...


class KeptGraphs:
    """Graphs of all trainers of one worker, at most ``max_bytes`` together; 0 keeps none. One call uses it at a time."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._models: weakref.WeakKeyDictionary[Engine, _Model] = weakref.WeakKeyDictionary()

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the graphs."""
        return sum(graph.num_bytes for model in list(self._models.values()) for graph in model.graphs)

    def forward(
        self, engine: Engine, data: Sequence[Datum], loss: LossFunction, keep: bool | None = None
    ) -> ForwardBackwardOutput:
        """Compute a forward pass.

        Args:
            keep: whether to keep the graph; None: keep it if a backward pass is expected and memory allows.
        """
        if not data or not (self.max_bytes or keep):
            return engine.forward(data, loss)
        model = self._model(engine)
        index, model.count = model.count, model.count + 1
        graph = None
        needed = _estimate(engine, data)
        if keep is None:
            # A forward pass omits dropout and the router loss, so if a model has either, a backward pass cannot use the graph.
            is_usable = not (engine.passes.has_dropout or engine.router_coefficient)
            keep = index in model.expected and needed <= self.max_bytes and is_usable
        if keep:
            self._free(needed)
            graph, output = engine.forward_retained(data, loss)
        else:
            output = engine.forward(data, loss)
        if len(model.forwards) < MAX_FORWARDS:
            model.forwards[_digest(data)] = _Forward(index, graph)
        self._free(0)
        return output

    def take(self, engine: Engine, data: Sequence[Datum]) -> Retained | None:
        """Remove and return the graph of a forward pass on the same tokens, targets and weights; None if none was kept."""
        model = self._model(engine)
        known = model.forwards.pop(_digest(data), None) if model.forwards else None
        if known is None:
            return None
        model.continued.add(known.index)
        return known.graph

    def drop(self, engine: Engine) -> None:
        """Free the graphs of older weights."""
        self._model(engine)

    def has_graphs(self, engine: Engine) -> bool:
        """Whether a graph of the engine is kept."""
        return bool(self._model(engine).graphs)

    def holds(self, engine: Engine, data: Sequence[Datum]) -> bool:
        """Whether the graph of a forward pass on the same tokens and targets is kept."""
        known = self._model(engine).forwards.get(_digest(data))
        return known is not None and known.graph is not None

    def prediction_state(self, engine: Engine) -> JsonObject | None:
        """Return the state from which the need for graphs is predicted, as JSON-compatible data; None while a graph is kept."""
        model = self._model(engine)
        if model.graphs:
            return None
        forwards = {digest.hex(): forward.index for digest, forward in model.forwards.items()}
        return {
            "forwards": forwards,
            "count": model.count,
            "continued": sorted(model.continued),
            "expected": sorted(model.expected),
        }

    def restore_prediction_state(self, engine: Engine, state: JsonObject) -> None:
        """Restore the state that :meth:`prediction_state` returned, for the same weights in another process."""
        model = self._model(engine)
        model.forwards = {bytes.fromhex(digest): _Forward(index, None) for digest, index in state["forwards"].items()}
        model.count = state["count"]
        model.continued, model.expected = set(state["continued"]), frozenset(state["expected"])

    def _model(self, engine: Engine) -> _Model:
        model = self._models.setdefault(engine, _Model(engine.version))
        model.advance_to(engine.version)
        return model

    def _free(self, needed: int) -> None:
        """Free the oldest graphs of the model with the most bytes, until ``needed`` more bytes fit."""
        while self.num_bytes and self.num_bytes + needed > self.max_bytes:
            models = list(self._models.values())
            largest = max(models, key=lambda model: sum(graph.num_bytes for graph in model.graphs))
            with_graph = [forward for forward in largest.forwards.values() if forward.graph is not None]
            min(with_graph, key=lambda forward: forward.index).graph = None


def _estimate(engine: Engine, data: Sequence[Datum]) -> int:
    tokens = sum(datum.model_input.length for datum in data)
    return min(int(tokens * engine.passes.bytes_per_token), engine.options.retain_bytes)


def _digest(data: Sequence[Datum]) -> bytes:
    """Return a digest of the inputs of the logprobs. A collision is harmless: the engine compares the inputs themselves."""
    digest = hashlib.blake2b(digest_size=16)
    for datum in data:
        digest.update(np.asarray(datum.model_input.tokens, dtype=np.int64).tobytes())
        for key in ("target_tokens", "temperature"):
            if key in datum.loss_fn_inputs:
                digest.update(key.encode() + datum.loss_fn_inputs[key].array.tobytes())
    return digest.digest()
