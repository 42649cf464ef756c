"""Reference logprobs of rows that come again, computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cookbook import terminal
from cookbook.errors import BackendError
from cookbook.futures import Future, done
from cookbook.protocols import Reference
from cookbook.types import Array, Datum

BLOCK = 64  # datums computed together: always the same ones, so that a resumed run finds the same bits


class Remembered:
    """A :class:`Reference` for a fixed list of datums. Each one's logprobs are computed when they are first asked for.

    Float sums depend on what else is in a pass. So datums are computed in blocks of the list as it stands, whatever the batch
    that asks: what is remembered does not depend on the way there. When all are known, the reference model is let go.
    """

    def __init__(self, reference: Reference, data: Sequence[Datum]) -> None:
        self._reference: Reference | None = reference
        self._data = data
        self._places = {id(datum): place for place, datum in enumerate(data)}
        self._known: dict[int, Array] = {}

    def logprobs(self, data: Sequence[Datum]) -> Future[list[Any]]:
        """Raises BackendError: a datum that is not of the list, once the reference model is gone."""
        if any(id(datum) not in self._places for datum in data):
            if self._reference is None:
                raise BackendError("reference: asked for datums that were not announced, after the reference model was let go")
            return self._reference.logprobs(data)
        places = [self._places[id(datum)] for datum in data]
        blocks = sorted({place // BLOCK for place in places if place not in self._known})
        with terminal.doing("computing reference logprobs", total=len(blocks) * BLOCK, noun="datums") as activity:
            for block in blocks:
                self._compute(block)
                activity.count += BLOCK
        if len(self._known) == len(self._data):
            self._reference = None
        return done([self._known[place] for place in places])

    def _compute(self, block: int) -> None:
        assert self._reference is not None
        some = range(block * BLOCK, min((block + 1) * BLOCK, len(self._data)))
        found = self._reference.logprobs([self._data[place] for place in some]).result()
        self._known.update(zip(some, found, strict=True))
