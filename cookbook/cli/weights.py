"""``cookbook weights``: the checkpoints of a run, looked at, put together and cleared away."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from cookbook import lock, runfolder
from cookbook.backends.remote import pointers
from cookbook.checkpoints import chain, inventory, manifest
from cookbook.checkpoints.inventory import Entry
from cookbook.cli import tables
from cookbook.errors import CheckpointError


def print_list(folder: Path, *, table: bool) -> None:
    """One line a checkpoint, the oldest first. Looks at no weights.

    Raises:
        CheckpointError: there is none.
    """
    head = ("checkpoint", "kind", "step", "type", "MB", "weights", "differs from")
    tables.show("checkpoints", head, [_row(entry) for entry in inventory.entries(_named(folder))], table=table)


def _row(entry: Entry) -> tuple[str, ...]:
    facts = entry.facts or {}
    own = (str(facts.get("step", "?")), str(facts.get("dtype", "?")), f"{entry.num_bytes / 1e6:.1f}")
    return (entry.folder.name, entry.kind, *own, str(facts.get("weights", ""))[:12], str(facts.get("predecessor", "")))


def verify(folder: Path) -> None:
    """Reads every file, and puts every delta together with what it goes back to. Prints a line a checkpoint.

    Raises:
        CheckpointError: there is none, or at least one is not whole; it says how many.
    """
    found, damaged = inventory.entries(_named(folder)), 0
    for entry, problem in inventory.verify(found):
        print(f"damaged  {problem}" if problem else f"whole    {entry.folder}")
        damaged += bool(problem)
    if damaged:
        raise CheckpointError(f"{folder}: {damaged} of {len(found)} checkpoints cannot be used; see above")


def reconstruct(checkpoint: Path, out: Path) -> None:
    """Puts a delta and what it goes back to together, as an ordinary Hugging Face folder ``out``.

    Raises:
        CheckpointError: it is no delta, something of it is missing or damaged, or ``out`` is taken.
    """
    if (kind := manifest.read(checkpoint)["kind"]) != "delta":
        raise CheckpointError(f"{checkpoint}: is no delta but a {kind}, whole by itself; use cookbook weights export")
    export(checkpoint, out, merged=False)


def export(checkpoint: Path, out: Path, *, merged: bool) -> None:
    """Writes an ordinary folder to load in transformers, PEFT or vLLM. ``merged`` adds an adapter to its model.

    Raises:
        CheckpointError: as :func:`cookbook.checkpoints.chain.export`; it is no adapter; or the weights are on a server.
    """
    facts = manifest.read(checkpoint)
    if (elsewhere := facts.get(pointers.SERVER)) is not None:
        raise CheckpointError(
            f"{checkpoint}: its weights are on the server at {elsewhere['url']}; fetch them with "
            f"`tinker checkpoint download {elsewhere['path']}`"
        )
    if merged and not facts["lora"]:
        raise CheckpointError(f"{checkpoint}: holds full weights and no adapter that could be merged; leave out --merged")
    made = chain.export(_named(checkpoint), out, merged=merged)
    digest = manifest.read(out).get("weights", "")
    print(f"{made.path}  step {made.step}{f', weights {digest[:12]}' if digest else ''}")


def prune(folder: Path, keep: int) -> None:
    """Deletes the checkpoints to sample from that the newest ``keep`` do not need. Those to resume from stay.

    Raises:
        CheckpointError: there is none.
        ConfigError: the run is under way.
    """
    found = inventory.entries(_named(folder))
    size = {entry.folder: entry.num_bytes for entry in found}
    with _nobody_in(folder):
        gone = inventory.prune(found, keep)
    for path in gone:
        print(f"deleted  {path}")
    print(f"{len(gone)} deleted, {sum(size[path] for path in gone) / 1e6:.1f} MB; {len(found) - len(gone)} left")


def _named(folder: Path) -> Path:
    """With a name of its own, and so a parent where its predecessors are: ``.`` has none."""
    return folder.resolve() if folder.name in ("", "..") else folder


@contextlib.contextmanager
def _nobody_in(folder: Path) -> Iterator[None]:
    """A run that goes on must not lose what its next delta differs from."""
    run = next((one for one in (folder, folder.parent) if (one / runfolder.CONFIG).is_file()), None)
    with lock.held(run) if run is not None else contextlib.nullcontext():
        yield
