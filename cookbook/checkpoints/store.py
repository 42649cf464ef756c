"""Writing, finding and loading checkpoints.

A checkpoint is an ordinary Hugging Face folder (``model.safetensors``, or PEFT's ``adapter_model.safetensors``, with config and
tokenizer), so transformers, PEFT and vLLM load it as it is. A resumable one also holds ``trainer.safetensors``, the optimizer,
and where a run was sampling from older weights than the trainer's, those in a folder ``sampler``, a checkpoint in itself.
It is written aside, digested, forced to the disk and renamed: it appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cookbook.checkpoints import manifest
from cookbook.engine.engine import Engine
from cookbook.engine.model import LORA_FILE, LanguageModel
from cookbook.errors import CheckpointError
from cookbook.types import Checkpoint

log = logging.getLogger("cookbook")

TRAINER = "trainer.safetensors"
ADAPTER = "adapter_model.safetensors"
SAMPLER = "sampler"
_STEP = re.compile(r"step-(\d+)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


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
    engine: Engine,
    folder: Path,
    *,
    state: bool,
    overwrite: bool = False,
    facts: Mapping[str, Any] | None = None,
    sampler: Engine | None = None,
) -> Checkpoint:
    """Writes the model, and with ``state`` the optimizer, to ``folder``.

    Args:
        facts: what else the manifest should say, as JSON has it.
        sampler: older weights, which samples are still drawn from; they go to ``folder/sampler``.

    Raises:
        CheckpointError: the name is taken, or the disk refuses; nothing is left behind.
    """
    with appearing(folder, overwrite=overwrite) as aside:
        if sampler is not None:
            (aside / SAMPLER).mkdir()
            _write(sampler, aside / SAMPLER, state=False, facts={})
        _write(engine, aside, state=state, facts=facts or {})
    return Checkpoint(str(folder), engine.step, "state" if state else "base")


@contextlib.contextmanager
def appearing(folder: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder to fill. It becomes ``folder`` at the end of the block, whole; if the block fails there is nothing.

    Raises:
        CheckpointError: the name is taken, or the disk refuses.
    """
    aside = folder.parent / f".{folder.name}.{os.getpid()}.tmp"
    try:
        if folder.exists() and not overwrite:
            raise CheckpointError(f"{folder}: exists already; choose another name")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        _publish(aside, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise CheckpointError(f"{folder}: could not be saved: {reason}; earlier checkpoints are untouched") from None


def _write(engine: Engine, folder: Path, *, state: bool, facts: Mapping[str, Any]) -> None:
    model = engine.model
    # PEFT would otherwise ask the hub whether the embeddings were resized. They never are.
    model.network.save_pretrained(folder, **({"save_embedding_layers": False} if model.is_lora else {}))
    model.tokenizer.save_pretrained(folder)
    if state:
        save_file(engine.optimizer.state(), folder / TRAINER)
    own = {"kind": "state" if state else "base", "step": engine.step, "base_model": model.config.name}
    manifest.write(folder, {**facts, **own, "dtype": model.config.dtype, "lora": model.is_lora})


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
    if facts["lora"]:
        _load_adapter(engine.model.network, folder)
    else:
        _load_weights(engine.model, folder)
    engine.version += 1
    engine.discard_gradient()
    engine.optimizer.reset()
    if optimizer:
        engine.optimizer.load_state(load_file(folder / TRAINER))
    engine.step = int(facts["step"]) if optimizer else 0


def _load_weights(model: LanguageModel, folder: Path) -> None:
    """Through transformers, which keeps some architectures in memory under other names than on disk."""
    from transformers import AutoModelForCausalLM

    trust = model.config.trust_remote_code
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=model.network.dtype, trust_remote_code=trust).state_dict()
    _must_fit(folder, model.network.state_dict(), saved)
    model.network.load_state_dict(saved)


def _load_adapter(network: Any, folder: Path) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    saved = load_file(folder / ADAPTER)
    _must_fit(folder, get_peft_model_state_dict(network, save_embedding_layers=False), saved)
    alpha = network.peft_config["default"].lora_alpha
    saved_alpha = json.loads((folder / LORA_FILE).read_text())["lora_alpha"]
    if alpha != saved_alpha:
        raise CheckpointError(f"{folder}: was made with lora_alpha={saved_alpha}, got {alpha}; set model.lora_alpha to match")
    set_peft_model_state_dict(network, saved)


def _must_fit(folder: Path, own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Before anything is overwritten: names and shapes are the same."""
    own_shapes, saved_shapes = ({(name, tuple(tensor.shape)) for name, tensor in one.items()} for one in (own, saved))
    if others := own_shapes ^ saved_shapes:
        name, shape = min(others)
        raise CheckpointError(
            f"{folder}: is of another model ({name} of shape {shape} is in one of them only); use the model it was made from"
        )


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


def prune(folder: Path, keep: int | None, saved: int | None = None) -> None:
    """Deletes all but the newest ``keep`` checkpoints, and what killed saves left behind.

    Those after step ``saved`` count for nothing: the run passed them over as damaged, and they must not push out good ones.
    """
    for path in [*folder.glob(".*.tmp"), *folder.glob(".*.old")]:
        shutil.rmtree(path, ignore_errors=True)
    if keep is not None:
        steps = all_steps(folder)
        counted = [path for path in steps if saved is None or int(path.name.removeprefix("step-")) <= saved]
        for path in counted[:-keep]:
            shutil.rmtree(path)
