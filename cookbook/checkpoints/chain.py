"""Checkpoints to sample from: a base, which is an ordinary Hugging Face folder, and after it deltas, each against the last.

A delta's folder holds ``weights.delta`` and a manifest that names its ``predecessor``, a folder beside it. Every manifest tells
the digest of the weights. An adapter is small and stands alone: under LoRA every checkpoint is a base, in PEFT's format, unless
the sum with what it adapts is asked for.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from cookbook.backends import copies
from cookbook.checkpoints import adapters, card, delta, manifest, store, weights
from cookbook.checkpoints.weights import Weights
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.model import DTYPES, LanguageModel, ModelConfig
from cookbook.engine.model import load as load_model
from cookbook.errors import CheckpointError
from cookbook.types import Checkpoint

KINDS = ("base", "delta")
FILE = delta.FILE


def check_kind(kind: str) -> None:
    """Raises CheckpointError for a kind of checkpoint that there is not."""
    if kind not in KINDS:
        raise CheckpointError(f"checkpoint_type: expected one of {', '.join(KINDS)}, got {kind!r}")


class SamplerCheckpoints:
    """Writes a trainer's weights, in the element type they are served in (None: the model's own), one after another.

    From the first delta on it keeps the last version in host memory, which saves reading it back.
    """

    def __init__(self, dtype: str | None = None) -> None:
        self._dtype = dtype
        self._last: Path | None = None
        self._held: Weights | None = None

    def forget(self) -> None:
        """The weights were replaced, not trained: the next checkpoint cannot be a delta."""
        self._last = self._held = None

    @property
    def predecessor(self) -> str | None:
        """The folder that the next delta would differ from."""
        return str(self._last) if self._last is not None and self._last.is_dir() else None

    def save(
        self, engine: Engine, folder: Path, kind: str, *, merged: bool = False, origin: Mapping[str, Any] | None = None
    ) -> Checkpoint:
        """Writes the weights to ``folder``, whole or as the difference from the last call's.

        Args:
            merged: an adapter together with what it adapts, as full weights; it makes no difference without an adapter.
            origin: the manifest of the checkpoint that the engine was loaded from; a base's model card then tells of its run.

        Returns:
            What was written: of an adapter by itself always a ``base``.

        Raises:
            CheckpointError: the name is taken, the disk refuses, or a delta is asked for and there is nothing before it.
        """
        if engine.model.is_lora and not merged:
            return store.save(engine, folder, state=False, facts={"weights": adapter_digest(engine.model)})
        network = adapters.full_network(engine.model)
        now = self._weights(network)
        if kind == "delta":
            self._write_delta(engine, folder, now)
        else:
            self._write_base(engine, folder, network, now, origin or {})
            self._held = None
        self._last = folder
        return Checkpoint(str(folder), engine.step, kind)

    def save_adapted(self, engine: Engine, folder: Path) -> Checkpoint:
        """Writes what an adapter lies on, as a base. No delta will be against it.

        Raises:
            CheckpointError: the name is taken, or the disk refuses.
        """
        network = adapters.full_network(engine.model, merged=False)
        self._write_base(engine, folder, network, self._weights(network))
        return Checkpoint(str(folder), engine.step, "base")

    def _weights(self, network: Any) -> Weights:
        return Weights.of(on_disk(network, DTYPES[self._dtype] if self._dtype else None))

    def _write_base(
        self, engine: Engine, folder: Path, network: Any, now: Weights, origin: Mapping[str, Any] | None = None
    ) -> None:
        """``origin`` as of :meth:`save`; None: weights that no step has trained, which get no model card."""
        stated = {**self._facts(engine, now), "kind": "base"}
        with store.appearing(folder) as aside:
            # The tensors have the names they are to have on the disk already.
            network.save_pretrained(aside, state_dict=dict(now.tensors), save_original_format=False)
            if self._dtype is not None:
                _state_dtype(aside / "config.json", self._dtype)
            engine.model.tokenizer.save_pretrained(aside)
            if origin is not None:
                card.write(aside, stated | {key: origin[key] for key in ("run", "base_model") if key in origin})
            manifest.write(aside, stated)

    def _write_delta(self, engine: Engine, folder: Path, now: Weights) -> None:
        if self._last is None or not self._last.is_dir():
            gone = f" ({self._last} is gone)" if self._last else ""
            raise CheckpointError(f"{folder}: there is nothing that a delta could differ from{gone}; write a base first")
        before = self._held or reconstruct(self._last)
        made = delta.between(before, now)
        with store.appearing(folder) as aside:
            (aside / FILE).write_bytes(delta.to_bytes(made))
            chained = {"kind": "delta", "predecessor": self._last.name, "applies_to": before.digest}
            manifest.write(aside, {**self._facts(engine, now), **chained})
        # What changed is copied, for training goes on in the same memory.
        same = {name for name, one in now.facts.items() if one == before.facts[name]}
        tensors = {name: before.tensors[name] if name in same else tensor.clone() for name, tensor in now.tensors.items()}
        self._held = Weights(tensors, now.facts)

    def _facts(self, engine: Engine, now: Weights) -> dict[str, Any]:
        config = engine.model.config
        own = {"step": engine.step, "base_model": config.name, "dtype": self._dtype or config.dtype, "lora": False}
        return {**own, "weights": now.digest}


def _state_dtype(config: Path, dtype: str) -> None:
    """transformers writes the model's own into its config, and not that of the tensors it was given."""
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": dtype}, indent=2) + "\n")


