"""Commands of a group: the first rank leads by broadcasting each call of the engine, and the other ranks follow.

Functions and methods that are marked with :func:`~cookbook.engine.parallel.led` run on every rank, with the same arguments, and
end with a vote: an error on one rank is raised on all ranks. All other code runs on the first rank alone, and uses an engine of
several ranks like an engine of one process. In every process of the group::

    commands.start(join(shard, device))     # returns on the first rank only; the others follow until the first rank ends
    trainer = LocalTrainer(model, config)

The environment has the variables that torchrun sets: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, and on several
nodes LOCAL_WORLD_SIZE. If a process of the group ends, or a collective operation fails, every other process writes one line and
ends with the exit code :data:`EXIT_LOST`. The group cannot continue; start a new one.

Engines, kept graphs and copies of weights exist once on every rank. A command names such an object by a number: the order in
which commands returned the objects. A loss that the other ranks cannot import is computed on the first rank.
"""

from __future__ import annotations

import functools
import io
import logging
import os
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeVar

from torch import Tensor

from cookbook.engine.loss_gradient import LossFunction, loss_name
from cookbook.engine.parallel import Ranks, RanksLostError
from cookbook.engine.ranks import messages
from cookbook.engine.ranks.processes import ProcessRanks, joined
from cookbook.losses.base import LOSSES, Loss, Metrics
from cookbook.types import Datum

log = logging.getLogger("cookbook")
R = TypeVar("R")
EXIT_LOST = 75


class PerRank:
    """Base of the results of commands that stay on their rank: engines, kept graphs, copies."""


class Placed:
    """The ranks that a process has joined, as the first argument of a function that makes objects there."""

    @property
    def ranks(self) -> Ranks:
        return joined()


