"""Ports for servers that start again at their address, and for programs that do not report theirs. Others bind port 0."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path
from typing import IO

# The system gives none of these ports to sockets that bind port 0 or connect: those are 32768 and above on Linux.
FIRST, LAST = 12_000, 32_000
# The locks of this process. The system releases them with the process.
LOCKS: list[IO[str]] = []


def free_port() -> int:
    """Reserve a port for the life of this process: no other caller gets it, in any test process on this machine."""
    folder = Path(tempfile.gettempdir()) / f"cookbook-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for port in range(FIRST + os.getpid() * 97 % (LAST - FIRST), LAST + (LAST - FIRST)):
        port = FIRST + (port - FIRST) % (LAST - FIRST)
        lock = (folder / str(port)).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                # Connections that a server of an earlier test has closed do not take the port.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        except OSError:
            lock.close()
            continue
        LOCKS.append(lock)
        return port
    raise OSError(f"no port from {FIRST} to {LAST} is free")
