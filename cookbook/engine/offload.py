"""Activations kept in CPU memory between the forward and the backward pass, carried there and back while the model computes.

What autograd saves is copied away on a stream of its own. The last of it stays on the GPU too, as many bytes as a window
holds: going back begins with that, and meanwhile what comes next is fetched, as far ahead as the window reaches.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

WINDOW_BYTES = 1 << 30  # on the GPU: of copies under way to the CPU, later of those fetched ahead
LEAST_BYTES = 1 << 16  # what is smaller stays: the copy would take longer to start than to run


@contextlib.contextmanager
def offloading(
    parameters: Iterable[Tensor], device: torch.device, *, window_bytes: int = WINDOW_BYTES, least_bytes: int = LEAST_BYTES
) -> Iterator[None]:
    """While it is entered, what autograd saves goes to CPU memory; weights, which stay anyway, are left where they are.

    Every storage goes once, however many views of it are saved. On a CPU the copies are made at once, which saves nothing and
    serves to test the rest. Going back raises RuntimeError, as autograd does, where what was saved was written to before its
    copy was sure to be done.
    """
    weights = {parameter.untyped_storage()._cdata for parameter in parameters}
    shelf = _Shelf(weights, device, window_bytes, least_bytes)
    try:
        with torch.autograd.graph.saved_tensors_hooks(shelf.pack, shelf.unpack):
            yield
    finally:
        shelf.known.clear()


class _AtOnce:
    """Copies on a CPU."""

    def away(self, there: Tensor) -> tuple[Tensor, Any]:
        return there.clone(), None

    def back(self, away: Tensor) -> tuple[Tensor, Any]:
        return away.clone(), None

    def wait(self, event: Any) -> None:
        pass


class _Streams:
    """Copies between a GPU and pinned memory, on a stream for either direction.

    Memory on the GPU belongs to the computing stream throughout, so that stream has to :meth:`wait` for a copy before it may
    use what came, or use again the memory of what went.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def away(self, there: Tensor) -> tuple[Tensor, Any]:
        """The copy, and the event of its end."""
        away = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
        return away, self._copied(there, away, self._out)

    def back(self, away: Tensor) -> tuple[Tensor, Any]:
        there = torch.empty(away.shape, dtype=away.dtype, device=self._device)
        return there, self._copied(away, there, self._in)

    def _copied(self, source: Tensor, target: Tensor, stream: torch.cuda.Stream) -> Any:
        """Starts when the computing stream has come to where it is told now: to have made the source, or freed the target."""
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return stream.record_event()

    def wait(self, event: Any) -> None:
        """The GPU waits, and not this thread."""
        torch.cuda.current_stream(self._device).wait_event(event)


class _Shelved:
    """A storage that was saved: its copy ``away``, and ``there``, on the GPU, while it is.

    ``event``: of the copy that reads or writes ``there``; None once the computing stream has waited for it. ``uses``: how many
    saved tensors are views of it and have not been asked for yet.
    """

    def __init__(self, number: int, saved: Tensor, lane: Any) -> None:
        storage = saved.untyped_storage()
        there = torch.empty(0, dtype=torch.uint8, device=saved.device).set_(storage, 0, (storage.nbytes(),), (1,))
        self.number = number
        self.nbytes = there.nbytes
        self.uses = 0
        self.there: Tensor | None = there
        self.whole = True  # ``there`` may be read without waiting
        self._source: Tensor | None = saved.detach()  # while ``there`` is its memory; both count the writes to it
        self._version = saved._version
        self._written = False
        self._lane = lane
        self._event = None
        self.away, self._event = lane.away(there)

    def fetch(self) -> None:
        self.there, self._event = self._lane.back(self.away)
        self.whole = False

    def read(self) -> Tensor:
        self._look()
        if self._written:
            raise RuntimeError(
                "what was saved for the backward pass was modified by an inplace operation while it was carried to CPU memory; "
                "set backend.activation_offloading=false"
            )
        if self.there is None:
            self.fetch()
        assert self.there is not None
        if not self.whole:
            self._settle()
            self.whole = True
        return self.there

    def drop(self) -> None:
        """Gives its memory on the GPU back."""
        if self.there is not None:
            self._look()
            self._settle()
            self.there = self._source = None

    def _look(self) -> None:
        """A write since it was saved may have come before the copy. After :meth:`drop` it comes behind it, and does no harm."""
        if self._source is not None and self._source._version != self._version:
            self._written = True

    def _settle(self) -> None:
        if self._event is not None:
            self._lane.wait(self._event)
            self._event = None

    def __del__(self) -> None:
        self.drop()  # a graph that nobody went back through: a copy may still be writing


