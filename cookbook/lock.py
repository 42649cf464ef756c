"""Lock of a folder for one process. The operating system holds the lock, so a killed process leaves none behind."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import filelock

from cookbook.errors import ConfigError

log = logging.getLogger("cookbook")

NAME = ".lock"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder``. A second attempt fails, in this process and in another.

    The lock file stays: removing it would take it from under a process that has just opened it.

    Raises:
        ConfigError: the lock is held already.
        OSError: the lock file cannot be written.
    """
    with (folder / NAME).open("a+", encoding="utf-8") as file:
        try:
            if not filelock.lock_descriptor(file.fileno(), blocking=False):
                file.seek(0)
                owner = file.read().strip() or "unknown"
                raise ConfigError(
                    f"out: another process (pid {owner}) is running in {folder}; wait for it or choose another folder"
                )
        except OSError as error:  # some network drives have no locks; refusing to run there would help less than a warning
            log.warning("out: %s cannot be locked (%s); start no second run in it", folder, error.strerror)
        try:
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield
        finally:
            # Closing alone would leave the lock to a child process that has inherited the file.
            with contextlib.suppress(OSError):
                filelock.unlock_descriptor(file.fileno())
