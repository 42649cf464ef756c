"""A power failure on a disk that keeps only what was forced to it: contents by file, names by folder.

POSIX promises no more than that. Real file systems usually keep more, so a missing fsync shows on no machine that tests run on.
Deletions take effect immediately, which is the worst case. Names may also reach the disk without a sync, and before the
contents of their files: ``survivors`` can write that disk too.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any


class Disk:
    """Records every fsync below ``root`` while it is installed; :meth:`survivors` writes what a power failure would leave.

    What exists below ``root`` at the start counts as stored. ``on_sync`` is called before and after every recorded fsync:
    moments at which the power may fail. ``delay_s``: seconds that every fsync takes, so that an acknowledgement that does not
    wait for it comes first.
    """

    def __init__(self, root: Path, monkeypatch: Any, on_sync: Any = None, delay_s: float = 0.0) -> None:
        self.root = root
        self._delay_s = delay_s
        self.contents: dict[int, bytes] = {}
        self.names: dict[int, dict[str, tuple[int, bool]]] = {}  # of a folder: name -> (inode, is a folder)
        self.num_syncs = 0
        # Descriptors, by inode: an inode that is still open is not given to another file.
        self._kept: dict[int, list[int]] = {}
        self._on_sync = on_sync
        for path in [root, *root.rglob("*")]:
            self._record(os.open(path, os.O_RDONLY))
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._recorder(getattr(os, name)))

    def _recorder(self, real: Any) -> Any:
        def sync(descriptor: Any) -> None:
            number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
            is_inside = Path(f"/proc/self/fd/{number}").resolve().is_relative_to(self.root.resolve())
            if is_inside and self._on_sync is not None:
                self._on_sync()
            real(descriptor)
            if is_inside:
                time.sleep(self._delay_s)
                self._record(os.open(f"/proc/self/fd/{number}", os.O_RDONLY))
                self.num_syncs += 1
                if self._on_sync is not None:
                    self._on_sync()

        return sync

    def _record(self, descriptor: int) -> None:
        path, inode = Path(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_ino
        self._kept.setdefault(inode, []).append(descriptor)
        if path.is_dir():
            self.names[inode] = {one.name: (one.stat().st_ino, one.is_dir()) for one in path.resolve().iterdir()}
        else:
            self.contents[inode] = path.read_bytes()

    def survivors(self, to: Path, *, with_names: bool = False) -> Path:
        """The tree below ``root`` as a restart would find it, written to the new folder ``to``.

        ``with_names``: all present names have reached the disk, but of contents only those that were forced to it.
        """
        if with_names:
            self._copy_names(self.root, to)
        else:
            self._restore(self.root.stat().st_ino, to)
        return to

    def _copy_names(self, folder: Path, to: Path) -> None:
        to.mkdir(parents=True)
        for path in folder.iterdir():
            if path.is_dir():
                self._copy_names(path, to / path.name)
            else:
                (to / path.name).write_bytes(self.contents.get(path.stat().st_ino, b""))

    def _restore(self, inode: int, to: Path) -> None:
        to.mkdir(parents=True)
        for name, (inner, is_folder) in self.names.get(inode, {}).items():
            is_deleted = inner in self._kept and os.fstat(self._kept[inner][0]).st_nlink == 0
            # A file that a rename has replaced is not deleted: until the folder is forced, the name may still lead to it.
            if is_deleted and not Path(f"/proc/self/fd/{self._kept[inode][0]}", name).exists():
                continue
            if is_folder:
                self._restore(inner, to / name)
            else:  # empty if its content was never forced
                (to / name).write_bytes(self.contents.get(inner, b""))

    def close(self) -> None:
        for descriptors in self._kept.values():
            for descriptor in descriptors:
                os.close(descriptor)
