"""The bytes of a request: never more than is allowed, unpacked or not."""

from __future__ import annotations

import zstandard
from fastapi import Request

from cookbook.server.errors import Refused

MIB = 1 << 20
WINDOW = 1 << 27  # what a packed body may make us hold while it is unpacked; the format's usual limit


async def read_body(request: Request, limit: int) -> bytes:
    """The body, unpacked where it was sent compressed.

    Raises:
        Refused: 413, more than ``limit`` bytes before or after unpacking; 415, another compression; 422, it is damaged.
    """
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise Refused(413, f"the request is larger than {limit // MIB} MiB; send less at once")
        parts.append(part)
    return unpacked(b"".join(parts), request.headers.get("content-encoding", "identity"), limit)


def unpacked(body: bytes, encoding: str, limit: int) -> bytes:
    """Raises Refused, as :func:`read_body`."""
    if encoding == "identity":
        return body
    if encoding != "zstd":
        raise Refused(415, f"Content-Encoding {encoding!r} is not known here; send zstd, or nothing compressed")
    try:
        with zstandard.ZstdDecompressor(max_window_size=WINDOW).stream_reader(body, read_across_frames=True) as reader:
            found: bytes = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise Refused(422, f"the body is not what its Content-Encoding says: {error}") from None
    if len(found) > limit:
        raise Refused(413, f"the request unpacks to more than {limit // MIB} MiB; send less at once")
    return found
