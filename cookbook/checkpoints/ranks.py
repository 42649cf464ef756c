"""The processes that train one model together, as far as saving has to know of them; mostly there is a single one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def several() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def own() -> int:
    """The number of this rank, from 0."""
    return dist.get_rank() if several() else 0


def on_first(job: Callable[[], T]) -> T:
    """``job``'s result, or its error, on every rank; it runs on the first, and the others wait for it."""
    if not several():
        return job()
    answer: list[Any] = [None, None]
    if own() == 0:
        try:
            answer[0] = job()
        except BaseException as error:  # noqa: BLE001 - it is raised on every rank
            answer[1] = error
    dist.broadcast_object_list(answer, src=0, group=group())
    if answer[1] is not None:
        raise answer[1]
    result: T = answer[0]
    return result


def group() -> Any:
    """A process group for saving alone, on the CPU: the trainer's own collectives may be under way meanwhile."""
    return _group_beside(dist.group.WORLD)


@functools.lru_cache(maxsize=1)
def _group_beside(world: Any) -> Any:
    return dist.new_group(backend="gloo")
