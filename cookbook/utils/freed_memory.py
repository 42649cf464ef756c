"""Freed memory that the allocator keeps, returned to the system."""

from __future__ import annotations

import ctypes
import sys


def return_freed_memory() -> None:
    """Return freed memory to the system, even holes between used blocks, where the C library is glibc; else do nothing.

    The pages of the holes are zeroed when they are used again, so call this only after much memory was freed for long.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
