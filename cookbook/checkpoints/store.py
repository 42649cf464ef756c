"""Write, find and load checkpoints.

A checkpoint is an ordinary Hugging Face folder (``model.safetensors``, or PEFT's ``adapter_model.safetensors``, with config and
tokenizer), so transformers, PEFT and vLLM load it. A checkpoint to resume from also holds the optimizer, in a folder
``trainer`` of :mod:`cookbook.checkpoints.sharded`. If the run was sampling from older weights than the trainer's, a folder
``sampler`` holds a checkpoint of those. A checkpoint is written to a temporary folder, hashed, forced to the disk and renamed,
so it appears whole or not at all.

If several ranks train one model, every rank makes these calls. Any other number of ranks can load the result.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from cookbook.checkpoints import manifest, ranks
from cookbook.checkpoints.schedule import Progress, SaveInterval
from cookbook.checkpoints.snapshots import Snapshot
from cookbook.engine.engine import Engine
from cookbook.engine.parallel import led
from cookbook.errors import CheckpointError
from cookbook.types import Checkpoint, JsonObject
from cookbook.utils import files

log = logging.getLogger("cookbook")

# Kind of a run's last checkpoint with checkpoint.final_state=false.
WEIGHTS_ONLY = "weights"
TRAINER = "trainer"
SAMPLER = "sampler"
SHARD_BYTES = 5 << 30
# Largest file of the optimizer's state. The files are written in order, and small ones share the memory of their cache.
STATE_BYTES = 256 << 20
_STEP = re.compile(r"step-(\d+)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


def named(folder: Path, name: str) -> Path:
    """Return ``folder/name``.

    Raises:
        CheckpointError: ``name`` is not a valid name, for example a path.
    """
    if not _NAME.fullmatch(name):
        raise CheckpointError(
            f"checkpoint name: expected letters, digits, '.', '_' and '-', the first a letter or digit, got {name!r}"
        )
    return folder / name


def step_name(step: int) -> str:
    return f"step-{step:06d}"


@led
def save(
    engine: Engine | Snapshot,
    folder: Path,
    *,
    state: bool,
    overwrite: bool = False,
    facts: JsonObject | None = None,
    sampler: Callable[[Path], object] | None = None,
    shard_bytes: int = SHARD_BYTES,
    kind: str = "base",
) -> Checkpoint:
    """Write the model, and with ``state`` the optimizer, to ``folder``.

    Args:
        kind: kind of a checkpoint without ``state``.
        facts: more entries of the manifest, JSON-compatible.
        sampler: writes older weights, which are still sampled from, as a checkpoint to the path that it gets.
        shard_bytes: largest size of a file with several tensors. A save needs about as much memory in addition to the tensors.

    Raises:
        CheckpointError: the folder exists, or cannot be written; no file is left.
    """
    from cookbook.checkpoints import card, contents, sharded

    model, kind = engine.model, "state" if state else kind
    own = {"kind": kind, "step": engine.step, "base_model": model.config.name}
    stated = {**(facts or {}), **own, "dtype": model.config.dtype, "lora": model.is_lora}
    if model.config.quantize:
        stated["quantize"] = model.config.quantize
    if state:
        stated["optimizer"] = engine.options.optimizer
    with appearing(folder, overwrite=overwrite) as temporary:
        if sampler is not None:
            sampler(temporary / SAMPLER)
        contents.write_model(model, temporary, shard_bytes)
        known = {}
        if state:
            digests = sharded.save(engine.optimizer.state(), temporary / TRAINER, min(shard_bytes, STATE_BYTES))
            known = {f"{TRAINER}/{name}": digest for name, digest in digests.items()}
        ranks.on_first(lambda: card.write(temporary, stated))
        ranks.on_first(lambda: manifest.write(temporary, stated, known))
    return Checkpoint(str(folder), engine.step, kind)


@contextlib.contextmanager
def appearing(folder: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder, which becomes ``folder`` at the end of the block. If the block fails, it is deleted.

    Raises:
        CheckpointError: the folder exists, or cannot be written.
    """
    temporary = ranks.on_first(lambda: folder.parent / f".{folder.name}.{os.getpid()}.tmp")
    try:
        ranks.on_first(lambda: _begin(temporary, folder, overwrite))
        yield temporary
        ranks.on_first(lambda: _publish(temporary, folder))
    # The error is the same on every rank.
    except (OSError, SafetensorError) as error:
        ranks.on_first(lambda: shutil.rmtree(temporary, ignore_errors=True))
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise CheckpointError(f"{folder}: could not be saved: {reason}; earlier checkpoints are untouched") from None