@dataclass(frozen=True)
class _View:
    """A saved tensor as a view of a storage."""

    of: _Shelved
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class _Shelf:
    """What one pass has saved, in its order; backward asks for it in about the opposite one.

    The window is the newest pass's: one whose graph is kept while the next goes forward gives its own up.
    """

    _newest: ClassVar[weakref.ref[_Shelf] | None] = None

    def __init__(self, weights: set[int], device: torch.device, window_bytes: int, least_bytes: int) -> None:
        self._weights = weights
        self._device = device.type
        self._lane = _Streams(device) if device.type == "cuda" else _AtOnce()
        self._window_bytes = window_bytes
        self._least_bytes = least_bytes
        self._order: list[weakref.ref[_Shelved]] = []
        self._window: dict[int, _Shelved] = {}  # on the GPU, by number, oldest first
        self._held_bytes = 0  # of the window
        self._gone = False  # whether anything has left the GPU
        self.known: dict[tuple[int, int], tuple[StorageWeakRef, weakref.ref[_Shelved]]] = {}
        before = _Shelf._newest() if _Shelf._newest is not None else None
        if before is not None:
            before._shrink(0)
        _Shelf._newest = weakref.ref(self)

    def pack(self, saved: Tensor) -> Tensor | _View:
        storage = saved.untyped_storage()
        stays = storage._cdata in self._weights or storage.nbytes() < self._least_bytes
        if stays or saved.device.type != self._device or saved.is_complex() or type(saved) is not Tensor:
            return saved
        shelved = self._shelved(saved)
        shelved.uses += 1
        return _View(shelved, saved.dtype, int(saved.storage_offset()), saved.size(), saved.stride())

    def _shelved(self, saved: Tensor) -> _Shelved:
        """That of the tensor's storage, as it is now: one that was written to since counts as another."""
        storage = saved.untyped_storage()
        key = (storage._cdata, saved._version)
        if key in self.known:
            alive, found = self.known[key]
            before = found()
            if before is not None and not alive.expired():  # type: ignore[no-untyped-call] # else the address may be another's
                return before
        made = _Shelved(len(self._order), saved, self._lane)
        self._order.append(weakref.ref(made))
        self.known[key] = StorageWeakRef(storage), weakref.ref(made)  # type: ignore[no-untyped-call]
        self._hold(made)
        self._shrink(self._window_bytes)
        return made

    def _hold(self, shelved: _Shelved) -> None:
        self._window[shelved.number] = shelved
        self._held_bytes += shelved.nbytes

    def _shrink(self, most_bytes: int) -> None:
        """The oldest leave."""
        while self._held_bytes > most_bytes:
            self._let_go(next(iter(self._window.values())))
            self._gone = True

    def _let_go(self, shelved: _Shelved) -> None:
        shelved.drop()
        if self._window.pop(shelved.number, None) is not None:
            self._held_bytes -= shelved.nbytes

    def unpack(self, kept: Tensor | _View) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        shelved = kept.of
        storage = shelved.read().untyped_storage()
        shelved.uses -= 1
        if shelved.uses <= 0:  # the tensor that is handed over keeps the memory for as long as it is needed
            self._let_go(shelved)
        if self._gone:
            self._fetch_ahead(shelved.number)
        empty = torch.empty(0, dtype=kept.dtype, device=storage.device)
        return empty.set_(storage, kept.offset, kept.size, kept.stride)

    def _fetch_ahead(self, number: int) -> None:
        """What was saved before, the nearest first, into the room that the window has."""
        for place in range(number - 1, -1, -1):
            before = self._order[place]()
            if before is None or before.there is not None or before.uses <= 0:
                continue
            if before.nbytes > self._window_bytes - self._held_bytes:
                return
            before.fetch()
            self._hold(before)
