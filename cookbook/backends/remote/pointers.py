"""Pointers: local folders that represent checkpoints on a server.

A pointer contains only a manifest, with the address of the checkpoint and everything else that a run reads from a manifest. So
the code that finds, compares, prunes and resumes checkpoints works with pointers too. When a pointer is deleted, the checkpoint
on the server is deleted as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cookbook.checkpoints import manifest, store
from cookbook.engine.model import ModelConfig
from cookbook.errors import CheckpointError
from cookbook.types import JsonObject

if TYPE_CHECKING:
    from cookbook.backends.remote.connection import Connection
    from cookbook.backends.remote.sampler import RemoteSampler

# Key that only the manifests of pointers have.
SERVER = "server"
# Prefix of Pointer.url if the server of a job wrote the checkpoint.
ON_DISK = "file://"


@dataclass(frozen=True)
class Pointer:
    """A checkpoint on a server.

    Attributes:
        path: address of the checkpoint on the server.
        url: address of the server. The server of a job has no permanent address; there it is ``file://`` and its state folder.
        step: number of optimizer steps of the weights.
    """

    path: str
    url: str
    step: int
    kind: str


def write(
    folder: Path,
    pointer: Pointer,
    model: ModelConfig,
    *,
    overwrite: bool,
    facts: JsonObject | None = None,
    write_sampler: Callable[[Path], object] | None = None,
) -> None:
    """Write a pointer.

    Args:
        facts: additional entries of the manifest.
        write_sampler: writes the weights of a lagging sampler, or a pointer to them, to a new folder inside ``folder``.

    Raises:
        CheckpointError: the folder exists, or cannot be written.
    """
    with store.appearing(folder, overwrite=overwrite) as temporary:
        if write_sampler is not None:
            write_sampler(temporary / store.SAMPLER)
        manifest.write(temporary, {**(facts or {}), **_manifest(pointer, model)})


def read(folder: Path) -> Pointer:
    """Read a pointer. Raises CheckpointError: it is missing or damaged, or is a checkpoint on disk."""
    entries = manifest.verify(folder)
    if SERVER not in entries:
        raise CheckpointError(f"{folder}: was saved by backend=local and is not on a server; resume with backend=local")
    return Pointer(entries[SERVER]["path"], entries[SERVER]["url"], int(entries["step"]), entries["kind"])


def address(path: str) -> str:
    """Return the address of a checkpoint on the server. ``path``: the address itself (``tinker://...``), or a pointer's folder.

    Raises:
        CheckpointError: the pointer is missing or damaged, or is a checkpoint on disk.
    """
    return path if path.startswith("tinker://") else read(Path(path)).path


def on_disk(server: JsonObject) -> Path | None:
    """Return the folder of a checkpoint if the server's state is on a disk that this machine can read, else None.

    Args:
        server: the entry ``SERVER`` of a pointer's manifest.
    """
    if not server["url"].startswith(ON_DISK):
        return None
    folder = folder_of(Path(server["url"].removeprefix(ON_DISK)), server["path"])
    return folder if folder.is_dir() else None


def folder_of(state: Path, path: str) -> Path:
    """Return the folder of the checkpoint with the address ``path`` in the folder of the server, ``state``."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    return state / run.replace(":", ".") / f"{kind}.{name}"


def below(folder: Path) -> Iterator[str]:
    """Yield the address of every pointer below ``folder``; damaged pointers are skipped."""
    for file in sorted(folder.glob(f"**/{manifest.NAME}")):
        try:
            entries = manifest.read(file.parent)
        except CheckpointError:
            continue
        if SERVER in entries:
            yield entries[SERVER]["path"]


def _manifest(pointer: Pointer, model: ModelConfig) -> JsonObject:
    return {
        "kind": pointer.kind,
        "step": pointer.step,
        "base_model": model.name,
        "dtype": model.dtype,
        "lora": bool(model.lora_rank),
        SERVER: {"url": pointer.url, "path": pointer.path},
    }


class CheckpointGarbage:
    """Garbage collector: deletes checkpoints on the server once no pointer below ``folder`` and no sampler refers to them.

    It deletes only checkpoints to which it has seen a reference, so checkpoints of other runs are safe. References end when the
    run prunes its pointers, and when a sampler is garbage-collected.
    """

    def __init__(self, connection: Connection, folder: Path) -> None:
        self._connection = connection
        self._folder = folder
        self._known = set(below(folder))
        self._samplers: dict[str, weakref.ref[RemoteSampler]] = {}

    def keep_for(self, path: str, sampler: RemoteSampler) -> None:
        """Keep the checkpoint ``path`` while ``sampler`` exists."""
        self._samplers[path] = weakref.ref(sampler)
        self._known.add(path)

    def sweep(self, *, closing: bool = False) -> None:
        """Delete unreferenced checkpoints, and wait for the server. ``closing``: ignore references of samplers."""
        pointed = set(below(self._folder))
        in_use = {path for path, sampler in self._samplers.items() if sampler() is not None and not closing}
        for path in self._known - pointed - in_use:
            self._samplers.pop(path, None)
            self._connection.delete(path)
        self._known = pointed | in_use
