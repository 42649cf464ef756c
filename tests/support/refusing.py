"""A disk that refuses: the kernel gives an errno of choice to every large write of one thread, and of the threads it starts."""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Callable
from typing import Any

WRITE = {"x86_64": 1, "aarch64": 64}  # the number of the system call
SMALL = 50_000  # bytes; configs, manifests and metrics still get through

_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2  # of prctl
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # of the kernel's filter language
_NUMBER, _COUNT = 0, 16 + 8 * 2  # where a filter finds the call's number, and its third argument
_ERRNO, _ALLOW = 0x00050000, 0x7FFF0000


class _Line(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _Program(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.POINTER(_Line)))


def possible() -> bool:
    return platform.system() == "Linux" and platform.machine() in WRITE


def under(errno: int, job: Callable[[], Any]) -> Any:
    """Run ``job`` in a thread whose large writes fail with ``errno``; return its result or its error."""
    found: list[Any] = []

    def run() -> None:
        try:
            _refuse(errno)
            found.append(job())
        except BaseException as error:  # noqa: BLE001 - it is raised again
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def _refuse(errno: int) -> None:
    """Install the filter for this thread, permanently."""
    lines = [
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, 0, 3, WRITE[platform.machine()]),
        (_LOAD, 0, 0, _COUNT),
        (_AT_LEAST, 0, 1, SMALL),
        (_RETURN, 0, 0, _ERRNO | errno),
        (_RETURN, 0, 0, _ALLOW),
    ]
    program = _Program(len(lines), (_Line * len(lines))(*(_Line(*line) for line in lines)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_SET_SECCOMP, _FILTER, ctypes.byref(program)):
        raise OSError(ctypes.get_errno(), "the kernel refuses a seccomp filter")
