"""Bodies of requests while they arrive, and until they are answered. Uploads have a time limit, and count as pending bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

from cookbook.server.state.requests import RequestStore
from cookbook.server.wire.bodies import Refused

# Smaller bodies, such as heartbeats, are not ended early.
SMALL_BYTES = 1 << 16


@dataclass(eq=False)
class _Upload:
    """An incomplete body: its bytes until now, and its time limit, which also ends it early."""

    deadline: asyncio.Timeout
    num_bytes: int = 0
    is_evicted: bool = False


class Uploads:
    """All incomplete bodies.

    Together with the accepted requests they may have ``requests.max_pending`` bytes, and always a quarter of it. Beyond that
    the longest-running upload is ended, so that stalled uploads do not keep other clients out.

    Args:
        limit_s: time limit of one upload.
    """

    def __init__(self, requests: RequestStore, limit_s: float) -> None:
        self.num_bytes = 0
        # By key: bytes of complete bodies whose request is not answered yet, because they wait to be decoded or parsed.
        self.complete_bytes: Counter[str | None] = Counter()
        self._requests = requests
        self._limit_s = limit_s
        # The longest-running first.
        self._uploads: dict[_Upload, None] = {}

    async def read(self, stream: AsyncIterator[bytes], limit: int) -> bytes:
        """Read a body.

        Raises:
            Refused: 408, the upload takes longer than the time limit; 413, the body has more than ``limit`` bytes; 429, too
                many bytes are being uploaded (clients retry soon).
        """
        parts = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limit_s) as deadline:
                upload = _Upload(deadline)
                self._uploads[upload] = None
                try:
                    async for part in stream:
                        if upload.num_bytes + len(part) > limit:
                            raise Refused(413, f"the request is larger than {limit >> 10:,} KiB; send smaller requests")
                        parts.append(part)
                        upload.num_bytes += len(part)
                        self.num_bytes += len(part)
                        self._evict()
                    return b"".join(parts)
                finally:
                    self.num_bytes -= upload.num_bytes
                    del self._uploads[upload]
        if upload.is_evicted:
            raise Refused(429, "too many bytes are being uploaded or pending (server.max_pending_mb); retry later")
        raise Refused(
            408, f"the request was not complete after {self._limit_s:g} s (server.upload_timeout_s); send smaller requests"
        )

    def hold(self, sharer: str | None, num_bytes: int) -> None:
        """Count ``num_bytes`` of a complete body until :meth:`release`.

        ``sharer`` is the key that sent the body; None if keys do not share the limits. A key leaves as many bytes free as it
        uses, as with pending requests.

        Raises:
            Refused: 429, too many bodies wait to be decoded (clients retry soon).
        """
        total = self.complete_bytes.total()
        own = 0 if sharer is None else self.complete_bytes[sharer]
        limit = self._requests.max_pending
        if (total and total + num_bytes > limit) or (own and own + num_bytes > limit - total):
            raise Refused(429, "too many bodies wait to be decoded (server.max_pending_mb); retry later")
        self.complete_bytes[sharer] += num_bytes

    def release(self, sharer: str | None, num_bytes: int) -> None:
        """Stop counting bytes of a complete body."""
        self.complete_bytes[sharer] -= num_bytes
        if not self.complete_bytes[sharer]:
            del self.complete_bytes[sharer]

    def _evict(self) -> None:
        """End the longest-running uploads until the others are within the limit. A single upload is not ended."""
        total = self._requests.max_pending
        left = max(total - self._requests.pending_bytes, total // 4)
        if self.num_bytes <= left:
            return
        uploads = [upload for upload in self._uploads if not upload.is_evicted]
        num_bytes = sum(upload.num_bytes for upload in uploads)
        for upload in uploads[:-1]:
            if num_bytes > left and upload.num_bytes > SMALL_BYTES:
                upload.is_evicted = True
                upload.deadline.reschedule(0)
                num_bytes -= upload.num_bytes
