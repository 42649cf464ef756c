"""What a run folder holds of a checkpoint on a server: a manifest with where it is, and everything else a run asks of one.

So finding the newest, comparing identities, pruning and resuming know no difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.checkpoints import manifest, store
from cookbook.engine.model import ModelConfig
from cookbook.errors import CheckpointError

SERVER = "server"  # the key of the manifest that makes it a pointer


@dataclass(frozen=True)
class Pointer:
    """``path`` is what the server calls it; ``step`` how many optimizer steps it has seen."""

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
    facts: Mapping[str, Any] | None = None,
    sampler: Pointer | None = None,
) -> None:
    """``facts`` and ``sampler`` as :func:`cookbook.checkpoints.store.save` has them.

    Raises:
        CheckpointError: the name is taken, or the disk refuses.
    """
    with store.appearing(folder, overwrite=overwrite) as aside:
        if sampler is not None:
            (aside / store.SAMPLER).mkdir()
            manifest.write(aside / store.SAMPLER, _facts(sampler, model))
        manifest.write(aside, {**(facts or {}), **_facts(pointer, model)})


def read(folder: Path) -> Pointer:
    """Raises CheckpointError: it is missing or damaged, or holds its weights itself."""
    facts = manifest.verify(folder)
    if SERVER not in facts:
        raise CheckpointError(f"{folder}: was saved by backend=local and is not on a server; go on with backend=local")
    return Pointer(facts[SERVER]["path"], facts[SERVER]["url"], int(facts["step"]), facts["kind"])


def address(place: str) -> str:
    """What the server calls the checkpoint: ``place`` itself (``tinker://...``), or what the pointer in that folder says.

    Raises:
        CheckpointError: as :func:`read`.
    """
    return place if place.startswith("tinker://") else read(Path(place)).path


def below(folder: Path) -> Iterator[tuple[Path, str]]:
    """Every pointer in ``folder`` with its address. Damaged ones are none."""
    for file in sorted(folder.glob(f"**/{manifest.NAME}")):
        try:
            facts = manifest.read(file.parent)
        except CheckpointError:
            continue
        if SERVER in facts:
            yield file.parent, facts[SERVER]["path"]


def _facts(pointer: Pointer, model: ModelConfig) -> dict[str, Any]:
    return {
        "kind": pointer.kind,
        "step": pointer.step,
        "base_model": model.name,
        "dtype": model.dtype,
        "lora": bool(model.lora_rank),
        SERVER: {"url": pointer.url, "path": pointer.path},
    }
