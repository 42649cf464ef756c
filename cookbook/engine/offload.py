"""Activation offloading: tensors that autograd saves are kept in CPU memory between the forward and the backward pass.

Copies run on separate CUDA streams while the model computes. The newest storages, up to ``window_bytes``, also stay on the GPU.
The backward pass reads these first, while the next older storages are prefetched into the same window.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

# Bytes of offloaded storages on the GPU: in the forward pass the newest ones, in the backward pass the prefetched ones.
WINDOW_BYTES = 1 << 30
# Smaller storages are not offloaded: launching their copy takes longer than the copy itself.
LEAST_BYTES = 1 << 16


@contextlib.contextmanager
def offloading(
    parameters: Iterable[Tensor], device: torch.device, *, window_bytes: int = WINDOW_BYTES, least_bytes: int = LEAST_BYTES
) -> Iterator[None]:
    """Context in which the tensors that autograd saves are moved to CPU memory. Saved weights are not copied.

    Each storage is copied once, for all views of it. On a CPU device the copies are synchronous and save no memory; that is for
    tests. The backward pass raises RuntimeError, like autograd, if a saved tensor may have been modified in place before its
    copy was complete.
    """
    weights = {parameter.untyped_storage()._cdata for parameter in parameters}
    store = _OffloadStore(weights, device, window_bytes, least_bytes)
    with torch.autograd.graph.saved_tensors_hooks(store.pack, store.unpack):
        yield


class _Copier:
    """Copies between a device and CPU memory: on a GPU with one stream per direction, on a CPU synchronously.

    The caching allocator assigns all GPU memory to the compute stream. So the compute stream must :meth:`wait` for a copy
    before it reads the memory that the copy writes, or reuses the memory that the copy reads.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._out, self._in = (torch.cuda.Stream(device) if self._on_gpu else None for _ in range(2))  # type: ignore[no-untyped-call]

    def away(self, there: Tensor) -> tuple[Tensor, torch.Event | None]:
        """Start a copy to the CPU. Return the copy, and the event of its completion, None on a CPU."""
        away = torch.empty(there.shape, dtype=there.dtype, pin_memory=self._on_gpu)
        return away, self._copied(there, away, self._out)

    def back(self, away: Tensor) -> tuple[Tensor, torch.Event | None]:
        there = torch.empty(away.shape, dtype=away.dtype, device=self._device)
        return there, self._copied(away, there, self._in)

    def _copied(self, source: Tensor, target: Tensor, stream: torch.cuda.Stream | None) -> torch.Event | None:
        """Copy once the work queued on the compute stream is done: that work writes the source, or last uses the target."""
        if stream is None:
            target.copy_(source)
            return None
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            copied: torch.Event = stream.record_event()
            return copied

    def wait(self, event: torch.Event) -> None:
        """Make the compute stream wait for the event, without blocking this thread."""
        torch.cuda.current_stream(self._device).wait_event(event)


class _OffloadedStorage:
    """A storage that autograd saves: its copy on the CPU and, while it is in the window, its memory ``on_gpu``.

    ``uses``: number of saved tensors that are views of the storage and have not been read yet. ``_event``: completion of the
    copy that reads or writes ``on_gpu``; None once the compute stream waits for it.
    """

    def __init__(self, number: int, saved: Tensor, copier: _Copier) -> None:
        storage = saved.untyped_storage()
        there = torch.empty(0, dtype=torch.uint8, device=saved.device).set_(storage, 0, (storage.nbytes(),), (1,))
        self.number = number
        self.origin = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.nbytes = there.nbytes
        self.uses = 0
        self.on_gpu: Tensor | None = there
        # Whether ``on_gpu`` can be read without waiting for a copy.
        self.is_ready = True
        # A view of the original memory, while ``on_gpu`` is that memory. The version counts in-place writes.
        self._source: Tensor | None = saved.detach()
        self._version = saved._version
        self._written = False
        self._copier = copier
        self.away, self._event = copier.away(there)

    def fetch(self) -> None:
        self.on_gpu, self._event = self._copier.back(self.away)
        self.is_ready = False

    def read(self) -> Tensor:
        self._detect_write()
        if self._written:
            raise RuntimeError(
                "a tensor that was saved for the backward pass was modified by an inplace operation while it was copied to CPU "
                "memory; set backend.activation_offloading=false"
            )
        if self.on_gpu is None:
            self.fetch()
        assert self.on_gpu is not None
        if not self.is_ready:
            self._wait_for_copy()
            self.is_ready = True
        return self.on_gpu

    def drop(self) -> None:
        """Free the memory on the GPU."""
        if self.on_gpu is not None:
            self._detect_write()
            self._wait_for_copy()
            self.on_gpu = self._source = None

    def _detect_write(self) -> None:
        """Record whether the memory was modified while the copy could still be running. Writes after the copy do no harm."""
        if self._source is not None and self._source._version != self._version:
            self._written = True

    def _wait_for_copy(self) -> None:
        if self._event is not None:
            self._copier.wait(self._event)
            self._event = None

    def __del__(self) -> None:
        # If no backward pass has run, a copy may still use the memory.
        self.drop()


