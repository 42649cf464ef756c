"""Gradient calls of trainers on one worker that share passes: calls of different adapters that wait at the same time.

Which calls wait together depends on time, and the rounding of a shared pass on its shape. A :class:`PassSharing` therefore
reports the shape of the pass that computed a call, and computes a call again in a given shape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from cookbook.backends.local.kept_graphs import Graphs
from cookbook.engine.shared_passes import AdapterCall, PassShape, forward_backward_in, forward_backward_together
from cookbook.types import ForwardBackwardOutput, JsonObject


class PassSharing:
    """Whether the calls of one trainer share passes.

    Attributes:
        enabled: calls share passes with waiting calls of other trainers.
        replays: calls repeat calls of an earlier process, so they do not share passes with others.
        recorded: in a replay, the shape of the pass that computed the next call; None: the call had a pass of its own.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.replays = False
        self.recorded: JsonObject | None = None
        self._shape: PassShape | None = None

    def work(
        self, call: AdapterCall, graphs: Graphs | None, in_memory: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> GradientWork:
        shape = None if self.recorded is None else PassShape.from_json(self.recorded)
        return GradientWork(call, graphs, self, in_memory, self.enabled and not self.replays, shape)

    def report(self, shape: PassShape | None) -> None:
        self._shape = shape

    def take_shape(self) -> JsonObject | None:
        """Return and clear the shape of the pass that computed the last call; None if it had a pass of its own."""
        shape, self._shape = self._shape, None
        return None if shape is None else shape.to_json()


@dataclass(eq=False)
class GradientWork:
    """The work of a gradient call; a :class:`~cookbook.backends.worker.SharedWork`.

    ``in_memory``: context in which the tensors of the call's engine are in memory. ``shape``: the pass in which a replayed call
    is computed; None: a pass of its own.
    """

    call: AdapterCall
    graphs: Graphs | None
    sharing: PassSharing
    in_memory: Callable[[], contextlib.AbstractContextManager[None]]
    may_share: bool
    shape: PassShape | None

    @property
    def key(self) -> Hashable | None:
        return self.call.key if self.may_share else None

    @property
    def size(self) -> int:
        return self.call.num_tokens

    @property
    def max_size(self) -> int:
        return self.call.engine.pass_tokens

    def compute(self) -> ForwardBackwardOutput:
        """Compute the call alone."""
        call = self.call
        retained = None if self.graphs is None else self.graphs.take(call.engine, call.data)
        if retained is not None or self.shape is None:
            return call.engine.forward_backward(call.data, call.loss, retained, all_logprobs=call.all_logprobs)
        forward_backward_in(self.shape, call)
        self.sharing.report(self.shape)
        return call.result()

    @classmethod
    def compute_together(cls, works: Sequence[GradientWork]) -> None:
        """Compute the calls in one pass, except those whose forward pass has been kept."""
        sharing = []
        with contextlib.ExitStack() as engines:
            for work in works:
                engines.enter_context(work.in_memory())
                retained = None if work.graphs is None else work.graphs.take(work.call.engine, work.call.data)
                if retained is None:
                    sharing.append(work)
                else:
                    work.call.compute_alone(retained)
            forward_backward_together([work.call for work in sharing])
        for work in sharing:
            work.sharing.report(work.call.shape)

    def result(self) -> ForwardBackwardOutput:
        """Return the result of the call after :meth:`compute_together`, or raise its error."""
        return self.call.result()
