"""What has been answered in a sampling session, in the order it was: for clients that ask what is new instead of for each."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

CLONE = 1_000_000_000  # a copy of a client, in another process, numbers its requests from a multiple of this


def _first_cursor() -> int:
    """Behind all that an earlier process has named: none of ours may seem to have been seen."""
    return time.time_ns() // 1000


@dataclass
class _Feed:
    """``entries`` are those after cursor ``seen``."""

    seen: int = field(default_factory=_first_cursor)
    entries: deque[dict[str, Any]] = field(default_factory=deque)
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Completions:
    """One feed for each client of each sampling session."""

    def __init__(self) -> None:
        self._feeds: dict[tuple[str, int], _Feed] = {}

    def add(self, sampler_id: str, number: int, *, request_id: str, num_bytes: int, failed: bool) -> None:
        feed = self._feed(sampler_id, number // CLONE)
        state = {"state": "failed"} if failed else {"state": "finished", "response_payload_uncompressed_size": num_bytes}
        feed.entries.append({"request_id": request_id, **state})
        feed.news.set()

    async def after(self, sampler_id: str, clone: int, cursor: int, wait_s: float) -> tuple[list[dict[str, Any]], int]:
        """What was answered after ``cursor``, and the cursor behind it. Waits for the first if there is none yet.

        What a client names a cursor behind, it has seen: it is not told again.
        """
        feed = self._feed(sampler_id, clone)
        while feed.seen < cursor and feed.entries:
            feed.entries.popleft()
            feed.seen += 1
        if not feed.entries and wait_s > 0:
            feed.news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(feed.news.wait(), wait_s)
        return list(feed.entries), feed.seen + len(feed.entries)

    def forget(self, sampler_id: str) -> None:
        for key in [key for key in self._feeds if key[0] == sampler_id]:
            self._feeds.pop(key).news.set()

    def _feed(self, sampler_id: str, clone: int) -> _Feed:
        return self._feeds.setdefault((sampler_id, clone), _Feed())
