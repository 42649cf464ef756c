"""A power failure on a disk that keeps only what was forced to it: contents by file, names by folder.

POSIX promises no more than that. Real file systems usually keep more, so a missing fsync shows on no machine that tests run on.
Deletions take effect immediately, which is the worst case. Names may also reach the disk without a sync, and before the
contents of their files: ``survivors`` can write that disk too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
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
            self.names[inode] = _names(path.resolve())
        else:
            self.contents[inode] = path.read_bytes()

    def survivors(self, to: Path, early: Callable[[Path], bool] = lambda folder: False) -> Path:
        """The tree below ``root`` as a restart would find it, written to the new folder ``to``.

        ``early``: whether the present names in a folder have reached the disk although the folder was not forced to it.
        """
        self._restore(self.root.stat().st_ino, self.root.resolve(), to, early)
        return to

    def _restore(self, inode: int, folder: Path | None, to: Path, early: Callable[[Path], bool]) -> None:
        to.mkdir(parents=True)
        names = _names(folder) if folder is not None and early(folder) else self.names.get(inode, {})
        for name, (inner, is_folder) in names.items():
            is_deleted = inner in self._kept and os.fstat(self._kept[inner][0]).st_nlink == 0
            # A file that a rename has replaced is not deleted: until the folder is forced, the name may still lead to it.
            if is_deleted and not (folder is not None and (folder / name).exists()):
                continue
            if is_folder:
                self._restore(inner, self._place(inner, folder and folder / name), to / name, early)
            else:  # empty if its content was never forced
                (to / name).write_bytes(self.contents.get(inner, b""))

    def _place(self, inode: int, expected: Path | None) -> Path | None:
        """Where a folder is now: it may have been renamed since its name was forced."""
        known = Path(f"/proc/self/fd/{self._kept[inode][0]}").resolve() if inode in self._kept else None
        return next((one for one in (known, expected) if one is not None and one.exists() and one.stat().st_ino == inode), None)

    def close(self) -> None:
        for descriptors in self._kept.values():
            for descriptor in descriptors:
                os.close(descriptor)


def _names(folder: Path) -> dict[str, tuple[int, bool]]:
    return {one.name: (one.stat().st_ino, one.is_dir()) for one in folder.iterdir()}
