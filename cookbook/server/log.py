"""A log on the disk: what was accepted, before it is acknowledged, and what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from cookbook import atomic
from cookbook.server.errors import Refused
from cookbook.server.observed import event
from cookbook.server.records import MAGIC, Record, encoded, read

_NAME = "log-{:06d}"
FULL = 507  # Insufficient Storage: clients ask again, for minutes


@dataclass
class LogFile:
    """One file of a log, and what has a record in it: requests, and the newest state."""

    number: int
    path: Path
    num_bytes: int = 0
    requests: set[str] = field(default_factory=set)
    state: int | None = None
    last_record: float = field(default_factory=time.monotonic)

    def note(self, record: Record) -> None:
        if "id" in record.facts:
            self.requests.add(record.facts["id"])
        if record.what == "state":
            self.state = record.facts["number"]


class Log:
    """Numbered files below ``folder``, each beginning with the record ``opening``. A process never goes on in another's file.

    ``forced``: an acknowledged record is forced to the disk, and so outlives a power failure. Without it records outlive the
    process, for the kernel has them.
    """

    def __init__(self, folder: Path, opening: Record, *, forced: bool) -> None:
        self.folder = folder
        self.opening = opening
        self.files = [LogFile(int(path.name.rpartition("-")[2]), path, path.stat().st_size) for path in sorted(_paths(folder))]
        self._forced = forced
        self._file: BinaryIO | None = None
        self._appended = self._safe = 0  # bytes of this process: in the files, and known to be on the disk
        self._forcing: asyncio.Future[None] | None = None

    def earlier(self) -> Iterator[Record]:
        """What earlier processes have logged, in their order. A torn end of a file is named in the events and left out."""
        for file in self.files:
            found, torn = read(file.path)
            if torn:
                event("torn log", file=str(file.path), records=len(found), torn_bytes=torn)
            for record in found:
                file.note(record)
            yield from found

    def append(self, record: Record) -> None:
        """Writes ``record`` whole or not at all. Raises Refused, 507: the disk is full."""
        try:
            if self._file is None:
                self._open()
            self._write(encoded(record))
        except OSError as error:
            raise Refused(FULL, f"{self.folder}: the request could not be logged: {error.strerror}; free some space") from None
        current = self.files[-1]
        current.last_record = time.monotonic()
        current.note(record)

    def begin(self) -> None:
        """Writes the opening record, if nothing is written yet. Raises Refused, 507."""
        try:
            if self._file is None:
                self._open()
        except OSError as error:
            raise Refused(FULL, f"{self.folder}: could not be written: {error.strerror}; free some space") from None

    async def synced(self) -> None:
        """Returns when all that was appended is as safe as it is to be. Those that wait together share one call of the disk."""
        appended = self._appended
        while self._forced and self._safe < appended:
            if self._forcing is None:
                self._forcing = asyncio.ensure_future(self._force())
            await asyncio.shield(self._forcing)

    def turn(self) -> int:
        """The next record begins a new file; returns its number."""
        if self._file is not None and self._forced:
            atomic.sync_descriptor(self._file.fileno())
        self._safe = self._appended
        self._file = None
        return self.next_number

    @property
    def next_number(self) -> int:
        return self.files[-1].number + 1 if self.files else 1

    @property
    def current_bytes(self) -> int:
        """What the file holds that records go to now."""
        return self.files[-1].num_bytes if self._file is not None else 0

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def drop(self, file: LogFile) -> bool:
        """Deletes a file that nobody needs any more, but never the one that records go to; tells whether it did."""
        if self._file is not None and file is self.files[-1]:
            return False
        self.files.remove(file)
        file.path.unlink(missing_ok=True)
        return True

    def _open(self) -> None:
        number = self.next_number
        atomic.make_folders(self.folder)
        path = self.folder / _NAME.format(number)
        self._file = path.open("xb", buffering=0)
        self.files.append(LogFile(number, path))
        try:
            self._write(MAGIC + encoded(self.opening))
            if self._forced:
                atomic.sync(self.folder)
        except OSError:
            self._file = None
            self.drop(self.files[-1])
            raise

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        start = self.files[-1].num_bytes
        try:
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(start)
                self._file.seek(start)
            raise
        self.files[-1].num_bytes += len(data)
        self._appended += len(data)

    async def _force(self) -> None:
        appended, file = self._appended, self._file
        try:
            if file is not None:
                await asyncio.to_thread(lambda: atomic.sync_descriptor(file.fileno()))
        except OSError as error:
            raise Refused(FULL, f"{self.folder}: the request could not be forced to the disk: {error.strerror}") from None
        finally:
            self._forcing = None
        self._safe = max(self._safe, appended)


class NoLog(Log):
    """Where durability is switched off."""

    def __init__(self) -> None:
        super().__init__(Path(os.devnull), Record({}), forced=False)

    def append(self, record: Record) -> None:
        pass

    def begin(self) -> None:
        pass


def _paths(folder: Path) -> list[Path]:
    return list(folder.glob(_NAME.format(0).replace("000000", "*")))
