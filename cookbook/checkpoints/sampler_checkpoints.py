"""Sampler checkpoints: a base, an ordinary Hugging Face folder, then deltas, each against the checkpoint before.

A delta's folder holds ``weights.delta`` and a manifest that names its ``predecessor``, a folder next to it. Every manifest
holds the digest of the weights. A LoRA adapter is small: every checkpoint of it is a base, in PEFT's format, unless the caller
asks for the full weights with the adapter merged.
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

from cookbook.checkpoints import card, delta, gathered, manifest, snapshots, store, tensor_digests
from cookbook.checkpoints.tensor_digests import Weights
from cookbook.engine import quantized
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.model import DTYPES, LanguageModel, ModelConfig
from cookbook.engine.model import load as load_model
from cookbook.engine.parallel import led
from cookbook.errors import CheckpointError
from cookbook.types import Checkpoint, JsonObject

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

KINDS = ("base", "delta")
# Folder of transformers for the chat templates of a tokenizer that has several.
CHAT_TEMPLATES = "additional_chat_templates"


def check_kind(kind: str) -> None:
    """Raise CheckpointError if the checkpoint kind is unknown."""
    if kind not in KINDS:
        raise CheckpointError(f"checkpoint_type: expected one of {', '.join(KINDS)}, got {kind!r}")


class SamplerCheckpoints:
    """Writes the sampler checkpoints of a trainer, in the element type that the deployment serves (None: the model's own).

    From the first delta on, the last version is kept in host memory, so that it need not be read from disk.
    """

    def __init__(self, dtype: str | None = None) -> None:
        self.dtype = dtype
        self._last: Path | None = None
        self._held: Weights | None = None
        # The last version of sharded weights, of which every rank holds a part.
        self._version: gathered.SavedVersion | None = None

    def forget(self) -> None:
        """Forget the last checkpoint, because the weights were replaced: the next checkpoint cannot be a delta."""
        self._last = self._held = self._version = None

    @property
    def predecessor(self) -> str | None:
        """The folder of the checkpoint that the next delta would apply to; None if the next must be a base."""
        return str(self._last) if self._last is not None and self._last.is_dir() else None

    def save(
        self,
        engine: Engine,
        folder: Path,
        kind: str,
        *,
        merged: bool = False,
        origin: JsonObject | None = None,
        predecessor: str | None = None,
    ) -> Checkpoint:
        """Write the weights to ``folder``: all of them, or their difference from the last checkpoint.

        Args:
            merged: write full weights with the adapter merged; it makes no difference without an adapter.
            origin: the manifest of the checkpoint that the engine was loaded from, whose run the model card then describes.
            predecessor: name of the checkpoint that a delta must apply to; if the last one has another name, write a base.

        Returns:
            The checkpoint. An adapter that is not merged is always a ``base``.

        Raises:
            CheckpointError: the folder exists, cannot be written, or a delta has no predecessor.
        """
        if engine.model.is_lora and not merged:
            return store.save(engine, folder, state=False, facts={"weights": adapter_digest(engine)})
        if engine.model.is_lora and engine.ranks.shards:
            raise CheckpointError(
                f"{folder}: an adapter on weights that are sharded over ranks cannot be merged; save the adapter, and merge it "
                "with cookbook weights export"
            )
        if kind == "delta" and predecessor not in (None, self._last and self._last.name):
            kind = "base"
        if engine.ranks.shards:
            self._save_gathered(engine, folder, kind)
        else:
            self._save_whole(engine, folder, kind, origin)
        self._last = folder
        return Checkpoint(str(folder), engine.step, kind)

    def save_adapted(self, engine: Engine, folder: Path) -> Checkpoint:
        """Write the weights under the adapter as a base. Later deltas do not apply to it.

        Raises:
            CheckpointError: the folder exists, or cannot be written.
        """
        with store.appearing(folder) as temporary:
            if engine.ranks.shards:
                digest = gathered.write_base(engine, temporary, folder, self._torch_dtype).digest
            else:
                network = full_network(engine.model, merged=False)
                digest = self._write_files(temporary, network, self._weights(network))
            # The weights are untrained, and get no model card.
            self._finish_base(engine, temporary, digest, None)
        return Checkpoint(str(folder), engine.step, "base")

    def _save_whole(self, engine: Engine, folder: Path, kind: str, origin: JsonObject | None) -> None:
        """Save weights that this process holds."""
        network = full_network(engine.model)
        now = self._weights(network)
        if kind == "delta":
            self._write_delta(engine, folder, now)
            return
        with store.appearing(folder) as temporary:
            self._finish_base(engine, temporary, self._write_files(temporary, network, now), origin or {})
        self._held = None

    def _save_gathered(self, engine: Engine, folder: Path, kind: str) -> None:
        """Save weights that are sharded over ranks."""
        before, last = self._version, self._last
        if kind == "delta":
            self._require_last(folder)
        # A save that fails may have replaced parts of the last version.
        self.forget()
        with store.appearing(folder) as temporary:
            if kind == "delta" and before is not None and last is not None:
                version = gathered.write_delta(engine, temporary, folder, self._torch_dtype, before)
                self._finish_delta(engine, temporary, version.digest, last, before.digest)
            else:
                version = gathered.write_base(engine, temporary, folder, self._torch_dtype)
                self._finish_base(engine, temporary, version.digest, {})
        self._version = version

    @property
    def _torch_dtype(self) -> torch.dtype | None:
        return DTYPES[self.dtype] if self.dtype else None

    def _weights(self, network: PreTrainedModel) -> Weights:
        return Weights.of(on_disk(network, self._torch_dtype))

    def _write_files(self, temporary: Path, network: PreTrainedModel, now: Weights) -> str:
        # The tensors already have their names on disk.
        network.save_pretrained(
            temporary, state_dict=dict(now.tensors), max_shard_size=gathered.FILE_BYTES, save_original_format=False
        )
        return now.digest

    def _finish_base(self, engine: Engine, temporary: Path, digest: str, origin: JsonObject | None) -> None:
        """Add all files but the weights. ``origin`` as in :meth:`save`; None: no model card."""
        stated = {**self._facts(engine, digest), "kind": "base"}
        if self.dtype is not None:
            # transformers writes the element type of the model, and not that of the tensors.
            config = temporary / "config.json"
            config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": self.dtype}, indent=2) + "\n")
        engine.model.tokenizer.save_pretrained(temporary)
        if origin is not None:
            card.write(temporary, stated | {key: origin[key] for key in ("run", "base_model") if key in origin})
            stated |= _kinds(origin)
        manifest.write(temporary, stated)

    def _write_delta(self, engine: Engine, folder: Path, now: Weights) -> None:
        last = self._require_last(folder)
        before = self._held or reconstruct(last)
        difference = delta.between(before, now)
        with store.appearing(folder) as temporary:
            (temporary / delta.FILE).write_bytes(delta.to_bytes(difference))
            self._finish_delta(engine, temporary, now.digest, last, before.digest)
        # Changed tensors are copied, because training continues in the same memory.
        same = {name for name, info in now.infos.items() if info == before.infos[name]}
        tensors = {name: before.tensors[name] if name in same else tensor.clone() for name, tensor in now.tensors.items()}
        self._held = Weights(tensors, now.infos)

    def _finish_delta(self, engine: Engine, temporary: Path, digest: str, last: Path, applies_to: str) -> None:
        chained = {"kind": "delta", "predecessor": last.name, "applies_to": applies_to}
        manifest.write(temporary, {**self._facts(engine, digest), **chained})

    def _require_last(self, folder: Path) -> Path:
        """Return the last checkpoint. Raises CheckpointError: it is gone."""
        if self._last is None or not self._last.is_dir():
            gone = f" ({self._last} is gone)" if self._last else ""
            raise CheckpointError(f"{folder}: a delta needs a checkpoint before it{gone}; write a base first")
        return self._last

    def _facts(self, engine: Engine, digest: str) -> JsonObject:
        config = engine.model.config
        own = {"step": engine.step, "base_model": config.name, "dtype": self.dtype or config.dtype, "lora": False}
        return {**own, "weights": digest}


def on_disk(network: PreTrainedModel, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Tensors of a Hugging Face module under the names, and in the parts, that ``save_pretrained`` writes; tied ones once.

    Tensors that need no conversion are the module's own memory.
    """
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    unsaved = network._keys_to_ignore_on_save or ()
    own = {name: tensor for name, tensor in network.state_dict().items() if name not in unsaved}
    tensors = revert_weight_conversion(network, remove_tied_weights_from_state_dict(own, network))
    return {name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None) for name, tensor in tensors.items()}


