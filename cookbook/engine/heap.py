"""Model of the heap of glibc's malloc, to estimate how far the heap grows for a sequence of allocations.

For an aligned block, glibc (2.36) searches a larger gap than the block needs. So the gap that a freed tensor leaves between two
live tensors does not fit another tensor of the same size, and the heap grows. How much memory is lost depends on the order of
allocations: with LoRA or activation checkpointing, the share is very different from that of full training.

Sources: malloc/malloc.c of glibc 2.36, functions _int_malloc (smallest gap that fits) and _int_memalign; posix_memalign with 64
bytes in c10/core/impl/alloc_cpu.cpp of torch.
"""

from __future__ import annotations

import bisect

# Bytes: alignment of tensors, granularity of blocks, header of a block, smallest block.
ALIGNMENT, GRANULE, HEADER, SMALLEST = 64, 16, 8, 32


class Heap:
    """Addresses of live blocks and of gaps. ``extent``: most bytes that the process ever held: heap and blocks outside of it.

    Freed memory at the end of the heap is kept, as :func:`cookbook.engine.memory.keep_freed_memory` configures it.
    ``largest``: a block of more bytes that does not fit into the heap is a separate mapping, which ends when the block is
    freed, as :func:`cookbook.engine.memory.return_large_blocks` configures it; None: no limit.
    """

    def __init__(self, largest: int | None = None) -> None:
        self.extent = 0
        self._largest = largest
        # Bytes from the start of the heap to its end, which never moves back, and of the blocks outside of it.
        self._end = 0
        self._mapped = 0
        self._mappings = 0
        # End of the highest live block. Memory above it is one gap that can grow.
        self._top = 0
        self._sizes: dict[int, int] = {}
        # Gaps below the top: by (size, address) in order, their sizes by address, and their addresses by end.
        self._gaps: list[tuple[int, int]] = []
        self._gap_sizes: dict[int, int] = {}
        self._gap_ends: dict[int, int] = {}

    def allocate(self, size: int) -> int:
        """Return the address of a new block of ``size`` bytes."""
        block = max(-(-(size + HEADER) // GRANULE) * GRANULE, SMALLEST)
        index = bisect.bisect_left(self._gaps, (block + ALIGNMENT + SMALLEST, 0))
        if index < len(self._gaps):
            gap, address = self._gaps[index]
            self._remove_gap(address)
            if gap > block:
                self._add_gap(address + block, gap - block)
        elif self._largest is not None and block > self._largest and self._top + block > self._end:
            # Addresses outside of the heap are negative.
            self._mappings += 1
            address = -self._mappings
            self._mapped += block
        else:
            address, self._top = self._top, self._top + block
            self._end = max(self._end, self._top)
        self.extent = max(self.extent, self._end + self._mapped)
        self._sizes[address] = block
        return address

    def free(self, address: int) -> None:
        """Free a block, and merge it with the gaps next to it."""
        size = self._sizes.pop(address)
        if address < 0:
            self._mapped -= size
            return
        if (before := self._gap_ends.get(address)) is not None:
            size += self._gap_sizes[before]
            self._remove_gap(before)
            address = before
        if (after := self._gap_sizes.get(address + size)) is not None:
            self._remove_gap(address + size)
            size += after
        if address + size == self._top:
            self._top = address
        else:
            self._add_gap(address, size)

    def _add_gap(self, address: int, size: int) -> None:
        bisect.insort(self._gaps, (size, address))
        self._gap_sizes[address] = size
        self._gap_ends[address + size] = address

    def _remove_gap(self, address: int) -> None:
        size = self._gap_sizes.pop(address)
        del self._gap_ends[address + size]
        del self._gaps[bisect.bisect_left(self._gaps, (size, address))]
