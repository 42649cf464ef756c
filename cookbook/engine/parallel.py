"""Ranks: the processes that train one model together, as the engine sees them.

The engine asks a :class:`Ranks` whenever a number depends on more than this process: sums, gathered log-probabilities, a choice
on which all ranks must agree. ``Ranks()`` is a single process and returns its arguments; the ranks of several processes are in
``ranks/processes.py``. Every rank makes the same calls of the engine with the same datums, computes its share of the datums,
and ends with the same state.

Ranks hold the weights in one of two ways. Replicas hold all weights, compute their passes independently, and add up their
gradients during the last backward pass of each call. Sharded ranks (FSDP2) hold a part of every tensor, gather the weights of a
layer while they compute the layer, and add up the gradients of a layer while the backward pass computes the next layer. So
sharded ranks must make equal numbers of forward and backward passes: :meth:`Ranks.in_step` agrees on every choice about a
pass. With ``shard="node"`` the ranks of a node hold the whole model together, and the nodes are replicas of each other.

The ranks agree on errors too: :meth:`Ranks.together` raises an error of one rank on all ranks. An error in the middle of a
sharded pass leaves the other ranks in a collective operation that never ends, so it ends the group with a
:class:`RanksLostError`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
P = ParamSpec("P")
SHARDS = ("none", "node", "all")


class RanksLostError(RuntimeError):
    """A rank has failed in the middle of a collective operation, or has ended. The group cannot continue: each process ends."""


class Ranks:
    """The ranks that train a model, seen from one of them. This class is a single process.

    ``rank`` is this process of ``size``; ``shards``: whether each rank holds only a part of every tensor.
    """

    rank: int = 0
    size: int = 1
    shards: bool = False
    # Device of the weights; None: the caller chooses the device.
    device: torch.device | None = None

    def lead(self, function: Callable[..., T], name: Callable[..., T], *args: object, **kwargs: object) -> T:
        """Run ``function`` on every rank, if this process leads; see :mod:`cookbook.engine.ranks.commands`."""
        return function(*args, **kwargs)

    @property
    def replicas(self) -> bool:
        """Whether every one of several ranks holds all weights."""
        return self.size > 1 and not self.shards

    @property
    def in_background(self) -> Ranks:
        """The same ranks, for a function that runs while they compute something else."""
        return self

    def on_first(self, job: Callable[[], T], shared: Callable[[T], T] | None = None) -> T:
        """Run ``job`` on the first rank. Return its result, or raise its error, on every rank.

        ``shared`` reduces the result to the part that the other ranks get.
        """
        return job()

    def together(self, job: Callable[[], T], *, ends_command: bool = False) -> T:
        """Run ``job`` on every rank, and return each rank's own result. If it fails on any rank, raise that error on all.

        ``ends_command``: ``job`` is a whole command of rank 0. A rank that reaches its end while another rank is in the middle
        has failed alone.
        """
        return job()

    def agreement(self) -> contextlib.AbstractContextManager[None]:
        """Context that every rank enters. If the block fails on any rank, that error is raised on all."""
        return contextlib.nullcontext()

    def gathered(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of the ranks."""
        return [value]

    def totals(self, values: Sequence[float]) -> list[float]:
        """Sum each value over the ranks, in float64."""
        return list(values)

    def in_step(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is set on any rank. Replicas need not agree and keep their own."""
        return list(flags)

    def inside(self, job: Callable[[], T]) -> T:
        """Run a pass that gathers each layer while it computes. The result is a tuple of tensors and other objects."""
        return job()

    def lockstep(self) -> contextlib.AbstractContextManager[None]:
        """Context of operations that the other ranks take part in, so that an error in one ends the group."""
        return contextlib.nullcontext()

    def spread(self, network: PreTrainedModel) -> None:
        """Replace the parameters by this rank's part of each. Replicas and a single process keep them."""

    def try_pass(self, network: PreTrainedModel) -> None:
        """Run a first pass of a network that was spread, once it has weights."""

    def weights(self, network: nn.Module) -> Iterable[Tensor]:
        """Return the tensors that a pass computes with."""
        return network.parameters()

    def add_up(self, tensor: Tensor) -> Callable[[], None]:
        """Start to add a tensor up over the replicas, in place, and return a function that waits for the sum."""
        return lambda: None

    def local(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a tensor, in the tensor's own memory."""
        return tensor

    def part(self, whole: Tensor) -> Tensor:
        """Return the rows of a whole tensor that this rank holds."""
        return whole

    def fill(self, tensor: Tensor, whole: Sliceable) -> None:
        """Copy this rank's part of ``whole``, whose rows can be read one by one, into ``tensor``."""
        tensor.copy_(whole[:])

    def whole(self, tensor: Tensor) -> Tensor:
        """Return a whole tensor from the parts of all ranks. Every rank makes this call."""
        return tensor

    def norm(self, own: float) -> float:
        """Return the L2 norm of tensors of which this rank's parts have the norm ``own``."""
        return own

    def held_share(self) -> float:
        """Return the share of the model that a rank holds."""
        return 1.0


class Sliceable(Protocol):
    """A tensor, or one in a file that is read when it is sliced."""

    def __getitem__(self, rows: slice, /) -> Tensor: ...


class OnRanks(Protocol):
    """An object that exists on every rank."""

    @property
    def ranks(self) -> Ranks: ...


S = TypeVar("S", bound=OnRanks)


def led(function: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Mark a function that every rank runs. Its first argument has ``ranks``; it is imported by its qualified name."""

    @functools.wraps(function)
    def call(target: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if target.ranks.size == 1:
            return function(target, *args, **kwargs)
        return target.ranks.lead(function, call, target, *args, **kwargs)

    # Messages between ranks may name marked functions only.
    call.is_led = True  # type: ignore[attr-defined]
    return call