@led
def adapter_digest(engine: Engine) -> str:
    """Digest of an adapter's weights, under the names in its file."""
    from peft import get_peft_model_state_dict

    tensors = get_peft_model_state_dict(engine.model.network, save_embedding_layers=False)
    return Weights.of({name: engine.ranks.whole(tensor) for name, tensor in tensors.items()}).digest


# ---- reading ---------------------------------------------------------------------------------------------------------


def lineage(folder: Path) -> list[Path]:
    """List the base of ``folder``, the deltas after the base, and ``folder`` at the end.

    Raises:
        CheckpointError: a predecessor is missing, or is not a sampler checkpoint.
    """
    line = [folder]
    while (facts := manifest.read(line[-1]))["kind"] == "delta":
        before = store.named(line[-1].parent, facts["predecessor"])
        if before in line or not before.is_dir():
            problem = "is a delta of it as well" if before in line else "is missing"
            raise CheckpointError(f"{line[-1]}: is a delta of {before}, which {problem}; use another checkpoint")
        line.append(before)
    if "weights" not in facts:
        raise CheckpointError(f"{line[-1]}: is not a checkpoint to sample from; use one of save_weights_for_sampler_ext")
    return line[::-1]


def reconstruct(folder: Path, known: tuple[Path, Weights] | None = None) -> Weights:
    """Return the weights of a base or a delta. Every file, every delta and the result are verified.

    Args:
        known: a checkpoint with its weights; if it is in the lineage of ``folder``, its predecessors are not read.

    Raises:
        CheckpointError: a checkpoint of the lineage is missing or damaged.
    """
    line = lineage(folder)
    if known is not None and known[0] in line:
        base, result = known
    else:
        base, result = line[0], tensor_digests.read(line[0])
        _must_be(base, result, manifest.verify(base))
    for step in line[line.index(base) + 1 :]:
        facts = manifest.verify(step)
        result = delta.apply(delta.from_bytes((step / delta.FILE).read_bytes(), str(step / delta.FILE)), result)
        _must_be(step, result, facts)
    return result


