"""Where the server keeps what has to outlive it, session by session, and how safe that is to be.

``<out>/sessions/<session>/`` holds ``log`` (the session), ``samples`` (what its samplers are asked), ``run-<n>`` (the log of a
run, and ``state-<k>``, what it is replayed from) and ``weights-<n>`` (of a sampler). It goes when the session ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from cookbook import atomic
from cookbook.server.errors import Refused
from cookbook.server.log import FULL, Log, NoLog
from cookbook.server.records import Record

LEVELS = ("synced", "written", "off")
_GONE = ".ended-"


class Durability:
    """``level``: an accepted request is forced to the disk before it is acknowledged (``synced``), or handed to the kernel
    (``written``: it outlives the process, not a power failure), or not kept (``off``).
    """

    def __init__(self, out: Path, level: str) -> None:
        self.folder = out / "sessions"
        self.level = level
        if level != "off":
            atomic.make_folders(self.folder)

    @property
    def is_on(self) -> bool:
        return self.level != "off"

    def place(self, session_id: str) -> Path:
        return self.folder / session_id

    def log(self, session_id: str, part: str, opening: Record) -> Log:
        """A log of the session: ``log``, ``samples`` or ``run-<n>``."""
        return Log(self.place(session_id) / part, opening, forced=self.level == "synced") if self.is_on else NoLog()

    def sessions(self) -> list[Path]:
        """Those that an earlier process has left. What is left of ended ones is deleted."""
        if not self.is_on:
            return []
        found = sorted(self.folder.glob("*"))
        whole = [path for path in found if (path / "log").is_dir() and not path.name.startswith(_GONE)]
        for path in set(found) - set(whole):
            shutil.rmtree(path, ignore_errors=True)
        return whole

    def forget(self, session_id: str) -> None:
        """Nobody will ask for it any more. It goes at once, or not at all, however long deleting takes."""
        ended = self.folder / f"{_GONE}{session_id}"
        with contextlib.suppress(
            OSError
        ):  # there is none, or the disk refuses: a restart would find it, and wait for its client
            self.place(session_id).rename(ended)
            shutil.rmtree(ended, ignore_errors=True)

    def drop_weights(self, sampler_id: str) -> None:
        """Nobody samples from these links any more."""
        shutil.rmtree(self.sampler_weights(sampler_id), ignore_errors=True)

    def sampler_weights(self, sampler_id: str) -> Path:
        session_id, _, number = sampler_id.partition(":sample:")
        return self.place(session_id) / f"weights-{number}"

    def keep(self, saved: Path, place: Path) -> Path:
        """``place`` with the files of the checkpoint ``saved``, which may be deleted now: they are the same ones, linked.

        Raises:
            Refused: 507, the disk is full.
        """
        aside = place.with_name(f".{place.name}.tmp")
        try:
            atomic.make_folders(place.parent)
            shutil.rmtree(aside, ignore_errors=True)
            for path in _files(saved):
                copy = aside / path.relative_to(saved)
                copy.parent.mkdir(parents=True, exist_ok=True)
                _link(path, copy)
            if self.level == "synced":
                for path in [*aside.rglob("*"), aside]:
                    atomic.sync(path)
            aside.rename(place)
            if self.level == "synced":
                atomic.sync(place.parent)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise Refused(FULL, f"{place}: could not be written: {error.strerror}; free some space") from None
        return place


def _link(path: Path, copy: Path) -> None:
    try:
        os.link(path, copy)
    except OSError:  # some network drives have no links
        shutil.copyfile(path, copy)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
