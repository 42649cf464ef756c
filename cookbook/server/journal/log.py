"""Write-ahead log: a request is logged before the server acknowledges it, and its result is logged once it is settled.

A record is a JSON header and a body: the bytes that a client sent or received. No part of a record is ever executed. Lengths,
header and body have a checksum each, so that a reader can tell a record that a crash has cut off, which was never acknowledged,
from a record that was damaged later, and usually knows which record that was.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
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

log = logging.getLogger("cookbook")
MAGIC = b"cookbook log 2\n"
# The former format has one checksum per record. Its files are still read.
FORMER_MAGIC = b"cookbook log 1\n"
# Lengths of the header and of the body in bytes, and the CRC-32 of both lengths, of the header and of the body.
_PREFIX = struct.Struct("<IIIII")
# Lengths of the header and of the body in bytes, and the CRC-32 of both lengths, the header and the body.
_FORMER_PREFIX = struct.Struct("<III")
_LENGTHS = struct.Struct("<II")
# Bytes that a disk writes completely or not at all.
_SECTOR_BYTES = 512
# Every header begins so.
_HEADER_START = b'{"what"'
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


@dataclass(frozen=True)
class Damage:
    """Damaged bytes ``start`` to ``end`` of a file of a log. ``header``: header of the damaged record, if it is whole."""

    file: Path
    start: int
    end: int
    header: JsonObject | None = None

    def __str__(self) -> str:
        lost = "an unknown record" if self.header is None else f"the {self.header['what']} {self.header.get('id', '')}".strip()
        return f"{self.file}: {lost} is lost, because bytes {self.start:,} to {self.end:,} are damaged or missing"


@dataclass
class Content:
    """Content of one file of a log: its whole records, its damaged parts, and the bytes of a last record cut off by a crash."""

    records: list[Record] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    torn_bytes: int = 0


def encode(record: Record) -> bytes:
    header = json.dumps(record.header).encode()
    lengths = _LENGTHS.pack(len(header), len(record.body))
    checksums = (zlib.crc32(lengths), zlib.crc32(header), zlib.crc32(record.body))
    return b"".join((_PREFIX.pack(len(header), len(record.body), *checksums), header, record.body))


def read(file: Path) -> Content:
    """Read a file of a log. A damaged record is skipped."""
    data, content = file.read_bytes(), Content()
    if data.startswith(FORMER_MAGIC):
        return _read_former(file, data)
    start = len(MAGIC)
    if not data.startswith(MAGIC):
        if MAGIC.startswith(data) or _is_zero(data, 0):
            content.torn_bytes = len(data)
            return content
        content.damage.append(Damage(file, 0, min(start, len(data))))
    while start < len(data):
        if not _has_lengths(data, start):
            following = _next_record(data, start + 1)
            is_cut = len(data) - start < _PREFIX.size or _is_zero(data, start) or _is_unwritten(data, len(data))
            if following is None and is_cut:
                content.torn_bytes = len(data) - start
                break
            following = following or len(data)
            content.damage.append(Damage(file, start, following))
            start = following
            continue
        header_bytes, body_bytes, _, header_sum, body_sum = _PREFIX.unpack_from(data, start)
        middle = start + _PREFIX.size + header_bytes
        end = middle + body_bytes
        header, body = data[start + _PREFIX.size : middle], data[middle:end]
        is_header = zlib.crc32(header) == header_sum
        if end <= len(data) and is_header and zlib.crc32(body) == body_sum:
            content.records.append(Record(json.loads(header), body))
        elif end > len(data) or _is_unwritten(data, end):
            content.torn_bytes = len(data) - start
            break
        else:
            content.damage.append(Damage(file, start, end, json.loads(header) if is_header else None))
        start = end
    return content


def _has_lengths(data: bytes, start: int) -> bool:
    """Whether a record with whole lengths begins at ``start``."""
    if len(data) - start < _PREFIX.size:
        return False
    header_bytes, body_bytes, checksum, _, _ = _PREFIX.unpack_from(data, start)
    return bool(header_bytes) and bool(zlib.crc32(_LENGTHS.pack(header_bytes, body_bytes)) == checksum)


def _next_record(data: bytes, start: int) -> int | None:
    """Return the place of the first record with whole lengths at or after ``start``."""
    position = start
    while (position := data.find(_HEADER_START, position)) >= 0:
        if position - _PREFIX.size >= start and _has_lengths(data, position - _PREFIX.size):
            return position - _PREFIX.size
        position += 1
    return None


def _is_zero(data: bytes, start: int) -> bool:
    return data.count(0, start) == len(data) - start


def _is_unwritten(data: bytes, end: int) -> bool:
    """Whether a damaged record that ends at ``end`` is the last one, and its end was never written.

    After a power failure a file may have its new length, and zeros in place of the sectors that did not reach the disk.
    """
    unwritten = -(-len(data.rstrip(b"\0")) // _SECTOR_BYTES) * _SECTOR_BYTES
    return unwritten < end


def _read_former(file: Path, data: bytes) -> Content:
    """Read a file of the former format up to the first damaged record."""
    content, start = Content(), len(FORMER_MAGIC)
    while start + _FORMER_PREFIX.size <= len(data):
        header_bytes, body_bytes, checksum = _FORMER_PREFIX.unpack_from(data, start)
        middle = start + _FORMER_PREFIX.size + header_bytes
        end = middle + body_bytes
        header, body = data[start + _FORMER_PREFIX.size : middle], data[middle:end]
        lengths = _LENGTHS.pack(header_bytes, body_bytes)
        if not header_bytes or end > len(data) or zlib.crc32(body, zlib.crc32(header, zlib.crc32(lengths))) != checksum:
            break
        content.records.append(Record(json.loads(header), body))
        start = end
    # A later header shows that the record was not the last one.
    if data.find(_HEADER_START, start + _FORMER_PREFIX.size + 1) >= 0:
        content.damage.append(Damage(file, start, len(data)))
    else:
        content.torn_bytes = len(data) - start
    return content


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
        snapshots: numbers of the requests whose snapshots the file records.
        last_append_s: time of the last append, on the monotonic clock.
    """

    number: int
    path: Path
    num_bytes: int = 0
    requests: set[str] = field(default_factory=set)
    snapshots: set[int] = field(default_factory=set)
    last_append_s: float = field(default_factory=time.monotonic)

    def index(self, record: Record) -> None:
        """Update ``requests`` and ``snapshots`` for a record of the file."""
        if "id" in record.header:
            self.requests.add(record.header["id"])
        if record.kind == "state":
            self.snapshots.add(record.header["number"])