def _must_be(folder: Path, result: Weights, facts: JsonObject) -> None:
    if result.digest != facts.get("weights"):
        raise CheckpointError(f"{folder}: holds other weights than its manifest says; use another checkpoint")


def export(folder: Path, out: Path, *, merged: bool = False) -> Checkpoint:
    """Write the weights of a checkpoint as a base, an ordinary Hugging Face folder ``out``.

    A delta becomes full weights. The optimizer of a training checkpoint is omitted. An adapter stays an adapter, or
    (``merged``) is merged into the model it was trained on.

    Raises:
        CheckpointError: a checkpoint of the lineage is missing or damaged, ``out`` exists, or that model has changed.
    """
    facts = manifest.read(folder)
    if facts.get("lora") and merged:
        return _merge(folder, out, manifest.verify(folder))
    if facts["kind"] == "delta":
        base, full = lineage(folder)[0], reconstruct(folder)
    else:
        base, full = folder, None
        manifest.verify(folder)
    with store.appearing(out) as temporary:
        # The optimizer of a training checkpoint is in a folder, which is skipped.
        for path in filter(Path.is_file, base.iterdir()):
            if full is not None and path.match(tensor_digests.FILES):
                names = [name for name, _ in tensor_digests.tensors_in(path)]
                save_file({name: full.tensors[name] for name in names}, temporary / path.name, metadata={"format": "pt"})
            elif path.name != manifest.NAME:
                # Without the mode: the card of a write-protected checkpoint is replaced below.
                shutil.copyfile(path, temporary / path.name)
        if (base / CHAT_TEMPLATES).is_dir():
            shutil.copytree(base / CHAT_TEMPLATES, temporary / CHAT_TEMPLATES)
        facts_of_base = {
            key: facts[key] for key in ("step", "base_model", "dtype", "lora", "quantize", "weights") if key in facts
        }
        card.write(temporary, {**facts, "kind": "base"})
        manifest.write(temporary, {**facts_of_base, **_kinds(facts), "kind": "base"})
    return Checkpoint(str(out), facts["step"], "base")


