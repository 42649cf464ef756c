"""What has been answered in a sampling session, in the order it was: for clients that ask what is new instead of for each."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

CLONE = 1_000_000_000  # a copy of a client, in another process, numbers its requests from a multiple of this


def _first_cursor() -> int:
    """Behind all that an earlier process has named: none of ours may seem to have been seen."""
    return time.time_ns() // 1000


@dataclass
class _Feed:
    """``entries`` are what its client has not seen and has results, each with its cursor; ``last`` is the newest cursor."""

    last: int = field(default_factory=_first_cursor)
    entries: OrderedDict[str, tuple[int, dict[str, Any]]] = field(default_factory=OrderedDict)
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Completions:
    """One feed for each client of each sampling session."""

    def __init__(self) -> None:
        self._feeds: dict[tuple[str, int], _Feed] = {}

    def add(self, sampler_id: str, number: int, *, request_id: str, num_bytes: int, failed: bool) -> None:
        feed = self._feed(sampler_id, number // CLONE)
        state = {"state": "failed"} if failed else {"state": "finished", "response_payload_uncompressed_size": num_bytes}
        feed.last += 1
        feed.entries[request_id] = feed.last, {"request_id": request_id, **state}
        feed.news.set()

    def drop(self, sampler_id: str, number: int, request_id: str) -> None:
        """Its result is no longer kept: there is nothing to tell."""
        feed = self._feeds.get((sampler_id, number // CLONE))
        if feed is not None:
            feed.entries.pop(request_id, None)

    async def after(self, sampler_id: str, clone: int, cursor: int, wait_s: float) -> tuple[list[dict[str, Any]], int]:
        """What was answered after ``cursor``, and the cursor behind it. Waits for the first if there is none yet.

        What a client names a cursor behind, it has seen: it is not told again.
        """
        feed = self._feed(sampler_id, clone)
        while feed.entries and next(iter(feed.entries.values()))[0] <= cursor:
            feed.entries.popitem(last=False)
        if not feed.entries and wait_s > 0:
            feed.news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(feed.news.wait(), wait_s)
        return [entry for _, entry in feed.entries.values()], feed.last

    def forget(self, owner: str) -> None:
        """Of a sampling session, or of all of a session."""
        for key in [key for key in self._feeds if key[0] == owner or key[0].startswith(f"{owner}:")]:
            self._feeds.pop(key).news.set()

    def _feed(self, sampler_id: str, clone: int) -> _Feed:
        return self._feeds.setdefault((sampler_id, clone), _Feed())
