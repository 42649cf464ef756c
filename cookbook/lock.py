"""One process at a time in a folder. The kernel holds the lock, so a killed process leaves none behind."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from cookbook.errors import ConfigError

log = logging.getLogger("cookbook")

NAME = ".lock"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """While it is entered, nobody else can enter it for ``folder``, in this process or another.

    The file stays: who removed it would take it from under a process that has just opened it.

    Raises:
        ConfigError: somebody else has entered it.
        OSError: the file cannot be written.
    """
    with (folder / NAME).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise ConfigError(
                f"out: another process (pid {owner}) is running in {folder}; wait for it or choose another folder"
            ) from None
        except OSError as error:  # some network drives have no locks; a run there is as good as it was without one
            log.warning("out: %s cannot be locked (%s); start no second run in it", folder, error.strerror)
        try:
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield
        finally:
            # Closing would leave it to a child process that has inherited the file.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)
