"""Adapters of idle trainers leave memory: weights and optimizer state go to files, and return with the next call.

A server may have thousands of adapters on one base model, of which few compute at a time. The base weights exist once. Each
adapter holds its weights and about twice as many bytes of optimizer state; what remains of an idle one are the Python objects
of its modules, about a megabyte.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import shutil
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MethodType

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cookbook.engine.engine import Engine
from cookbook.utils.freed_memory import return_freed_memory

log = logging.getLogger("cookbook")
# glibc keeps the holes that adapters leave, and aligned blocks of the same size do not fit into them. Holes of this many bytes
# are returned to the system at a time, because the search for them takes milliseconds.
RETURNED_BYTES = 64 << 20


@dataclass
class _Adapter:
    """Use of one engine. ``has_graphs``: whether it has kept graphs. ``file``: its tensors; None: they are in memory."""

    has_graphs: Callable[[], bool]
    num_bytes: int = 0
    num_users: int = 0
    file: Path | None = None


class IdleAdapters:
    """Keeps at most ``max_bytes`` of adapters in memory, if enough of them are idle. Used on the thread of one worker only.

    The engine that was idle longest leaves first. An engine with an accumulated gradient or kept graphs stays, because both
    refer to its weights. ``folder`` holds the files, which no later process reads.

    Attributes:
        num_bytes: bytes of the adapters in memory after the last call.
        num_stored: number of adapters in files after the last call.
    """

    def __init__(self, max_bytes: int, folder: Path) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = self.num_stored = 0
        self._folder = folder
        self._numbers = itertools.count()
        # No later object with this folder has the same names: an engine removes its file when it is freed, which may be late.
        self._prefix = secrets.token_hex(4)
        # The engine that was used last comes last.
        self._adapters: weakref.WeakKeyDictionary[Engine, _Adapter] = weakref.WeakKeyDictionary()
        self._is_full = False
        # Bytes that have left memory since the allocator returned them to the system.
        self._freed_bytes = 0
        shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def using(self, engine: Engine, has_graphs: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Context in which the tensors of ``engine`` are in memory.

        Raises:
            OSError: its file cannot be read.
        """
        adapter = self._adapters.pop(engine, None) or _Adapter(_weak(has_graphs))
        self._adapters[engine] = adapter
        self._load(engine, adapter)
        adapter.num_users += 1
        try:
            yield
        finally:
            adapter.num_users -= 1
            # The first optimizer step creates the optimizer's state.
            adapter.num_bytes = sum(one.numel() * one.element_size() for one in _tensors(engine))
            self._make_room()

    def _make_room(self) -> None:
        adapters = list(self._adapters.items())
        num_bytes = sum(adapter.num_bytes for _, adapter in adapters if adapter.file is None)
        for engine, adapter in adapters:
            if self._is_full or num_bytes <= self.max_bytes:
                break
            is_settled = not (engine.accumulated or engine.seeds or any(one is not None for one in engine.gradients.all()))
            if adapter.file is None and not adapter.num_users and is_settled and not adapter.has_graphs():
                self._store(engine, adapter)
                num_bytes -= adapter.num_bytes if adapter.file is not None else 0
        self.num_bytes = num_bytes
        self.num_stored = sum(adapter.file is not None for _, adapter in adapters)

    def _store(self, engine: Engine, adapter: _Adapter) -> None:
        tensors = _tensors(engine)
        file = self._folder / f"{self._prefix}-{next(self._numbers)}.safetensors"
        try:
            self._folder.mkdir(exist_ok=True)
            save_file({str(number): one.detach().cpu().contiguous() for number, one in enumerate(tensors)}, file)
        except Exception as error:  # noqa: BLE001 - safetensors reports a full disk with an error of its own
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
            self._is_full = True
            log.warning("%s: cannot store an idle adapter, so all adapters stay in memory: %s", self._folder, error)
            return
        engine.sampler_pass.drop_weights()
        for one in tensors:
            one.data = one.data.new_empty(0)
        adapter.file = file
        self._freed_bytes += adapter.num_bytes
        if self._freed_bytes >= RETURNED_BYTES:
            return_freed_memory()
            self._freed_bytes = 0
        weakref.finalize(engine, file.unlink, missing_ok=True)

    def _load(self, engine: Engine, adapter: _Adapter) -> None:
        if adapter.file is None:
            return
        stored = load_file(adapter.file)
        for number, one in enumerate(_tensors(engine)):
            # A new tensor, because the file's are not aligned to cache lines, on which the order of sums depends.
            one.data = torch.empty_like(stored[str(number)], device=one.device).copy_(stored[str(number)])
        adapter.file.unlink()
        adapter.file = None


def _weak(has_graphs: Callable[[], bool]) -> Callable[[], bool]:
    """Return the function, without keeping the object of a method alive: a trainer refers to its engine."""
    if not isinstance(has_graphs, MethodType):
        return has_graphs
    method = weakref.WeakMethod(has_graphs)

    def called() -> bool:
        function = method()
        return function is not None and function()

    return called


def _tensors(engine: Engine) -> list[Tensor]:
    """Return the trained weights, master weights and optimizer state, each once and in a fixed order."""
    # Every call asks for them, and a walk through the modules takes a millisecond.
    tensors: list[Tensor] = list(engine.gradients.parameters)
    if "optimizer" in vars(engine):
        optimizer = engine.optimizer
        weights = {id(one) for one in tensors}
        tensors += [master for master in optimizer.masters if id(master) not in weights]
        states = (optimizer.inner.state.get(master, {}) for master in optimizer.masters)
        tensors += [value for state in states for value in state.values() if isinstance(value, Tensor) and value.ndim]
    return tensors