class _OffloadStore:
    """Offloaded storages of one pass, in the order of the forward pass. The backward pass reads them roughly in reverse.

    Only the newest pass has a window on the GPU: if a graph is retained, its window is emptied when the next pass begins.
    """

    _newest: ClassVar[weakref.ref[_OffloadStore] | None] = None

    def __init__(self, weights: set[int], device: torch.device, window_bytes: int, least_bytes: int) -> None:
        self._weights = weights
        self._device = device.type
        self._copier = _Copier(device)
        self._window_bytes = window_bytes
        self._least_bytes = least_bytes
        self._order: list[weakref.ref[_OffloadedStorage]] = []
        # The window: storages on the GPU, by number, oldest first, and their total bytes.
        self._window: dict[int, _OffloadedStorage] = {}
        self._held_bytes = 0
        # Whether any storage has been evicted from the window.
        self._has_evicted = False
        # By address and version of the storage.
        self._by_address: weakref.WeakValueDictionary[tuple[int, int], _OffloadedStorage] = weakref.WeakValueDictionary()
        before = _OffloadStore._newest() if _OffloadStore._newest is not None else None
        if before is not None:
            before._shrink(0)
        _OffloadStore._newest = weakref.ref(self)

    def pack(self, saved: Tensor) -> Tensor | Callable[[], Tensor]:
        """Return the tensor itself if it is not offloaded, else a function that restores it from the offloaded storage."""
        storage = saved.untyped_storage()
        stays = storage._cdata in self._weights or storage.nbytes() < self._least_bytes
        if stays or saved.device.type != self._device or saved.is_complex() or type(saved) is not Tensor:
            return saved
        offloaded = self._offloaded(saved)
        offloaded.uses += 1
        view = int(saved.storage_offset()), saved.size(), saved.stride()
        return functools.partial(self._read, offloaded, saved.dtype, *view)

    def _offloaded(self, saved: Tensor) -> _OffloadedStorage:
        """Return the offloaded copy of the tensor's storage. A storage modified since its copy is copied again."""
        storage = saved.untyped_storage()
        key = (storage._cdata, saved._version)
        before = self._by_address.get(key)
        # The address may belong to a new storage, if the old one was freed.
        if before is not None and not before.origin.expired():  # type: ignore[no-untyped-call]
            return before
        offloaded = _OffloadedStorage(len(self._order), saved, self._copier)
        self._order.append(weakref.ref(offloaded))
        self._by_address[key] = offloaded
        self._hold(offloaded)
        self._shrink(self._window_bytes)
        return offloaded

    def _hold(self, offloaded: _OffloadedStorage) -> None:
        self._window[offloaded.number] = offloaded
        self._held_bytes += offloaded.nbytes

    def _shrink(self, most_bytes: int) -> None:
        """Remove the oldest storages from the window until it holds at most ``most_bytes``."""
        while self._held_bytes > most_bytes:
            self._release(next(iter(self._window.values())))
            self._has_evicted = True

    def _release(self, offloaded: _OffloadedStorage) -> None:
        offloaded.drop()
        if self._window.pop(offloaded.number, None) is not None:
            self._held_bytes -= offloaded.nbytes

    def unpack(self, packed: Tensor | Callable[[], Tensor]) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed()

    def _read(
        self, offloaded: _OffloadedStorage, dtype: torch.dtype, offset: int, size: torch.Size, stride: tuple[int, ...]
    ) -> Tensor:
        storage = offloaded.read().untyped_storage()
        offloaded.uses -= 1
        # After the last view, the returned tensor alone keeps the memory alive.
        if offloaded.uses <= 0:
            self._release(offloaded)
        if self._has_evicted:
            self._prefetch(offloaded.number)
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)

    def _prefetch(self, number: int) -> None:
        """Copy storages that were saved before storage ``number`` back to the GPU, newest first, while the window has space."""
        for earlier in range(number - 1, -1, -1):
            before = self._order[earlier]()
            if before is None or before.on_gpu is not None or before.uses <= 0:
                continue
            if before.nbytes > self._window_bytes - self._held_bytes:
                return
            before.fetch()
            self._hold(before)
