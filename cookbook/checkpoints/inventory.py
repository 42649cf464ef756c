"""Checkpoints of a folder: list, verify and prune them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cookbook.checkpoints import manifest, sampler_checkpoints
from cookbook.checkpoints.tensor_digests import Weights
from cookbook.errors import CheckpointError
from cookbook.types import JsonObject


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint: folder and manifest (``facts``), or the ``problem`` with it. ``written``: nanoseconds since 1970."""

    folder: Path
    facts: JsonObject | None
    problem: str
    written: int

    @property
    def kind(self) -> str:
        if self.facts is None:
            return "damaged"
        return f"{self.facts['kind']}, adapter" if self.facts.get("lora") else str(self.facts["kind"])

    @property
    def is_sampled_from(self) -> bool:
        """Whether the checkpoint was saved to sample from, and not to resume training."""
        return self.facts is not None and self.facts["kind"] in sampler_checkpoints.KINDS

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())


def entries(folder: Path) -> list[CheckpointEntry]:
    """List the checkpoints of a run's folder or a folder of checkpoints, oldest first; of a checkpoint's folder that one.

    Raises:
        CheckpointError: the folder holds no checkpoint.
    """
    if (folder / manifest.NAME).is_file():
        folders = [folder]
    else:
        inside = folder / "checkpoints"
        folders = [path.parent for path in (inside if inside.is_dir() else folder).glob(f"*/{manifest.NAME}")]
    # Names of unfinished checkpoints begin with a dot.
    known = [_entry(path) for path in folders if not path.name.startswith(".")]
    if not known:
        raise CheckpointError(f"{folder}: holds no checkpoint; pass a run's folder, or one of its checkpoints")
    return sorted(known, key=lambda entry: (entry.written, entry.folder.name))


def _entry(folder: Path) -> CheckpointEntry:
    written = (folder / manifest.NAME).stat().st_mtime_ns
    try:
        return CheckpointEntry(folder, manifest.read(folder), "", written)
    except CheckpointError as error:
        return CheckpointEntry(folder, None, str(error), written)


def verify(known: Sequence[CheckpointEntry]) -> Iterator[tuple[CheckpointEntry, str]]:
    """Read every file, and reconstruct every delta. Yields each checkpoint with its problem, "" if it is whole."""
    last: tuple[Path, Weights] | None = None
    for entry in known:
        try:
            facts = manifest.verify(entry.folder)
            if "weights" in facts and not facts["lora"]:
                last = entry.folder, sampler_checkpoints.reconstruct(entry.folder, last)
        except CheckpointError as error:
            yield entry, str(error)
        else:
            yield entry, ""


def prune(known: Sequence[CheckpointEntry], keep: int) -> list[Path]:
    """Delete sampler checkpoints, except the newest ``keep`` and those that they are deltas of. Returns the deleted folders.

    Raises:
        CheckpointError: the predecessor of a kept delta is missing.
    """
    sampled = [entry for entry in known if entry.is_sampled_from]
    needed: set[Path] = set()
    for entry in sampled[max(0, len(sampled) - keep) :]:
        needed.update(sampler_checkpoints.lineage(entry.folder) if entry.kind == "delta" else [entry.folder])
    gone = [entry.folder for entry in sampled if entry.folder not in needed]
    # Deltas are deleted before their predecessors, so that an interruption leaves no delta without one.
    for folder in reversed(gone):
        shutil.rmtree(folder)
    return gone
