"""Writing, finding and loading checkpoints.

A checkpoint is an ordinary Hugging Face folder (``model.safetensors``, or PEFT's ``adapter_model.safetensors``, with config and
tokenizer), so transformers, PEFT and vLLM load it as it is. A resumable one also holds the optimizer, in a folder ``trainer``
as :mod:`cookbook.checkpoints.sharded` writes it, and where a run was sampling from older weights than the trainer's, those in a
folder ``sampler``, a checkpoint in itself. It is written aside, digested, forced to the disk and renamed: it appears whole or
not at all.

Where several ranks train one model, every one of them makes these calls; any other number of ranks can load the result.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from torch import Tensor

from cookbook import atomic
from cookbook.checkpoints import manifest, ranks
from cookbook.checkpoints.cadence import Cadence, Progress
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.model import LanguageModel
from cookbook.errors import CheckpointError
from cookbook.types import Checkpoint

log = logging.getLogger("cookbook")

TRAINER = "trainer"
SAMPLER = "sampler"
SHARD_BYTES = 5 << 30
_STEP = re.compile(r"step-(\d+)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


class Remembering(Protocol):
    """An optimizer, or a copy of what it remembers."""

    def state(self) -> dict[str, Tensor]: ...


class Trained(Protocol):
    """What a checkpoint is written from: an engine, or a copy of what it holds."""

    @property
    def model(self) -> LanguageModel: ...
    @property
    def options(self) -> EngineOptions: ...
    @property
    def optimizer(self) -> Remembering: ...
    @property
    def step(self) -> int: ...


def named(folder: Path, name: str) -> Path:
    """``folder/name``, after making sure that ``name`` is a name and not a path.

    Raises:
        CheckpointError: it is not.
    """
    if not _NAME.fullmatch(name):
        raise CheckpointError(
            f"checkpoint name: expected letters, digits, '.', '_' and '-', the first a letter or digit, got {name!r}"
        )
    return folder / name


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def save(
    engine: Trained,
    folder: Path,
    *,
    state: bool,
    overwrite: bool = False,
    facts: Mapping[str, Any] | None = None,
    sampler: Callable[[Path], object] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Checkpoint:
    """Writes the model, and with ``state`` the optimizer, to ``folder``.

    Args:
        facts: what else the manifest should say, as JSON has it.
        sampler: writes older weights, which samples are still drawn from, as a checkpoint; it is given ``folder/sampler``.
        shard_bytes: the most that a file of tensors holds, unless it is a single one that is larger. A save needs about as much
            memory beside the tensors themselves.

    Raises:
        CheckpointError: the name is taken, or the disk refuses; nothing is left behind.
    """
    with appearing(folder, overwrite=overwrite) as aside:
        if sampler is not None:
            sampler(aside / SAMPLER)
        _write(engine, aside, state=state, facts=facts or {}, shard_bytes=shard_bytes)
    return Checkpoint(str(folder), engine.step, "state" if state else "base")


@contextlib.contextmanager
def appearing(folder: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder to fill. It becomes ``folder`` at the end of the block, whole; if the block fails there is nothing.

    Raises:
        CheckpointError: the name is taken, or the disk refuses.
    """
    aside = ranks.on_first(lambda: folder.parent / f".{folder.name}.{os.getpid()}.tmp")
    try:
        ranks.on_first(lambda: _begin(aside, folder, overwrite))
        yield aside
        ranks.on_first(lambda: _publish(aside, folder))
    except (OSError, SafetensorError) as error:  # on every rank the same
        ranks.on_first(lambda: shutil.rmtree(aside, ignore_errors=True))
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise CheckpointError(f"{folder}: could not be saved: {reason}; earlier checkpoints are untouched") from None


def _begin(aside: Path, folder: Path, overwrite: bool) -> None:
    if folder.exists() and not overwrite:
        raise CheckpointError(f"{folder}: exists already; choose another name")
    shutil.rmtree(aside, ignore_errors=True)
    atomic.make_folders(folder.parent)
    aside.mkdir()


