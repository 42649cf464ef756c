"""Folders and logs from which a restarted server recovers its sessions.

The folder of a session, ``<out>/sessions/<session>/``, is deleted when the session ends. It contains:

- ``log``: the log of the session.
- ``samples``: the log of requests to its samplers.
- ``run-<n>``: the log of a run, and ``state-<k>``, the snapshot from which replay starts.
- ``weights-<n>``: hard links to the weights of a sampler.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from cookbook.server.journal.log import DISK_FULL, Log, NoLog, Record
from cookbook.server.wire.bodies import Refused
from cookbook.utils import files

# Prefix of the folder of a session that is being deleted.
_ENDED = ".ended-"


class Durability:
    """Session folders below ``out``. ``level`` sets what happens to a request before it is acknowledged:

    - ``synced``: the request is synced to disk.
    - ``written``: the request is passed to the kernel. It survives the end of the process, but not a power failure.
    - ``off``: the request is not logged.
    """

    def __init__(self, out: Path, level: str) -> None:
        self.folder = out / "sessions"
        self.level = level
        if level != "off":
            files.make_folders(self.folder)

    @property
    def is_on(self) -> bool:
        return self.level != "off"

    def session_folder(self, session_id: str) -> Path:
        return self.folder / session_id

    def log(self, session_id: str, name: str, opening: Record) -> Log:
        """Open a log of the session: ``log``, ``samples`` or ``run-<n>``."""
        return Log(self.session_folder(session_id) / name, opening, fsync=self.level == "synced") if self.is_on else NoLog()

    def sessions(self) -> list[Path]:
        """Return the session folders of earlier processes, and delete what is left of ended sessions."""
        if not self.is_on:
            return []
        folders = [path for path in sorted(self.folder.glob("*")) if path.is_dir()]
        ended = [path for path in folders if path.name.startswith(_ENDED) or not any(path.rglob("log-*"))]
        for path in ended:
            shutil.rmtree(path, ignore_errors=True)
        return [path for path in folders if path not in ended]

    def delete_session(self, session_id: str) -> None:
        """Delete the folder of an ended session.

        The folder is renamed first: if the server is killed during the deletion, a restart must not recover half a session.
        """
        ended = self.folder / f"{_ENDED}{session_id}"
        # The rename fails if the folder does not exist. If it fails for another reason, a restart recovers the session, which
        # then expires.
        with contextlib.suppress(OSError):
            self.session_folder(session_id).rename(ended)
            shutil.rmtree(ended, ignore_errors=True)

    def sampler_weights(self, sampler_id: str) -> Path:
        """Return the folder of the hard links to the weights of a sampler."""
        session_id, _, number = sampler_id.partition(":sample:")
        return self.session_folder(session_id) / f"weights-{number}"

    def link(self, checkpoint: Path, folder: Path) -> Path:
        """Hard-link the files of ``checkpoint`` into ``folder``, so that the checkpoint may be deleted. Returns ``folder``.

        Raises:
            Refused: 507, the disk is full.
        """
        temporary = folder.with_name(f".{folder.name}.tmp")
        try:
            files.make_folders(folder.parent)
            shutil.rmtree(temporary, ignore_errors=True)
            for path in (path for path in checkpoint.rglob("*") if path.is_file()):
                link = temporary / path.relative_to(checkpoint)
                link.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(path, link)
                except OSError:
                    # Some network file systems do not support hard links.
                    shutil.copyfile(path, link)
            # Contents first, then the rename, then the parent folder: after a power failure ``folder`` is whole or absent.
            if self.level == "synced":
                for path in [*temporary.rglob("*"), temporary]:
                    files.sync(path)
            temporary.rename(folder)
            if self.level == "synced":
                files.sync(folder.parent)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise Refused(DISK_FULL, f"{folder}: cannot write: {error.strerror}; free disk space") from None
        return folder
