"""Memory that was freed is there again: told by the kernel's count of pages that had to be made."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCK, TIMES = 64 << 20, 8
PROGRAM = f"""
import ctypes, resource, sys, threading
from cookbook.engine.memory import keep_freed_memory, return_large_blocks

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]


def measure():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range({TIMES}):
        block = libc.malloc({BLOCK})
        libc.memset(block, 1, {BLOCK})
        libc.free(block)
    print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


kept = keep_freed_memory()
if sys.argv[1:] == ["returns"]:
    kept = return_large_blocks()
thread = threading.Thread(target=measure)  # as a trainer's worker is one
thread.start()
thread.join()
"""


def found(*arguments: str, **environment: str) -> tuple[bool, int]:
    """Whether it took effect, and how many pages were made for the same block, taken and freed several times."""
    environment["PYTHONPATH"] = ":".join(sys.path)
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    kept, faults = done.stdout.split()
    return kept == "True", int(faults)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc's")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("MALLOC_TRIM_THRESHOLD_", "131072", marks=pytest.mark.nightly),
        ("GLIBC_TUNABLES", "glibc.malloc.arena_max=4"),
    ],
)
@pytest.mark.slow
def test_pages_are_made_once_unless_the_user_says_otherwise(name, value):
    kept, faults = found()
    if not kept:
        pytest.skip("this C library is not glibc")
    kept, often = found(**{name: value})  # a kernel that hands out huge pages makes fewer of them, but as many each time
    assert not kept and faults <= 1.2 * often / TIMES + 100


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc's")
@pytest.mark.slow
def test_large_blocks_are_returned_if_activations_are_recomputed():
    kept, once = found()
    if not kept:
        pytest.skip("this C library is not glibc")
    returned, often = found("returns")
    assert returned and often > (TIMES - 1) * once / 2
    returned, _ = found("returns", MALLOC_TRIM_THRESHOLD_="131072")
    assert not returned
