"""Names of models: a run, a checkpoint of a run, a model folder, a hub id, or ``tiny``."""

from __future__ import annotations

import re
from pathlib import Path

from cookbook.backends.remote import pointers
from cookbook.checkpoints import manifest, store
from cookbook.errors import CheckpointError
from cookbook.utils import paths

_OF_STEP = re.compile(r"(?P<run>.+)@(?:step-)?(?P<step>\d+)")


def sampling_target(target: str) -> str:
    """Return the folder or hub id to load. For a run: its newest checkpoint; for ``RUN@step-N``: the checkpoint of step N.

    Raises:
        CheckpointError: the run has no checkpoint, or not that one, or its weights are on a server.
    """
    folder = Path(target)
    if paths.is_run(folder):
        checkpoint = store.newest(folder / paths.CHECKPOINTS)
        if checkpoint is None:
            raise CheckpointError(f"{target}: this run has no checkpoint yet; wait for one, or lower checkpoint.every")
        return _on_disk(target, checkpoint)
    if (match := _OF_STEP.fullmatch(target)) and not folder.exists() and paths.is_run(Path(match["run"])):
        return _on_disk(target, _of_step(Path(match["run"]), int(match["step"])))
    # A checkpoint of a run on a server has a manifest only.
    if (folder / manifest.NAME).is_file():
        return _on_disk(target, folder)
    return str(paths.packaged("data") / "tiny") if target == "tiny" and not folder.exists() else target


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
