"""Requests that were computed when a process ended, so that a request that ends the process is not replayed forever."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from pathlib import Path

from cookbook.server.metrics import log_event
from cookbook.utils import files

CURRENT, COUNTS = "computing", "attempts.json"


class Attempts:
    """Counts for each request the processes that ended while they computed it.

    The worker thread writes the ids of the requests that it computes into the file ``computing``, without a sync: the file must
    survive the end of the process only. ``folder`` None: count nothing.
    """

    def __init__(self, folder: Path | None) -> None:
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
            self._counts.update(filter(None, ids[: int(length)].split("\n")))
        self._write()
        self._file = os.open(folder / CURRENT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def computing(self, ids: str) -> None:
        """Record that the worker now computes the requests ``ids``, one per line; empty: none.

        An error is logged once and not raised: it would end the worker thread, and only the count would be missing.
        """
        if self._file is None:
            return
        try:
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

    def forget(self, request_id: str) -> None:
        """Drop the count of a request that is settled."""
        if self._counts.pop(request_id, 0):
            self._write()

    def end(self) -> None:
        """Count nothing for the request that is computed now: a signal ends the process, not the request."""
        self.computing("")
        self._file = None

    def _write(self) -> None:
        # On a full disk the counts are lost with the process, as without this file.
        with contextlib.suppress(OSError):
            if self._folder is not None and (self._counts or (self._folder / COUNTS).exists()):
                files.write_text(self._folder / COUNTS, json.dumps(self._counts))