def _begin(temporary: Path, folder: Path, overwrite: bool) -> None:
    if folder.exists() and not overwrite:
        raise CheckpointError(f"{folder}: exists already; choose another name")
    shutil.rmtree(temporary, ignore_errors=True)
    files.make_folders(folder.parent)
    temporary.mkdir()


def _publish(temporary: Path, folder: Path) -> None:
    """Rename the finished folder. An earlier ``folder`` is renamed first, and deleted last."""
    old = folder.parent / f".{folder.name}.{os.getpid()}.old"
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    try:
        temporary.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    files.sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


@led
def load(engine: Engine, folder: Path, *, optimizer: bool) -> None:
    """Load a checkpoint's weights, and with ``optimizer`` its moments and step count, into the engine.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or of another model.
    """
    from cookbook.checkpoints import contents

    facts = ranks.on_first(lambda: manifest.verify(folder))
    if facts["lora"] != engine.model.is_lora:
        kind = "a LoRA adapter" if facts["lora"] else "full weights"
        raise CheckpointError(f"{folder}: holds {kind}, but the model is configured differently; set model.lora_rank to match")
    if optimizer and facts["kind"] != "state":
        raise CheckpointError(f"{folder}: holds weights only; pass optimizer=False, or a checkpoint made by save_state")
    if optimizer and (rule := facts["optimizer"]) != engine.options.optimizer:
        raise CheckpointError(
            f"{folder}: was made with backend.optimizer={rule}, now it is {engine.options.optimizer}; set it back, or load "
            "the weights alone"
        )
    try:
        contents.load_model(engine.model, folder)
    except BaseException as error:
        # A CheckpointError is raised before anything is overwritten.
        if not isinstance(error, CheckpointError):
            engine.weights_changed()
            engine.lose_gradient(bool(engine.accumulated))
        raise
    engine.weights_changed()
    engine.discard_gradient()
    engine.optimizer.reset()
    if optimizer:
        contents.load_optimizer(engine.optimizer, folder / TRAINER)
    engine.step = int(facts["step"]) if optimizer else 0


def all_steps(folder: Path) -> list[Path]:
    """List the checkpoints ``step-NNNNNN`` of a run, oldest first, without verifying them."""
    steps = [path for path in folder.glob("step-*") if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(steps, key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def newest(folder: Path) -> Path | None:
    """Return the newest whole checkpoint of a run, None if the run has saved none. Damaged ones are named in the log.

    Raises:
        CheckpointError: all of them are damaged.
    """
    damaged: list[CheckpointError] = []
    for path in reversed(all_steps(folder)):
        try:
            manifest.verify(path)
        except CheckpointError as error:
            damaged.append(error)
        else:
            for problem in damaged:
                log.warning("ignored a damaged checkpoint: %s", problem)
            return path
    if damaged:
        reason = str(damaged[0]).rpartition(";")[0]
        raise CheckpointError(
            f"{folder}: every checkpoint is damaged, the newest: {reason}; restore one of them, choose another out=, or move "
            f"{folder.parent} away to start the run over"
        )
    return None


def set_aside(resumed: Path) -> list[str]:
    """Rename the damaged checkpoints after ``resumed``, since the run will save their steps again; return a line for each."""
    lines = []
    steps = all_steps(resumed.parent)
    for path in steps[steps.index(resumed) + 1 :] if resumed in steps else []:
        try:
            manifest.verify(path)
        except CheckpointError:
            names = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
            new_path = next(name for name in names if not name.exists())
            path.rename(new_path)
            lines.append(f"{path} is damaged and is now called {new_path.name}; the run saves this step again")
    return lines


def prune(
    folder: Path, keep: int | None, saved: int | None = None, staying: SaveInterval | None = None, best: int | None = None
) -> None:
    """Delete all but the newest ``keep`` checkpoints, and temporary folders of saves that were killed.

    Args:
        saved: the run's last good step. Later checkpoints are damaged; they are not counted, and not deleted.
        staying: of the older checkpoints, the first one after each multiple of this interval is kept too.
        best: the step of an older checkpoint that is kept too.
    """
    for path in [*folder.glob(".*.tmp"), *folder.glob(".*.old")]:
        shutil.rmtree(path, ignore_errors=True)
    if keep is None:
        return
    counted = [path for path in all_steps(folder) if saved is None or _step(path) <= saved]
    stays = set(_staying(counted, staying or SaveInterval()))
    for path in counted[:-keep]:
        if path not in stays and _step(path) != best:
            shutil.rmtree(path)


def _staying(steps: list[Path], interval: SaveInterval) -> Iterator[Path]:
    """Yield the first of ``steps`` after each multiple of the interval. A checkpoint without a readable manifest is skipped."""
    last = Progress()
    for path in steps:
        with contextlib.suppress(CheckpointError):
            now = Progress.of(manifest.read(path))
            if interval.due(last, now):
                last = now
                yield path
