"""The checkpoints of a folder: what there is, what is whole, and what nobody needs any more."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.checkpoints import chain, manifest
from cookbook.checkpoints.weights import Weights
from cookbook.errors import CheckpointError


@dataclass(frozen=True)
class Entry:
    """A checkpoint: its folder and manifest, or why that cannot be read. ``written``: when, in nanoseconds since 1970."""

    folder: Path
    facts: Mapping[str, Any] | None
    problem: str
    written: int

    @property
    def kind(self) -> str:
        if self.facts is None:
            return "damaged"
        return f"{self.facts['kind']}, adapter" if self.facts.get("lora") else str(self.facts["kind"])

    @property
    def is_sampled_from(self) -> bool:
        """Whether it was saved to sample from, and not to go on training."""
        return self.facts is not None and self.facts["kind"] in chain.KINDS

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())


def entries(folder: Path) -> list[Entry]:
    """The checkpoints of a run's folder, or of one of checkpoints, the oldest first; of a checkpoint itself that one.

    Raises:
        CheckpointError: there is none.
    """
    if (folder / manifest.NAME).is_file():
        folders = [folder]
    else:
        inside = folder / "checkpoints"
        folders = [path.parent for path in (inside if inside.is_dir() else folder).glob(f"*/{manifest.NAME}")]
    found = [_entry(one) for one in folders if not one.name.startswith(".")]  # those begin so that are not finished
    if not found:
        raise CheckpointError(f"{folder}: holds no checkpoint; pass a run's folder, or one of its checkpoints")
    return sorted(found, key=lambda entry: (entry.written, entry.folder.name))


def _entry(folder: Path) -> Entry:
    written = (folder / manifest.NAME).stat().st_mtime_ns
    try:
        return Entry(folder, manifest.read(folder), "", written)
    except CheckpointError as error:
        return Entry(folder, None, str(error), written)


def verify(found: Sequence[Entry]) -> Iterator[tuple[Entry, str]]:
    """Each with what is wrong with it, "" where it is whole: every file is read, and every delta put together."""
    last: tuple[Path, Weights] | None = None
    for entry in found:
        try:
            facts = manifest.verify(entry.folder)
            if "weights" in facts and not facts["lora"]:
                last = entry.folder, chain.reconstruct(entry.folder, last)
        except CheckpointError as error:
            yield entry, str(error)
        else:
            yield entry, ""


def prune(found: Sequence[Entry], keep: int) -> list[Path]:
    """Deletes, of those that were saved to sample from, all that the newest ``keep`` do not go back to. Returns the folders.

    Raises:
        CheckpointError: it is not known what one of the kept ones goes back to.
    """
    sampled = [entry for entry in found if entry.is_sampled_from]
    needed = {folder for entry in sampled[max(0, len(sampled) - keep) :] for folder in _goes_back_to(entry)}
    gone = [entry.folder for entry in sampled if entry.folder not in needed]
    for folder in reversed(gone):  # a delta before what it differs from, should this be interrupted
        shutil.rmtree(folder)
    return gone


def _goes_back_to(entry: Entry) -> list[Path]:
    return chain.lineage(entry.folder) if entry.kind == "delta" else [entry.folder]
