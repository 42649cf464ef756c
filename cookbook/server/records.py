"""Records in a file, each with its length and checksum: one that a crash has torn is recognized, and whole ones are read back.

A record is facts, as JSON, and bytes as they came from or went to a client. Nothing in it is ever executed.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC = b"cookbook log 1\n"
_HEAD = struct.Struct("<III")  # bytes of facts, bytes of body, CRC-32 of those two numbers, facts and body


@dataclass(frozen=True)
class Record:
    """``facts["what"]`` tells what it is a record of."""

    facts: dict[str, Any]
    body: bytes = b""

    @property
    def what(self) -> str:
        return str(self.facts["what"])


def encoded(record: Record) -> bytes:
    facts = json.dumps(record.facts).encode()
    head = _HEAD.pack(len(facts), len(record.body), _checksum(facts, record.body))
    return b"".join((head, facts, record.body))


def read(file: Path) -> tuple[list[Record], int]:
    """The records of ``file`` up to the first that is not whole, and how many bytes lie behind them."""
    data = file.read_bytes()
    if not data.startswith(MAGIC):
        return [], len(data)
    whole = list(_whole(data, len(MAGIC)))
    return [record for record, _ in whole], len(data) - (whole[-1][1] if whole else len(MAGIC))


def _whole(data: bytes, start: int) -> Iterator[tuple[Record, int]]:
    """Each with where it ends."""
    while start + _HEAD.size <= len(data):
        num_facts, num_body, checksum = _HEAD.unpack_from(data, start)
        middle = start + _HEAD.size + num_facts
        end = middle + num_body
        facts, body = data[start + _HEAD.size : middle], data[middle:end]
        if not num_facts or end > len(data) or _checksum(facts, body) != checksum:
            return
        yield Record(json.loads(facts), body), end
        start = end


def _checksum(facts: bytes, body: bytes) -> int:
    lengths = struct.pack("<II", len(facts), len(body))
    return zlib.crc32(body, zlib.crc32(facts, zlib.crc32(lengths)))
