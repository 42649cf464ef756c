"""Gradients of several adapters on one base model from one packed pass.

Small calls of different adapters cost mostly fixed time per pass: on a model of 4 layers, sixteen calls of one datum take six
times as long as one call of sixteen datums. :func:`forward_backward_together` packs the datums of all calls into one row. The
base weights multiply the row once (:mod:`~cookbook.engine.grouped_adapters`), while output layer, loss, gradient, metrics and
counts remain those of each call. The results equal those of separate passes up to rounding.

The bits of a call's results depend on its own data and weights, and on the shape of the pass: the lengths of all datums in it.
They do not depend on the values in the rows of other calls. So a :class:`PassShape` is enough to compute the same bits again:
:func:`forward_backward_in` puts dummy tokens in place of the other calls' datums.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cookbook.engine.batch.plan import MicroBatch, PrefixGroup
from cookbook.engine.engine import Engine
from cookbook.engine.forward import PassPart, Retained
from cookbook.engine.grouped_adapters import AdapterLayers, grouped
from cookbook.engine.loss_gradient import LossFunction, LossGradient
from cookbook.errors import BackendError
from cookbook.types import Datum, ForwardBackwardOutput, JsonObject, ModelInput

PartShape = tuple[tuple[int, tuple[int, ...]], ...]
"""The prefix groups of a call's datums, each as the length of the prefix and the lengths of the datums."""


@dataclass(frozen=True)
class PassShape:
    """Shape of a shared pass: one part per call, in the order of the row. ``place``: number of one call's part."""

    parts: tuple[PartShape, ...]
    place: int

    @classmethod
    def from_json(cls, stored: JsonObject) -> PassShape:
        parts = tuple(tuple((int(prefix), tuple(map(int, lengths))) for prefix, lengths in part) for part in stored["parts"])
        return cls(parts, int(stored["place"]))

    def to_json(self) -> JsonObject:
        return {"place": self.place, "parts": [[[prefix, list(lengths)] for prefix, lengths in part] for part in self.parts]}


