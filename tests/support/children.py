"""Functions that run in a fork of the test's process, because they change what belongs to a process: its limits."""

from __future__ import annotations

import os
import pickle
import resource
import traceback
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def limit_files(num_bytes: int) -> None:
    """Let no file of this process grow beyond ``num_bytes``, as on a full disk: a write fails after a part of it."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def in_child(function: Callable[[], T]) -> T:
    """Call the function in a fork of this process, and return its result. What it changes in memory is lost.

    Under such a limit in its own process, pytest could not write its output into a file.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        try:
            found = pickle.dumps((True, function()))
        except BaseException:  # noqa: BLE001 - an error of any kind is the caller's
            found = pickle.dumps((False, traceback.format_exc()))
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(found)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        written = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert written, f"the child ended with exit code {code}"
    succeeded, result = pickle.loads(written)
    assert succeeded, result
    return result  # type: ignore[no-any-return]