def _write(engine: Trained, folder: Path, *, state: bool, facts: Mapping[str, Any], shard_bytes: int) -> None:
    from cookbook.checkpoints import card, contents

    model = engine.model
    contents.write_model(model, folder, shard_bytes)
    if state:
        contents.write_optimizer(engine.optimizer.state(), folder / TRAINER, shard_bytes)
    own = {"kind": "state" if state else "base", "step": engine.step, "base_model": model.config.name}
    stated = {**facts, **own, "dtype": model.config.dtype, "lora": model.is_lora}
    if state:
        stated["optimizer"] = engine.options.optimizer
    ranks.on_first(lambda: card.write(folder, stated))
    ranks.on_first(lambda: manifest.write(folder, stated))


def _publish(aside: Path, folder: Path) -> None:
    """Puts the finished folder in its place. One that stood there is moved away first, and deleted last."""
    old = folder.parent / f".{folder.name}.{os.getpid()}.old"
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    try:
        aside.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    atomic.sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def load(engine: Engine, folder: Path, *, optimizer: bool) -> None:
    """Puts a checkpoint's weights, and with ``optimizer`` its moments and step count, into the engine.

    Raises:
        CheckpointError: it is missing, damaged, or of another model.
    """
    from cookbook.checkpoints import contents

    facts = ranks.on_first(lambda: manifest.verify(folder))
    if facts["lora"] != engine.model.is_lora:
        kind = "a LoRA adapter" if facts["lora"] else "full weights"
        raise CheckpointError(f"{folder}: holds {kind}, and the model is set up otherwise; set model.lora_rank to match")
    if optimizer and facts["kind"] != "state":
        raise CheckpointError(f"{folder}: holds weights only; pass optimizer=False, or a checkpoint made by save_state")
    rule = facts.get("optimizer", "adamw")  # an older version's, which knew no other
    if optimizer and rule != engine.options.optimizer:
        raise CheckpointError(
            f"{folder}: was made with backend.optimizer={rule}, now it is {engine.options.optimizer}; set it back, or take the "
            "weights alone"
        )
    try:
        contents.load_model(engine.model, folder)
    except CheckpointError:  # before anything was overwritten
        raise
    except BaseException:
        engine.version += 1
        engine.lose_gradient(bool(engine.accumulated))
        raise
    engine.version += 1
    engine.discard_gradient()
    engine.optimizer.reset()
    if optimizer:
        contents.load_optimizer(engine.optimizer, folder / TRAINER)
    engine.step = int(facts["step"]) if optimizer else 0


def all_steps(folder: Path) -> list[Path]:
    """The checkpoints ``step-NNNNNN`` of a run, oldest first; unchecked."""
    found = [path for path in folder.glob("step-*") if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_step)


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
                log.warning("passed over a checkpoint: %s", problem)
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
            kept = next(name for name in names if not name.exists())
            path.rename(kept)
            lines.append(f"{path} is damaged and is now called {kept.name}; the run saves this step again")
    return lines


def prune(folder: Path, keep: int | None, saved: int | None = None, staying: Cadence | None = None) -> None:
    """Deletes all but the newest ``keep`` checkpoints, and what killed saves left behind.

    Args:
        saved: later steps count for nothing: the run passed them over as damaged, and they must not push out good ones.
        staying: of the older ones, the first after each of its multiples stays all the same.
    """
    for path in [*folder.glob(".*.tmp"), *folder.glob(".*.old")]:
        shutil.rmtree(path, ignore_errors=True)
    if keep is None:
        return
    counted = [path for path in all_steps(folder) if saved is None or _step(path) <= saved]
    stays = set(_staying(counted, staying or Cadence()))
    for path in counted[:-keep]:
        if path not in stays:
            shutil.rmtree(path)


def _staying(steps: list[Path], cadence: Cadence) -> Iterator[Path]:
    """The first of ``steps`` behind each multiple; one that does not tell how far the run had come is not among them."""
    last = Progress()
    for path in steps:
        with contextlib.suppress(CheckpointError):
            now = Progress.of(manifest.read(path))
            if cadence.due(last, now):
                last = now
                yield path
