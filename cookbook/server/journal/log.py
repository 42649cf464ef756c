"""Write-ahead log: a request is logged before the server acknowledges it, and its result is logged once it is settled.

Each record has a length and a checksum, so that a record torn by a crash is detected. A record is a JSON header and a body: the
bytes that a client sent or received. No part of a record is ever executed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from cookbook.server.metrics import log_event
from cookbook.server.wire.bodies import Refused
from cookbook.types import JsonObject
from cookbook.utils import files

MAGIC = b"cookbook log 1\n"
# Length of the header and length of the body, both in bytes, and the CRC-32 of both lengths, the header and the body.
_PREFIX = struct.Struct("<III")
# HTTP status "Insufficient Storage": clients retry it for minutes.
DISK_FULL = 507


@dataclass(frozen=True)
class Record:
    """One record of a log."""

    header: JsonObject
    body: bytes = b""

    @property
    def kind(self) -> str:
        return str(self.header["what"])


def encode(record: Record) -> bytes:
    header = json.dumps(record.header).encode()
    prefix = _PREFIX.pack(len(header), len(record.body), _checksum(header, record.body))
    return b"".join((prefix, header, record.body))


def read(file: Path) -> tuple[list[Record], int]:
    """Return the records of ``file`` up to the first damaged one, and the number of bytes after them."""
    data = file.read_bytes()
    if not data.startswith(MAGIC):
        return [], len(data)
    records, start = [], len(MAGIC)
    while start + _PREFIX.size <= len(data):
        header_bytes, body_bytes, checksum = _PREFIX.unpack_from(data, start)
        middle = start + _PREFIX.size + header_bytes
        end = middle + body_bytes
        header, body = data[start + _PREFIX.size : middle], data[middle:end]
        if not header_bytes or end > len(data) or _checksum(header, body) != checksum:
            break
        records.append(Record(json.loads(header), body))
        start = end
    return records, len(data) - start


def _checksum(header: bytes, body: bytes) -> int:
    lengths = struct.pack("<II", len(header), len(body))
    return zlib.crc32(body, zlib.crc32(header, zlib.crc32(lengths)))


@contextlib.contextmanager
def refuse_if_disk_full(path: Path) -> Iterator[None]:
    """Wrap writes below ``path``. Raises Refused (507) in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise Refused(DISK_FULL, f"{path}: cannot write: {error.strerror}; free disk space") from None


@dataclass
class LogFile:
    """One file of a log.

    Attributes:
        requests: ids of the requests in the file.
        snapshot: number of the request whose snapshot is the newest in the file; None: no snapshot.
        last_append_s: time of the last append, on the monotonic clock.
    """

    number: int
    path: Path
    num_bytes: int = 0
    requests: set[str] = field(default_factory=set)
    snapshot: int | None = None
    last_append_s: float = field(default_factory=time.monotonic)

    def index(self, record: Record) -> None:
        """Update ``requests`` and ``snapshot`` for a record of the file."""
        if "id" in record.header:
            self.requests.add(record.header["id"])
        if record.kind == "state":
            self.snapshot = record.header["number"]


class Log:
    """Log of numbered files in ``folder``. Each file begins with the record ``opening``.

    A process appends only to files that it created, never to those of an earlier process.

    ``fsync``: acknowledged records are synced to disk and survive a power failure. Otherwise they are in the kernel's cache:
    they survive the end of the process, but not a power failure.
    """

    def __init__(self, folder: Path, opening: Record, *, fsync: bool) -> None:
        self.folder = folder
        self.opening = opening
        paths = sorted(folder.glob("log-*"))
        self.files = [LogFile(int(path.name.rpartition("-")[2]), path, path.stat().st_size) for path in paths]
        self._uses_fsync = fsync
        self._file: BinaryIO | None = None
        # Bytes that this process has written, and those of them that are known to be on disk.
        self._appended_bytes = self._synced_bytes = 0
        # The fsync in progress, which all callers of synced() share.
        self._fsync: asyncio.Future[None] | None = None

    def earlier_records(self) -> Iterator[Record]:
        """Yield the records of earlier processes in order. A torn record at the end of a file is skipped and logged."""
        for file in self.files:
            records, torn = read(file.path)
            if torn:
                log_event("torn log", file=str(file.path), records=len(records), torn_bytes=torn)
            for record in records:
                file.index(record)
            yield from records

    def append(self, record: Record) -> None:
        """Write ``record`` completely or not at all. Raises Refused (507): the disk is full."""
        self.begin()
        with refuse_if_disk_full(self.folder):
            self._write(encode(record))
        current = self.files[-1]
        current.last_append_s = time.monotonic()
        current.index(record)

    def begin(self) -> None:
        """Create the next file and write the opening record, unless a file is open. Raises Refused (507): the disk is full."""
        if self._file is None:
            with refuse_if_disk_full(self.folder):
                self._open()

    async def synced(self) -> None:
        """Wait until all records appended so far are durable. Concurrent callers share one fsync."""
        appended = self._appended_bytes
        # An fsync that is already running may have begun before the caller's record was written, so check again after it.
        while self._uses_fsync and self._synced_bytes < appended:
            if self._fsync is None:
                self._fsync = asyncio.ensure_future(self._run_fsync())
            await asyncio.shield(self._fsync)

    def rotate(self) -> None:
        """Sync and close the current file. The next record starts a new file."""
        if self._file is not None and self._uses_fsync:
            files.sync_descriptor(self._file.fileno())
        self._synced_bytes = self._appended_bytes
        self._file = None

    @property
    def current_bytes(self) -> int:
        """Size of the open file, 0 if no file is open."""
        return self.files[-1].num_bytes if self._file is not None else 0

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def drop(self, file: LogFile) -> bool:
        """Delete a file, unless it is the open one. Returns whether it was deleted."""
        if self._file is not None and file is self.files[-1]:
            return False
        self.files.remove(file)
        file.path.unlink(missing_ok=True)
        return True

    def _open(self) -> None:
        number = self.files[-1].number + 1 if self.files else 1
        files.make_folders(self.folder)
        path = self.folder / f"log-{number:06d}"
        self._file = path.open("xb", buffering=0)
        self.files.append(LogFile(number, path))
        try:
            self._write(MAGIC + encode(self.opening))
            # A new file is durable only once its folder entry is.
            if self._uses_fsync:
                files.sync(self.folder)
        except OSError:
            self._file = None
            self.drop(self.files[-1])
            raise

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        start = self.files[-1].num_bytes
        try:
            remaining = memoryview(data)
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        except OSError:
            # Remove the partial record: a reader stops at the first damaged one and would miss all later records.
            with contextlib.suppress(OSError):
                self._file.truncate(start)
                self._file.seek(start)
            raise
        self.files[-1].num_bytes += len(data)
        self._appended_bytes += len(data)

    async def _run_fsync(self) -> None:
        # Read before the fsync: bytes that are appended while it runs may not be covered by it.
        appended, file = self._appended_bytes, self._file
        try:
            with refuse_if_disk_full(self.folder):
                if file is not None:
                    await asyncio.to_thread(lambda: files.sync_descriptor(file.fileno()))
        finally:
            self._fsync = None
        self._synced_bytes = max(self._synced_bytes, appended)


class NoLog(Log):
    """Log of a server with ``durability=off``: records are discarded."""

    def __init__(self) -> None:
        super().__init__(Path(os.devnull), Record({}), fsync=False)

    def append(self, record: Record) -> None:
        pass

    def begin(self) -> None:
        pass