class Log:
    """Log of numbered files in ``folder``. Each begins with the record ``opening``, which states the size of the file before.

    A process appends only to files that it created, never to those of an earlier process.

    ``fsync``: acknowledged records are synced to disk and survive a power failure. Otherwise they are in the kernel's cache:
    they survive the end of the process, but not a power failure.

    If a sync fails, the kernel may have dropped the data and may report success the next time. The file of a failed sync is
    therefore closed, and :meth:`synced` does not return before the file has been replaced by a synced copy.
    """

    def __init__(self, folder: Path, opening: Record, *, fsync: bool) -> None:
        self.folder = folder
        self.opening = opening
        paths = sorted(folder.glob("log-*"))
        self.files = [LogFile(int(path.name.rpartition("-")[2]), path, path.stat().st_size) for path in paths]
        # Damaged parts of the files of earlier processes.
        self.damage: list[Damage] = []
        self._uses_fsync = fsync
        self._file: BinaryIO | None = None
        # Bytes that this process has written, and those of them that are known to be on disk.
        self._appended_bytes = self._synced_bytes = 0
        # The fsync in progress, which all callers of synced() share.
        self._fsync: asyncio.Future[None] | None = None
        # Files whose sync has failed.
        self._unsynced: list[LogFile] = []

    def earlier_records(self) -> Iterator[Record]:
        """Yield the whole records of earlier processes in order, and list the damaged ones in ``damage``.

        A record at the end of a file that a crash has cut off is skipped and logged.
        """
        self.damage = []
        before: LogFile | None = None
        for file in self.files:
            content = read(file.path)
            if content.torn_bytes:
                log_event("torn log", file=str(file.path), records=len(content.records), torn_bytes=content.torn_bytes)
                log.warning(
                    "%s: the last %d bytes were not written completely and are ignored; they were not acknowledged",
                    file.path,
                    content.torn_bytes,
                )
            self.damage += [*self._missing_before(file, before, content.records), *content.damage]
            for record in content.records:
                file.index(record)
            yield from content.records
            before = file

    def _missing_before(self, file: LogFile, before: LogFile | None, records: list[Record]) -> Iterator[Damage]:
        """Yield the missing end of the file ``before``, or the missing file between both."""
        stated = records[0].header.get("before_bytes") if records else None
        if before is None or stated is None:
            return
        if before.number < file.number - 1:
            missing = self.folder / f"log-{file.number - 1:06d}"
            yield Damage(missing, 0, stated)
        elif before.num_bytes < stated:
            yield Damage(before.path, before.num_bytes, stated)

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
        """Wait until all records appended so far are durable. Concurrent callers share one fsync.

        Raises:
            Refused: 507, the disk cannot sync. A later call replaces the file by a synced copy before it returns.
        """
        appended = self._appended_bytes
        # An fsync that is already running may have begun before the caller's record was written, so check again after it.
        while self._uses_fsync and (self._unsynced or self._synced_bytes < appended):
            if self._fsync is None:
                self._fsync = asyncio.ensure_future(self._run_fsync())
            await asyncio.shield(self._fsync)

    def rotate(self) -> None:
        """Sync and close the current file. The next record starts a new file. Raises OSError: the disk cannot sync."""
        if self._uses_fsync:
            self._write_unsynced()
            if self._file is not None:
                try:
                    files.sync_descriptor(self._file.fileno())
                except OSError as error:
                    self._close_unsynced(self.files[-1], error)
                    raise
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
        if file in self._unsynced:
            self._unsynced.remove(file)
        file.path.unlink(missing_ok=True)
        return True

    def _open(self) -> None:
        number = self.files[-1].number + 1 if self.files else 1
        # A reader then notices that the end of the file before is missing.
        before = {"before_bytes": self.files[-1].num_bytes} if self.files else {}
        opening = Record({**self.opening.header, **before}, self.opening.body)
        files.make_folders(self.folder)
        path = self.folder / f"log-{number:06d}"
        self._file = path.open("xb", buffering=0)
        self.files.append(LogFile(number, path))
        try:
            self._write(MAGIC + encode(opening))
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
        current = self.files[-1] if file is not None else None
        try:
            with refuse_if_disk_full(self.folder):
                if self._unsynced:
                    await asyncio.to_thread(self._write_unsynced)
                if file is not None and current is not None:
                    try:
                        await asyncio.to_thread(lambda: files.sync_descriptor(file.fileno()))
                    except OSError as error:
                        self._close_unsynced(current, error)
                        raise
        finally:
            self._fsync = None
        self._synced_bytes = max(self._synced_bytes, appended)

    def _close_unsynced(self, file: LogFile, error: OSError) -> None:
        """Note that the sync of a file has failed. If it is the open one, later records go to a new file."""
        log_event("log not synced", file=str(file.path), error=str(error))
        if file not in self._unsynced:
            self._unsynced.append(file)
        if file is self.files[-1]:
            self._file = None

    def _write_unsynced(self) -> None:
        """Replace the files of failed syncs by synced copies. Raises OSError: a file cannot be read, written or synced."""
        for file in list(self._unsynced):
            _replace_by_copy(file)
            self._unsynced.remove(file)


def _replace_by_copy(file: LogFile) -> None:
    """Replace a file, whose sync has failed, by a copy that is synced. Raises OSError: it cannot be read or written."""
    data = file.path.read_bytes()
    content = read(file.path)
    if len(data) != file.num_bytes or content.damage or content.torn_bytes:
        raise OSError(errno.EIO, "the disk has lost records of the log; restart the server")
    temporary = file.path.with_name(f".{file.path.name}.tmp")
    try:
        temporary.write_bytes(data)
        files.sync(temporary)
        temporary.replace(file.path)
        files.sync(file.path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


class NoLog(Log):
    """Log of a server with ``durability=off``: records are discarded."""

    def __init__(self) -> None:
        super().__init__(Path(os.devnull), Record({}), fsync=False)

    def append(self, record: Record) -> None:
        pass

    def begin(self) -> None:
        pass
