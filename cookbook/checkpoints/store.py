"""Writing, finding and loading checkpoints.

A checkpoint is an ordinary Hugging Face folder (``model.safetensors``, or PEFT's ``adapter_model.safetensors``, with config and
tokenizer), so transformers, PEFT and vLLM load it as it is. A resumable one also holds ``trainer.safetensors``, the optimizer.
It is written aside, digested, forced to the disk and renamed: it appears whole or not at all.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from cookbook.checkpoints import manifest
from cookbook.engine.engine import Engine
from cookbook.errors import CheckpointError
from cookbook.types import Checkpoint

log = logging.getLogger("cookbook")

TRAINER = "trainer.safetensors"
ADAPTER = "adapter_model.safetensors"
_STEP = re.compile(r"step-(\d+)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


def named(folder: Path, name: str) -> Path:
    """``folder/name``, after making sure that ``name`` is a name and not a path.

    Raises:
        CheckpointError: it is not.
    """
    if not _NAME.fullmatch(name):
        raise CheckpointError(f"checkpoint name {name!r}: use letters, digits, '.', '_' and '-', starting with a letter or digit")
    return folder / name


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def save(engine: Engine, folder: Path, *, state: bool, overwrite: bool = False) -> Checkpoint:
    """Writes the model, and with ``state`` the optimizer, to ``folder``.

    Raises:
        CheckpointError: the name is taken by a good checkpoint, or the disk refuses; nothing is left behind.
    """
    if folder.exists() and not overwrite:
        raise CheckpointError(f"{folder}: exists already; choose another name")
    aside = folder.parent / f".{folder.name}.{os.getpid()}.tmp"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        _write(engine, aside, state)
        _publish(aside, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise CheckpointError(f"{folder}: could not be saved: {reason}; earlier checkpoints are untouched") from None
    return Checkpoint(str(folder), engine.step, "state" if state else "base")


def _write(engine: Engine, folder: Path, state: bool) -> None:
    model = engine.model
    model.network.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    if state:
        save_file(engine.optimizer.state(), folder / TRAINER)
    facts = {"kind": "state" if state else "base", "step": engine.step, "base_model": model.config.name}
    manifest.write(folder, {**facts, "dtype": model.config.dtype, "lora": model.is_lora})


def _publish(aside: Path, folder: Path) -> None:
    """Puts the finished folder in its place. One that stood there is moved away first, and deleted last."""
    old = folder.parent / f".{folder.name}.{os.getpid()}.old"
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    descriptor = os.open(folder.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    shutil.rmtree(old, ignore_errors=True)


def load(engine: Engine, folder: Path, *, optimizer: bool) -> None:
    """Puts a checkpoint's weights, and with ``optimizer`` its moments and step count, into the engine.

    Raises:
        CheckpointError: it is missing, damaged, or of another model.
    """
    facts = manifest.verify(folder)
    if facts["lora"] != engine.model.is_lora:
        kind = "a LoRA adapter" if facts["lora"] else "full weights"
        raise CheckpointError(f"{folder}: holds {kind}, and the model is set up otherwise; set model.lora_rank to match")
    if optimizer and facts["kind"] != "state":
        raise CheckpointError(f"{folder}: holds weights only; pass optimizer=False, or a checkpoint made by save_state")
    _load_weights(engine.model.network, folder, lora=facts["lora"])
    engine.discard_gradient()
    engine.optimizer.reset()
    if optimizer:
        engine.optimizer.load_state(load_file(folder / TRAINER))
        engine.step = int(facts["step"])


def _load_weights(network: Any, folder: Path, *, lora: bool) -> None:
    try:
        if lora:
            from peft import set_peft_model_state_dict

            set_peft_model_state_dict(network, load_file(folder / ADAPTER))
            return
        weights = {name: tensor for path in sorted(folder.glob("model*.safetensors")) for name, tensor in load_file(path).items()}
        own = network.state_dict()
        unknown, missing = set(weights) - set(own), set(own) - set(weights)
        tied = {name for name in missing if any(own[name].data_ptr() == own[other].data_ptr() for other in weights if other in own)}
        if unknown or missing - tied:
            example = sorted(unknown or missing - tied)[0]
            raise CheckpointError(f"{folder}: is of another architecture ({example} does not match); use the model it was made from")
        network.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"{folder}: does not fit the model: {str(error).splitlines()[-1].strip()}") from None


def all_steps(folder: Path) -> list[Path]:
    """The checkpoints ``step-NNNNNN`` of a run, oldest first; unchecked."""
    found = [path for path in folder.glob("step-*") if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def newest(folder: Path) -> Path | None:
    """The newest checkpoint of a run that is whole; damaged ones are named in the log and passed over."""
    for path in reversed(all_steps(folder)):
        try:
            manifest.verify(path)
        except CheckpointError as error:
            log.warning("passed over a checkpoint: %s", error)
        else:
            return path
    return None


def prune(folder: Path, keep: int | None) -> None:
    """Deletes all but the newest ``keep`` checkpoints, and what killed saves left behind."""
    for path in [*folder.glob(".step-*.tmp"), *folder.glob(".step-*.old")]:
        shutil.rmtree(path, ignore_errors=True)
    if keep is not None:
        for path in all_steps(folder)[:-keep]:
            shutil.rmtree(path)
