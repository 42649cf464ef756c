"""Ranks: the processes that train one model together. Without ``torch.distributed`` there is a single rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from cookbook.engine.ranks import processes

T = TypeVar("T")


def several() -> bool:
    """Whether this process is one of several ranks that make the same calls now."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and processes.all_present()


def own() -> int:
    """Number of this rank, from 0."""
    return dist.get_rank() if several() else 0


def on_first(job: Callable[[], T]) -> T:
    """Run ``job`` on the first rank, and return its result or raise its error on every rank."""
    if not several():
        return job()
    answer: list[Any] = [None, None]  # result and error
    if own() == 0:
        try:
            answer[0] = job()
        except BaseException as error:  # noqa: BLE001 - it is raised on every rank
            answer[1] = processes.portable(error)
    answer = processes.broadcast(answer, group())
    if answer[1] is not None:
        raise answer[1]
    result: T = answer[0]
    return result


def group() -> dist.ProcessGroup:
    """Process group for saving, on the CPU: the trainer's own group may be in use at the same time."""
    return processes.saving_group()
