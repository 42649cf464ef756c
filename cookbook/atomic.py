"""Text files that are complete or unchanged, whenever the process or the machine stops; and writes forced to the disk."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Replace the content of ``path`` by ``text`` in UTF-8: write a temporary file, force it to the disk, rename it.

    Raises:
        OSError: the disk refuses; ``path`` is unchanged and the temporary file is removed.
    """
    aside = path.with_name(f".{path.name}.tmp")
    try:
        aside.write_text(text, encoding="utf-8")
        # Before the rename: a file system may store the new name first, and a power failure would leave an empty file.
        sync(aside)
        aside.replace(path)
        sync(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


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


def sync_descriptor(descriptor: int) -> None:
    """Force an open file's data and length to the disk. Raises OSError."""
    if sys.platform == "darwin":
        import fcntl

        # fsync(2) of macOS leaves the data in the drive's cache; network drives know fsync alone.
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)