class Leader:
    """The first rank's end of the commands. Threads may share it; each command is sent whole."""

    def __init__(self, ranks: ProcessRanks) -> None:
        self._ranks = ranks
        self._objects: dict[int, weakref.ref[PerRank]] = {}
        self._count = 0
        self._sending = threading.Lock()
        self._within = threading.local()

    @property
    def all_present(self) -> bool:
        """Whether this thread runs a command, so that every other rank runs it too."""
        return getattr(self._within, "command", False)

    def call(self, background: bool, function: Callable[..., R], name: Callable[..., R], *args: object, **kwargs: object) -> R:
        """Run ``function`` on every rank; ``name`` is the object that its qualified name refers to.

        ``background``: on another thread of the followers, without a vote: the function agrees on its errors itself.
        """
        if self.all_present:
            return function(*args, **kwargs)
        args = tuple(_for_all_ranks(argument) for argument in args)
        kwargs = {key: _for_all_ranks(argument) for key, argument in kwargs.items()}
        try:
            with self._sending:
                self._ranks.send((background, self._packed((name, args, kwargs))))
            self._within.command = True
            if background:
                return function(*args, **kwargs)
            result = self._ranks.together(lambda: function(*args, **kwargs), ends_command=True)
            # Another thread may read the objects, to send a command.
            with self._sending:
                for part in _per_rank(result):
                    self._objects[self._count] = weakref.ref(part)
                    self._count += 1
            return result
        except RanksLostError as error:
            _end(error)
        finally:
            self._within.command = False

    def end(self) -> None:
        """End the followers."""
        with self._sending:
            self._ranks.send(None)

    def _packed(self, command: object) -> bytes:
        """Pickle a command, with the numbers of objects that are not used any more."""
        alive = {number: part for number, known in self._objects.items() if (part := known()) is not None}
        unused = [number for number in self._objects if number not in alive]
        for number in unused:
            del self._objects[number]
        buffer = io.BytesIO()
        _Pickler(buffer, {id(part): number for number, part in alive.items()}).dump((unused, command))
        return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Writes the number of an object that every rank has."""

    def __init__(self, buffer: io.BytesIO, numbers: Mapping[int, int]) -> None:
        super().__init__(buffer, protocol=messages.PROTOCOL)
        self._numbers = numbers

    def persistent_id(self, value: object) -> int | None:
        return self._numbers[id(value)] if isinstance(value, PerRank) else None


class _Unpickler(messages.Unpickler):
    def __init__(self, message: bytes, objects: Mapping[int, PerRank]) -> None:
        super().__init__(io.BytesIO(message))
        self._objects = objects

    def persistent_load(self, number: int) -> PerRank:
        return self._objects[number]


class Follower:
    """Runs the commands of the first rank."""

    def __init__(self, ranks: ProcessRanks) -> None:
        self._ranks = ranks
        self._objects: dict[int, PerRank] = {}
        self._count = 0
        self._background: threading.Thread | None = None

    def run(self) -> None:
        """Run commands until the first rank ends. The first rank reports for all."""
        log.setLevel(logging.ERROR)
        try:
            while (message := self._ranks.receive()) is not None:
                background, packed = message
                if background:
                    self._start_in_background(self._unpacked(packed))
                else:
                    self._execute(packed)
            if self._background is not None:
                self._background.join()
        except RanksLostError as error:
            _end(error)

    def _execute(self, packed: bytes) -> None:
        try:
            result = self._ranks.together(lambda: self._unpacked(packed)(), ends_command=True)
        except RanksLostError:
            raise
        except Exception:
            # The first rank raises the error to its caller.
            log.debug("rank %d: a command has failed", self._ranks.rank, exc_info=True)
            return
        for part in _per_rank(result):
            self._objects[self._count] = part
            self._count += 1

    def _unpacked(self, packed: bytes) -> Callable[[], object]:
        unused, (name, args, kwargs) = _Unpickler(packed, self._objects).load()
        for number in unused:
            del self._objects[number]
        return functools.partial(name.__wrapped__, *args, **kwargs)

    def _start_in_background(self, job: Callable[[], object]) -> None:
        before = self._background

        def run() -> None:
            if before is not None:
                before.join()
            try:
                job()
            except RanksLostError as error:
                _end(error)
            except Exception:
                log.debug("rank %d: a command has failed", self._ranks.rank, exc_info=True)

        self._background = threading.Thread(target=run, daemon=True)
        self._background.start()


def _per_rank(result: object) -> list[PerRank]:
    """The objects of a result that stay on their rank: the result itself, or items of a tuple."""
    return [value for value in (result if isinstance(result, tuple) else (result,)) if isinstance(value, PerRank)]


def start(ranks: Ranks, on_lost: Callable[[RanksLostError], None] | None = None) -> Leader | None:
    """Return on the first rank, which leads from now on. On another rank, follow until the first one ends, then exit.

    A single process returns None. A first rank that ends without :meth:`Leader.end` ends the others with :data:`EXIT_LOST`.

    Args:
        on_lost: called with the error before this process ends because the group is lost.
    """
    if not isinstance(ranks, ProcessRanks):
        return None
    ProcessRanks.on_lost = on_lost
    if ranks.rank == 0:
        ProcessRanks.leader = leader = Leader(ranks)
        return leader
    Follower(ranks).run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the destructors of libraries whose partners have ended.
    os._exit(0)


def _end(error: RanksLostError) -> NoReturn:
    """End this process. Other ranks notice that the connection is closed, and end too."""
    print(f"error: {error}; the group of ranks has ended, start a new one", file=sys.stderr, flush=True)
    if (on_lost := ProcessRanks.on_lost) is not None:
        on_lost(error)
    os._exit(EXIT_LOST)


# ---- losses that the other ranks cannot import -----------------------------------------------------------------------


def _for_all_ranks(argument: object) -> object:
    """Return an argument of a command for all ranks: a loss of the caller stays on the first rank."""
    if isinstance(argument, Loss):
        cls = type(argument)
        return argument if f"{cls.__module__}:{cls.__qualname__}" in LOSSES.values() else FirstRankLoss(argument)
    return FirstRankFunction(argument) if isinstance(argument, types.FunctionType | types.MethodType) else argument


class FirstRankLoss(Loss):
    """A loss that only the first rank can call. The other ranks know what it declares."""

    def __init__(self, loss: Loss) -> None:
        facts = ("name", "reduction", "prepares", "ignores_masked", "may_be_flat", "several_targets")
        self.__dict__.update({fact: getattr(loss, fact) for fact in facts})
        self._needs_entropy = loss.needs_entropy
        self._loss: Loss | None = loss

    @property
    def needs_entropy(self) -> bool:
        return self._needs_entropy

    def check_data(self, data: Sequence[Datum]) -> None:
        if self._loss is not None:
            self._loss.check_data(data)

    def __call__(self, data: Sequence[Datum], *columns: list[Tensor]) -> tuple[Tensor, Metrics]:
        assert self._loss is not None
        return self._loss(data, *columns)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_loss": None}


class FirstRankFunction:
    """A loss function that only the first rank can call."""

    def __init__(self, function: LossFunction) -> None:
        self.name = loss_name(function)
        self._function: LossFunction | None = function

    def __call__(self, data: Sequence[Datum], *columns: list[Tensor]) -> tuple[Tensor, Mapping[str, float]]:
        assert self._function is not None
        return self._function(data, *columns)

    def __getstate__(self) -> dict[str, object]:
        return {"name": self.name, "_function": None}
