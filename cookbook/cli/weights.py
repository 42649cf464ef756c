"""``cookbook weights``: list, verify, reconstruct, export and prune the checkpoints of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from cookbook.backends.remote import pointers
from cookbook.checkpoints import inventory, manifest, sampler_checkpoints
from cookbook.checkpoints.inventory import CheckpointEntry
from cookbook.errors import CheckpointError
from cookbook.run import folder as run_folder
from cookbook.utils import files, tables


def print_list(folder: Path, *, table: bool) -> None:
    """Print one line per checkpoint, the oldest first, without reading weights.

    Raises:
        CheckpointError: the folder has no checkpoint.
    """
    head = ("checkpoint", "kind", "step", "type", "MB", "weights", "differs from")
    tables.show("checkpoints", head, [_row(entry) for entry in inventory.entries(_named(folder))], table=table)


def _row(entry: CheckpointEntry) -> tuple[str, ...]:
    facts = entry.facts or {}
    own = (str(facts.get("step", "?")), str(facts.get("dtype", "?")), f"{entry.num_bytes / 1e6:.1f}")
    return (entry.folder.name, entry.kind, *own, str(facts.get("weights", ""))[:12], str(facts.get("predecessor", "")))


def verify(folder: Path) -> None:
    """Read every file and reconstruct every delta. Print one line per checkpoint.

    Raises:
        CheckpointError: the folder has no checkpoint, or at least one is damaged; the error counts them.
    """
    found, damaged = inventory.entries(_named(folder)), 0
    for entry, problem in inventory.verify(found):
        print(f"damaged  {problem}" if problem else f"whole    {entry.folder}")
        damaged += bool(problem)
    if damaged:
        raise CheckpointError(f"{folder}: {damaged} of {len(found)} checkpoints cannot be used; see above")


def reconstruct(checkpoint: Path, out: Path) -> None:
    """Rebuild the full weights of a delta, as the Hugging Face folder ``out``.

    Raises:
        CheckpointError: the checkpoint is not a delta, a file is missing or damaged, or ``out`` exists.
    """
    if (kind := manifest.read(checkpoint)["kind"]) != "delta":
        raise CheckpointError(f"{checkpoint}: expected a delta, got a checkpoint of kind {kind}; use cookbook weights export")
    export(checkpoint, out, merged=False)


def export(checkpoint: Path, out: Path, *, merged: bool) -> None:
    """Write a folder for transformers, PEFT or vLLM. ``merged`` merges an adapter into its model.

    Raises:
        CheckpointError: as :func:`cookbook.checkpoints.sampler_checkpoints.export`; the checkpoint is not an adapter; or its
            weights are on a server.
    """
    facts = manifest.read(checkpoint)
    if (elsewhere := facts.get(pointers.SERVER)) is not None:
        if (found := pointers.on_disk(elsewhere)) is not None:
            export(found, out, merged=merged)
            return
        raise CheckpointError(
            f"{checkpoint}: its weights are on the server at {elsewhere['url']}; fetch them with "
            f"`tinker checkpoint download {elsewhere['path']}`"
        )
    if merged and not facts["lora"]:
        raise CheckpointError(f"{checkpoint}: holds full weights and no adapter that could be merged; leave out --merged")
    made = sampler_checkpoints.export(_named(checkpoint), out, merged=merged)
    digest = manifest.read(out).get("weights", "")
    print(f"{made.path}  step {made.step}{f', weights {digest[:12]}' if digest else ''}")


def prune(folder: Path, keep: int) -> None:
    """Delete the sampler checkpoints that the newest ``keep`` do not need. Training checkpoints stay.

    Raises:
        CheckpointError: the folder has no checkpoint.
        ConfigError: the run is in progress.
    """
    found = inventory.entries(_named(folder))
    size = {entry.folder: entry.num_bytes for entry in found}
    with _run_locked(folder):
        gone = inventory.prune(found, keep)
    for path in gone:
        print(f"deleted  {path}")
    print(f"{len(gone)} deleted, {sum(size[path] for path in gone) / 1e6:.1f} MB; {len(found) - len(gone)} left")


def _named(folder: Path) -> Path:
    """Resolve ``.`` and ``..``: predecessors are in the parent of the folder, and these paths have no parent."""
    return folder.resolve() if folder.name in ("", "..") else folder


@contextlib.contextmanager
def _run_locked(folder: Path) -> Iterator[None]:
    """Hold the run's lock, if there is a run: its next delta needs its predecessor."""
    run = next((one for one in (folder, folder.parent) if (one / run_folder.CONFIG).is_file()), None)
    with files.locked(run) if run is not None else contextlib.nullcontext():
        yield
