"""Text files that are complete or unchanged after a stop of the machine, writes forced to the disk, digests, and locks."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import filelock

from cookbook.errors import ConfigError

log = logging.getLogger("cookbook")

# Name of the lock file of a folder.
LOCK = ".lock"


def write_text(path: Path, text: str) -> None:
    """Replace the content of ``path`` by ``text`` in UTF-8: write a temporary file, force it to the disk, rename it.

    Raises:
        OSError: the disk refuses; ``path`` is unchanged and the temporary file is removed.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        # Before the rename: a file system may store the new name first, and a power failure would leave an empty file.
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal digits. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_folders(folder: Path) -> None:
    """Create ``folder`` and its missing parents, and force their names to the disk. Raises OSError."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync(path.parent)


def sync(path: Path) -> None:
    """Force a file's data, or the names in a folder, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync_descriptor(descriptor)
    finally:
        os.close(descriptor)


def forget(path: Path) -> None:
    """Release the memory in which the kernel caches a file that has been forced to the disk. Raises OSError.

    The next file then uses the same memory. On a virtual machine, memory that was never used costs 2 seconds of system time per
    GB, and memory that was used 0.2.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def sync_descriptor(descriptor: int) -> None:
    """Force an open file's data and length to the disk. Raises OSError."""
    if sys.platform == "darwin":
        import fcntl

        # fsync(2) of macOS leaves the data in the drive's cache; network drives know fsync alone.
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder`` for this process. A second attempt fails, in this process and in another.

    The operating system holds the lock, so a killed process leaves none behind.
    The lock file stays: removing it would take it from under a process that has just opened it.

    Raises:
        ConfigError: the lock is held already.
        OSError: the lock file cannot be written.
    """
    with (folder / LOCK).open("a+", encoding="utf-8") as file:
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