@dataclass
class AdapterCall:
    """One call of forward_backward that may share a pass; its fields are the arguments of :meth:`Engine.forward_backward`.

    ``shape``: the pass that computed the call; None if it had a pass of its own. ``output`` or ``error``: the result.
    """

    engine: Engine
    data: Sequence[Datum]
    loss: LossFunction
    all_logprobs: bool | None = None
    shape: PassShape | None = None
    output: ForwardBackwardOutput | None = None
    error: BaseException | None = None
    _context: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    # The schedule of a worker asks for both at every turn.
    @functools.cached_property
    def num_tokens(self) -> int:
        return sum(datum.model_input.length for datum in self.data)

    @functools.cached_property
    def key(self) -> Hashable | None:
        """Value that is equal for calls that may share a pass; None: the call needs a pass of its own."""
        if not self.data or self.num_tokens > self.engine.pass_tokens:
            return None
        targets = [datum.loss_fn_inputs.get("target_tokens") for datum in self.data]
        # Targets of several shapes need several passes, and missing ones are an error of the call.
        shapes = {None if target is None else target.array.shape[1:] for target in targets}
        return None if len(shapes) > 1 or None in shapes else self.engine.sharing_key

    def result(self) -> ForwardBackwardOutput:
        """Return the output of the computed call, or raise its error."""
        if self.error is not None:
            raise self.error
        assert self.output is not None
        return self.output

    def compute_alone(self, retained: Retained | None = None) -> None:
        """Compute the call in passes of its own, or from its ``retained`` forward passes."""
        try:
            self.output = self.engine.forward_backward(self.data, self.loss, retained, all_logprobs=self.all_logprobs)
        except BaseException as error:  # noqa: BLE001 - the result of the call
            self.error = error

    def begin(self) -> PassPart | None:
        """Check and plan the call. Return its part of the pass; None if it has failed."""
        self._context.enter_context(self.engine.gradient_call())
        try:
            return self.engine.shared_part(self.data, self.loss, self.all_logprobs)
        except BaseException as error:  # noqa: BLE001 - the result of the call
            self.fail(error)
            return None

    def gradient(self, part: PassPart) -> LossGradient | None:
        """Return the gradient of the loss; None if the loss has failed."""
        try:
            return self.engine.shared_gradient(part, self.loss)
        except BaseException as error:  # noqa: BLE001 - the result of the call
            self.fail(error)
            return None

    def finish(self, part: PassPart, gradient: LossGradient) -> None:
        """Count the gradient that the backward pass has added, and set the output."""
        try:
            self.output = self.engine.shared_output(part, gradient)
            self._context.close()
        except BaseException as error:  # noqa: BLE001 - the result of the call
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Set the error, and drop what the call has added."""
        self.error, self.output = error, None
        with contextlib.suppress(type(error)):
            if not self._context.__exit__(type(error), error, error.__traceback__):
                raise error


class SharedPass:
    """The packed row of one pass, filled part by part."""

    def __init__(self) -> None:
        self.shapes: list[PartShape] = []
        self._data: list[Datum] = []
        self._groups: list[PrefixGroup] = []
        self._numbers: dict[int, int] = {}
        self._adapters: list[AdapterLayers | None] = []
        self._sizes: list[int] = []
        self._calls: dict[int, tuple[AdapterCall, PassPart]] = {}

    def add(self, call: AdapterCall, part: PassPart) -> None:
        """Add the datums of a call."""
        self._calls[len(self._sizes)] = call, part
        self._add(part.data, part.batch, call.engine.adapter_layers)

    def add_dummies(self, shape: PartShape) -> None:
        """Add dummy tokens in the shape of a call's datums. Their rows have no adapter and no loss."""
        lengths = [length for _, own in shape for length in own]
        data = [_dummy(length) for length in lengths]
        first = np.cumsum([0, *(len(own) for _, own in shape)])
        groups = [
            PrefixGroup(tuple(range(int(start), int(start) + len(own))), prefix)
            for (prefix, own), start in zip(shape, first, strict=False)
        ]
        num_tokens = sum(group.num_tokens(dict(enumerate(lengths))) for group in groups)
        self._add(data, MicroBatch(groups, None, num_tokens), None)

    def _add(self, data: Sequence[Datum], batch: MicroBatch, adapter: AdapterLayers | None) -> None:
        number, first = len(self._sizes), len(self._data)
        self.shapes.append(part_shape(data, batch))
        self._data += data
        self._groups += [PrefixGroup(tuple(first + index for index in group.members), group.prefix) for group in batch.groups]
        self._numbers.update(dict.fromkeys(range(first, len(self._data)), number))
        self._adapters.append(adapter)
        self._sizes.append(batch.num_tokens)

    def run(self) -> None:
        """Compute the gradients of all calls, and set their results."""
        if not self._calls:
            return
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - the result of every call that has none yet
            for call, _ in self._calls.values():
                if call.output is None and call.error is None:
                    call.fail(error)

    def _run(self) -> None:
        host = next(iter(self._calls.values()))[0].engine
        batch = MicroBatch(self._groups, None, sum(self._sizes), self._numbers)
        host.choose_recomputation([batch])
        assert host.adapter_layers is not None
        with grouped(host.adapter_layers, self._adapters, self._sizes):
            outputs = host.passes.run_parts(self._data, batch, {number: part for number, (_, part) in self._calls.items()})
            roots: list[torch.Tensor] = []
            upstream: list[torch.Tensor] = []
            added = []
            for (call, part), output in zip(self._calls.values(), outputs, strict=True):
                gradient = call.gradient(part)
                if gradient is None:
                    continue
                added.append((call, part, gradient))
                columns = [gradient.logprobs] if gradient.entropy is None else [gradient.logprobs, gradient.entropy]
                if any(row.any() for column in columns for row in column.values()):
                    own = [root for root in (output.logprobs, output.entropy) if root is not None][: len(columns)]
                    roots += own
                    upstream += [gradient.to(root) for gradient, root in zip(output.grad_outputs(columns), own, strict=True)]
                    call.engine.begin_accumulating()
            del outputs
            if roots:
                with host.passes.backward_precision():
                    torch.autograd.backward(roots, upstream)
        for call, part, gradient in added:
            call.finish(part, gradient)


def forward_backward_together(calls: Sequence[AdapterCall]) -> None:
    """Add the gradient of every call to its engine, in one pass, and set the calls' results.

    All calls have the same :attr:`~AdapterCall.key`, which is not None. Each has its own engine, and together they have at most
    the tokens of a pass. A call that fails does not affect the others.
    """
    if len(calls) < 2:
        for call in calls:
            call.compute_alone()
        return
    row, members = SharedPass(), []
    for call in calls:
        if (part := call.begin()) is not None:
            row.add(call, part)
            members.append(call)
    for place, call in enumerate(members):
        call.shape = PassShape(tuple(row.shapes), place)
    row.run()


def forward_backward_in(shape: PassShape, call: AdapterCall) -> None:
    """Compute a call with the same bits as an earlier pass of this ``shape``, and set its result."""
    part = call.begin()
    if part is None:
        return
    call.shape = shape
    if call.engine.sharing_key is None or part_shape(part.data, part.batch) != shape.parts[shape.place]:
        call.fail(BackendError("forward_backward: the datums do not have the recorded shape; repeat the request"))
        return
    row = SharedPass()
    for place, other in enumerate(shape.parts):
        if place == shape.place:
            row.add(call, part)
        else:
            row.add_dummies(other)
    row.run()


def part_shape(data: Sequence[Datum], batch: MicroBatch) -> PartShape:
    """Return the shape of a call's datums in a packed row."""
    return tuple((group.prefix, tuple(data[index].model_input.length for index in group.members)) for group in batch.groups)


def _dummy(length: int) -> Datum:
    return Datum(ModelInput.from_ints([0] * length), {"target_tokens": np.zeros(length, dtype=np.int64)})