def on_disk(network: Any, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """A Hugging Face module's tensors under the names, and in the parts, that ``save_pretrained`` writes; tied ones once.

    Those that need no conversion are the module's own memory.
    """
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    unsaved = network._keys_to_ignore_on_save or ()
    own = {name: tensor for name, tensor in network.state_dict().items() if name not in unsaved}
    tensors = revert_weight_conversion(network, remove_tied_weights_from_state_dict(own, network))
    return {name: _in_host_memory(tensor, dtype) for name, tensor in tensors.items()}


def _in_host_memory(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", wanted)


def adapter_digest(model: LanguageModel) -> str:
    """The digest of an adapter's weights, under the names of its file."""
    from peft import get_peft_model_state_dict

    tensors = get_peft_model_state_dict(model.network, save_embedding_layers=False)
    return Weights.of({name: _in_host_memory(tensor, None) for name, tensor in tensors.items()}).digest


# ---- reading ---------------------------------------------------------------------------------------------------------


def lineage(folder: Path) -> list[Path]:
    """The base that ``folder`` goes back to, the deltas after it, and ``folder`` at the end.

    Raises:
        CheckpointError: one of them is missing, or is something else.
    """
    line = [folder]
    while (facts := manifest.read(line[-1]))["kind"] == "delta":
        before = store.named(line[-1].parent, facts["predecessor"])
        if before in line or not before.is_dir():
            problem = "comes before it as well" if before in line else "is missing"
            raise CheckpointError(f"{line[-1]}: differs from {before}, which {problem}; use another checkpoint")
        line.append(before)
    if "weights" not in facts:
        raise CheckpointError(f"{line[-1]}: is not a checkpoint to sample from; use one of save_weights_for_sampler_ext")
    return line[::-1]


def reconstruct(folder: Path, known: tuple[Path, Weights] | None = None) -> Weights:
    """The weights of a base or a delta. Every file, every step and the result are verified.

    Args:
        known: a checkpoint with its weights; where ``folder`` goes back to it, nothing before it is read again.

    Raises:
        CheckpointError: something is missing, damaged, or does not belong together.
    """
    line = lineage(folder)
    if known is not None and known[0] in line:
        base, found = known
    else:
        base, found = line[0], weights.read(line[0])
        _must_be(base, found, manifest.verify(base))
    for step in line[line.index(base) + 1 :]:
        facts = manifest.verify(step)
        found = delta.apply(delta.from_bytes((step / FILE).read_bytes(), str(step / FILE)), found)
        _must_be(step, found, facts)
    return found


def _must_be(folder: Path, found: Weights, facts: Mapping[str, Any]) -> None:
    if found.digest != facts.get("weights"):
        raise CheckpointError(f"{folder}: holds other weights than its manifest says; use another checkpoint")


def export(folder: Path, out: Path, *, merged: bool = False) -> Checkpoint:
    """Writes what a checkpoint stands for as a base of its own, an ordinary Hugging Face folder ``out``.

    A delta becomes full weights; of a state its optimizer is left out; an adapter stays one, or (``merged``) is added to the
    model it was trained on.

    Raises:
        CheckpointError: as :func:`reconstruct`, or ``out`` is taken, or that model is another one by now.
    """
    facts = manifest.read(folder)
    if facts.get("lora") and merged:
        return _merge(folder, out, manifest.verify(folder))
    if facts["kind"] == "delta":
        base, found = lineage(folder)[0], reconstruct(folder)
    else:
        base, found = folder, None
        manifest.verify(folder)
    with store.appearing(out) as aside:
        for path in filter(Path.is_file, base.iterdir()):  # a state's optimizer is in a folder
            if found is not None and path.match(weights.FILES):
                names = [name for name, _ in weights.tensors_in(path)]
                save_file({name: found.tensors[name] for name in names}, aside / path.name, metadata={"format": "pt"})
            elif path.name != manifest.NAME:
                shutil.copy2(path, aside / path.name)
        kept: dict[str, Any] = {key: facts[key] for key in ("step", "base_model", "dtype", "lora", "weights") if key in facts}
        card.write(aside, {**facts, "kind": "base"})
        manifest.write(aside, {**kept, "kind": "base"})
    return Checkpoint(str(out), facts["step"], "base")


def _merge(folder: Path, out: Path, facts: Mapping[str, Any]) -> Checkpoint:
    model = load_model(ModelConfig(str(folder), dtype=facts["dtype"]), torch.device("cpu"), seed=0)
    trained_on = facts.get("run", {}).get("identity", {}).get("measured", {}).get("weights")
    if trained_on not in (None, copies.digests(model)["weights"]):
        raise CheckpointError(
            f"{folder}: its adapter was trained on other weights than {facts['base_model']} holds; put those back, or export "
            "the adapter by itself"
        )
    engine = Engine(model, EngineOptions())
    engine.step = facts["step"]
    return SamplerCheckpoints().save(engine, out, "base", merged=True, origin=facts)


def load(engine: Engine, folder: Path, *, optimizer: bool) -> None:
    """As :func:`cookbook.checkpoints.store.load`, of a delta too.

    Raises:
        CheckpointError: as there, and as :func:`reconstruct`.
    """
    if manifest.read(folder)["kind"] != "delta":
        store.load(engine, folder, optimizer=optimizer)
        return
    with tempfile.TemporaryDirectory() as aside:
        store.load(engine, Path(export(folder, Path(aside) / folder.name).path), optimizer=optimizer)
