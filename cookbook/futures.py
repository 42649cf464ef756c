"""Results on their way. A :class:`Future` can be waited for from plain code (``.result()``) and from async code (``await``)."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Future(concurrent.futures.Future[T], Generic[T]):
    """A ``concurrent.futures.Future`` that can also be awaited, with Tinker's extra spellings."""

    def cancel(self) -> bool:
        """Never: calls are made in order, each of them. A timeout ends the waiting, not the call."""
        return False

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()

    async def coroutine(self) -> T:
        return await self

    async def result_async(self, timeout: float | None = None) -> T:
        return await asyncio.wait_for(asyncio.wrap_future(self), timeout)

    def future(self) -> Future[T]:
        return self


def done(value: T) -> Future[T]:
    """A future that already holds its value."""
    future: Future[T] = Future()
    future.set_result(value)
    return future
