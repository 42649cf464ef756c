"""Names of models: a run, a checkpoint of a run, a model folder, a hub id, or ``tiny``."""

from __future__ import annotations

import re
from pathlib import Path

from cookbook.backends.remote import pointers
from cookbook.checkpoints import manifest, store
from cookbook.errors import CheckpointError
from cookbook.utils import paths
from cookbook.utils.suggest import did_you_mean

# Number of runs that an error lists.
MAX_NAMED = 5
_OF_STEP = re.compile(r"(?P<run>.+)@(?:(?:step-)?(?P<step>\d+)|best)")


def sampling_target(target: str) -> str:
    """Return the folder or hub id to load. For a run: its newest checkpoint.

    ``RUN@step-N`` is the checkpoint of step N, and ``RUN@best`` the best one by ``checkpoint.best``.

    Raises:
        CheckpointError: the run has no checkpoint, or not that one, or its weights are on a server; or there is no such run.
    """
    if (checkpoint := checkpoint_of(target)) is not None:
        return _on_disk(target, checkpoint)
    folder = Path(target)
    if not folder.exists():
        _refuse_unknown_run(folder)
    return str(paths.packaged("data") / "tiny") if target == "tiny" and not folder.exists() else target


def pointer_of(target: str) -> pointers.Pointer | None:
    """Return the address of a run's or checkpoint's weights on a server; None if they are on this machine, or of no run.

    Raises:
        CheckpointError: as :func:`checkpoint_of`.
    """
    checkpoint = checkpoint_of(target)
    server = None if checkpoint is None else manifest.read(checkpoint).get(pointers.SERVER)
    return None if checkpoint is None or server is None or pointers.on_disk(server) else pointers.read(checkpoint)


def checkpoint_of(target: str) -> Path | None:
    """Return the folder of a checkpoint, or of a pointer to one: of a run the newest; None if ``target`` is neither.

    Raises:
        CheckpointError: the run has no checkpoint, or not that one.
    """
    folder = Path(target)
    if paths.is_run(folder):
        newest = store.newest(folder / paths.CHECKPOINTS)
        if newest is None:
            raise CheckpointError(f"{target}: this run has no checkpoint yet; wait for one, or lower checkpoint.every")
        return newest
    if (match := _OF_STEP.fullmatch(target)) and not folder.exists() and paths.is_run(Path(match["run"])):
        run = Path(match["run"])
        return _of_step(run, _best_step(run) if match["step"] is None else int(match["step"]))
    # A checkpoint of a run on a server has a manifest only.
    return folder if (folder / manifest.NAME).is_file() else None


def _refuse_unknown_run(folder: Path) -> None:
    """Raise CheckpointError if a path that does not exist is next to runs, so that it is a misspelled run, not a hub id."""
    runs = sorted(path.parent.name for path in folder.parent.glob(f"*/{paths.RUN_CONFIG}")) if folder.name else []
    if folder.parent == Path() or not (runs or folder.parent.name == "runs"):
        return
    if runs:
        listed = f"choose a run of {folder.parent}: {', '.join(runs[-MAX_NAMED:])}"
    elif folder.parent.is_dir():
        listed = f"{folder.parent} holds no runs yet; train one with out={folder}"
    else:
        missing = f"the folder {folder.parent} does not exist in {Path.cwd()}"
        listed = f"{missing}; go to the folder of the run, or train one with out={folder}"
    raise CheckpointError(f"{folder}: no such run, checkpoint or model;{did_you_mean(folder.name, runs)} {listed}")


def _best_step(run: Path) -> int:
    """Return the best step of a run by ``checkpoint.best``. Raises CheckpointError: no checkpoint states one."""
    for checkpoint in reversed(store.all_steps(run / paths.CHECKPOINTS)):
        best = manifest.read(checkpoint).get("run", {}).get("best") or {}
        if best.get("step") is not None:
            return int(best["step"])
    raise CheckpointError(f"{run}: has no best checkpoint; train with checkpoint.best=eval/loss, or name a step: {run}@step-N")


def _of_step(run: Path, step: int) -> Path:
    """Return the checkpoint of a step. Raises CheckpointError: the run has no such checkpoint, or it is damaged."""
    checkpoint = run / paths.CHECKPOINTS / store.step_name(step)
    if not checkpoint.is_dir():
        steps = ", ".join(path.name for path in store.all_steps(run / paths.CHECKPOINTS)) or "none"
        raise CheckpointError(f"{run}: has no checkpoint of step {step}; choose one of these: {steps}")
    manifest.verify(checkpoint)
    return checkpoint


def _on_disk(target: str, checkpoint: Path) -> str:
    """Return the folder with the weights of a checkpoint. Raises CheckpointError: they are on a server."""
    if (server := manifest.read(checkpoint).get(pointers.SERVER)) is None:
        return str(checkpoint)
    if (local := pointers.on_disk(server)) is not None:
        return str(local)
    raise CheckpointError(
        f"{target}: the weights of its checkpoints are on the server at {server['url']}; fetch them with "
        f"`tinker checkpoint download {server['path']}`, and use that folder"
    )