def _kinds(facts: JsonObject) -> JsonObject:
    """Return the kinds of rows that a checkpoint was trained on, as an entry of the manifest of an export of it."""
    kinds = manifest.trained_on(facts)
    return {"trained_on": kinds} if kinds else {}


def _merge(folder: Path, out: Path, facts: JsonObject) -> Checkpoint:
    model = load_model(ModelConfig(str(folder), dtype=facts["dtype"]), torch.device("cpu"), seed=0)
    trained_on = facts.get("run", {}).get("identity", {}).get("measured", {}).get("weights")
    if trained_on not in (None, snapshots.digests(model)["weights"]):
        raise CheckpointError(
            f"{folder}: its adapter was trained on other weights than {facts['base_model']} holds; restore those, or export "
            "the adapter without --merged"
        )
    engine = Engine(model, EngineOptions())
    engine.step = facts["step"]
    return SamplerCheckpoints().save(engine, out, "base", merged=True, origin=facts)


def load(engine: Engine, folder: Path, *, optimizer: bool) -> None:
    """Load a checkpoint, which may be a delta, with :func:`cookbook.checkpoints.store.load`.

    Raises:
        CheckpointError: the checkpoint or one of its lineage is missing or damaged, or is of another model.
    """
    if manifest.read(folder)["kind"] != "delta":
        store.load(engine, folder, optimizer=optimizer)
        return
    with tempfile.TemporaryDirectory() as temporary:
        store.load(engine, Path(export(folder, Path(temporary) / folder.name).path), optimizer=optimizer)


def full_network(model: LanguageModel, *, merged: bool = True) -> PreTrainedModel:
    """Return the Hugging Face module with the adapter merged into its weights, or (``merged`` false) without the adapter.

    Weights without an adapter share the model's memory.
    """
    if not model.is_lora:
        return model.network
    own = {id(parameter) for parameter in _adapted(model.network)} if merged else set()
    tensors = [*model.network.parameters(), *model.network.buffers()]
    network = copy.deepcopy(model.network, {id(tensor): tensor for tensor in tensors if id(tensor) not in own})
    # An adapter is merged into the weights that it was trained on.
    quantized.uninstall(network)
    if not merged:
        return network.unload()
    if unties(model):
        _untie(network.get_base_model())
    return network.merge_and_unload()


def unties(model: LanguageModel) -> bool:
    """Whether merging the adapter unties tied embeddings, because only one of the two has an adapter."""
    network = model.network.get_base_model()
    ends = (network.get_input_embeddings(), network.get_output_embeddings())
    return bool(network.config.tie_word_embeddings) and any(hasattr(end, "base_layer") for end in ends)


def _adapted(network: PeftModel) -> Iterator[torch.nn.Parameter]:
    from peft.tuners.lora.layer import LoraLayer
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer

    for module in network.modules():
        if isinstance(module, LoraLayer | TrainableTokensLayer):
            yield from module.get_base_layer().parameters()


def _untie(network: PreTrainedModel) -> None:
    head = network.get_output_embeddings()
    head = getattr(head, "base_layer", head)
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    network.config = copy.deepcopy(network.config)
    network.config.tie_word_embeddings = False
