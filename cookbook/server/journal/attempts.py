"""Requests that were computed when a process ended, so that a request that ends the process is not replayed forever."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from cookbook.server.metrics import log_event
from cookbook.utils import files

CURRENT, COUNTS = "computing", "attempts.json"
PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
# Separates the calls in the file.
BETWEEN = "\n\n"


class Attempts:
    """Counts for each request the processes that ended while they computed it.

    The worker thread writes the ids of the requests that have begun into the file ``computing``: of the call that it computes,
    and of those that have paused, because a call that has paused may hold the memory that the other one lacked. The file is not
    synced: it must survive the end of the process only. ``folder`` None: count nothing.

    An end counts against the only call that had begun. If several had begun, all are suspects, and the worker computes suspects
    sequentially (:meth:`is_suspect`). An end after a suspect has begun counts against this suspect alone. Other calls that had
    begun then become suspects.

    An end may have had another cause, such as a kill. A request with counted ends therefore waits after a restart
    (:meth:`pause_s`), longer each time, so that other requests settle even if it ends the process again.
    """

    def __init__(self, folder: Path | None) -> None:
        # Suspects have the count 0.
        self._counts: Counter[str] = Counter()
        self._folder = folder
        self._file: int | None = None
        self._has_failed = False
        if folder is None:
            return
        with contextlib.suppress(OSError, ValueError):
            self._counts.update(json.loads((folder / COUNTS).read_text()))
        with contextlib.suppress(OSError, ValueError):
            length, _, ids = (folder / CURRENT).read_text().partition("\n")
            # Two jobs of one request are one call.
            calls = dict.fromkeys(filter(None, ids[: int(length)].split(BETWEEN)))
            self._count_end([call.split("\n") for call in calls])
        self._write()
        self._file = os.open(folder / CURRENT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def _count_end(self, calls: list[list[str]]) -> None:
        """Count the end of a process in which ``calls``, each with the ids of its requests, had begun."""
        # Of several calls, only those that were open at an earlier end are suspects. All are chosen before any is counted.
        suspects = [call for call in calls if len(calls) == 1 or self.is_suspect("\n".join(call))]
        self._counts.update(itertools.chain.from_iterable(suspects))
        for request_id in itertools.chain.from_iterable(calls):
            self._counts.setdefault(request_id, 0)

    def is_suspect(self, ids: str) -> bool:
        """Whether an earlier process ended while a call with one of the requests ``ids``, one per line, had begun."""
        return bool(self._counts) and any(request_id in self._counts for request_id in ids.split("\n"))

    def computing(self, *calls: str) -> None:
        """Record that ``calls``, each the ids of its requests, one per line, have begun and not ended.

        An error is logged once and not raised: it would end the worker thread, and only the count would be missing.
        """
        if self._file is None:
            return
        try:
            ids = BETWEEN.join(filter(None, calls))
            os.pwrite(self._file, f"{len(ids)}\n{ids}".encode(), 0)
        except OSError as error:
            # Otherwise the next process would blame earlier requests. This needs no disk space.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
            if not self._has_failed:
                log_event("attempts not counted", error=str(error))
            self._has_failed = True

    def count(self, request_id: str) -> int:
        return self._counts[request_id]

    def pause_s(self, request_ids: Iterable[str]) -> float:
        """Return the seconds for which a call with these requests waits after a restart; they double with each counted end."""
        count = max((self._counts[request_id] for request_id in request_ids), default=0)
        return min(PAUSE_S * 2.0 ** (count - 1), MAX_PAUSE_S) if count else 0.0

    def forget(self, request_id: str) -> None:
        """Drop the count of a request that is settled."""
        if self._counts.pop(request_id, None) is not None:
            self._write()

    def end(self) -> None:
        """Count nothing for the request that is computed now: a signal ends the process, not the request."""
        self.computing()
        self._file = None

    def _write(self) -> None:
        # On a full disk the counts are lost with the process, as without this file.
        with contextlib.suppress(OSError):
            if self._folder is not None and (self._counts or (self._folder / COUNTS).exists()):
                files.write_text(self._folder / COUNTS, json.dumps(self._counts))
