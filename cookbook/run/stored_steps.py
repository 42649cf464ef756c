"""Format of ``rollouts.jsonl.gz``: compressed texts, one per step, that ``zcat`` prints and a page decompresses one by one.

Every step is a gzip member (RFC 1952). Its header has an extra field with the step and the size of the member, so that a reader
finds every step without decompressing any. A member that a kill has cut short ends the file: readers ignore it, and the resumed
run removes it.

:mod:`cookbook.run.rollout_store` writes the file, and documents the texts.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

ROLLOUTS = "rollouts.jsonl.gz"

# Fixed part of the header: magic number, deflate, "has an extra field", no time, no level, unknown system; then the length of
# the extra field, and of the one subfield "CB" in it.
START = b"\x1f\x8b\x08\x04\x00\x00\x00\x00\x00\xff" + struct.pack("<H2sH", 20, b"CB", 16)
# Step, and bytes of the whole member.
FIELDS = struct.Struct("<QQ")
HEADER = len(START) + FIELDS.size


@dataclass(frozen=True)
class Block:
    """Place of one step in the file, in bytes."""

    step: int
    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


class StoredSteps:
    """Whole steps of a file in order; none if the file does not exist.

    The steps are listed and read through one handle: a live run may replace the file by another with fewer steps at any time.
    ``unread_bytes``: bytes after the last whole step, which a kill or damage has left.
    """

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO
        try:
            self._file = path.open("rb")
            size = os.fstat(self._file.fileno()).st_size
        except FileNotFoundError:
            self._file, size = io.BytesIO(), 0
        whole = list(_blocks(self._file, size))
        self.blocks = {block.step: block for block in whole}
        self.unread_bytes = size - (whole[-1].end if whole else 0)

    def __enter__(self) -> StoredSteps:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def member(self, step: int) -> bytes | None:
        """Return the compressed bytes of a step, a whole gzip file; None if the step is not stored."""
        if (block := self.blocks.get(step)) is None:
            return None
        self._file.seek(block.start)
        content = self._file.read(block.size)
        # A resumed run cuts the file in place.
        return content if len(content) == block.size else None


def blocks(path: Path) -> list[Block]:
    """Return the whole steps of a file in order."""
    with StoredSteps(path) as stored:
        return list(stored.blocks.values())


def _blocks(file: BinaryIO, size: int) -> Iterator[Block]:
    start = 0
    while len(header := file.read(HEADER)) == HEADER and header.startswith(START):
        step, length = FIELDS.unpack(header[len(START) :])
        if length <= HEADER or start + length > size:
            return
        yield Block(step, start, length)
        start += length
        file.seek(start)
