"""Contents of a training checkpoint: model and optimizer, from an engine to a folder and back.

If several ranks train one model, every rank makes these calls.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cookbook.checkpoints import ranks, sharded
from cookbook.checkpoints.snapshots import saved_tensors
from cookbook.engine.model import LORA_FILE, LanguageModel
from cookbook.engine.optimizer import Optimizer
from cookbook.errors import CheckpointError

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def write_model(model: LanguageModel, folder: Path, shard_bytes: int) -> None:
    """Write the model or its adapter in the format of transformers or PEFT, and the tokenizer. The first rank writes."""
    parts = folder / "parts"
    # No rank holds the whole model, so the ranks write parts, which the first rank joins.
    if ranks.several():
        sharded.save(saved_tensors(model), parts, shard_bytes)
    # PEFT would otherwise ask the hub whether the embeddings were resized.
    options: dict[str, Any] = (
        {"save_embedding_layers": model.saves_embeddings} if model.is_lora else {"max_shard_size": shard_bytes}
    )

    def write() -> None:
        if parts.is_dir():
            options["state_dict"] = sharded.read(parts)
            shutil.rmtree(parts)
        model.network.save_pretrained(folder, **options)
        model.tokenizer.save_pretrained(folder)
        # PEFT writes no generation config, which has the stop tokens.
        if model.is_lora and (generation := getattr(model.network.get_base_model(), "generation_config", None)) is not None:
            generation.save_pretrained(folder)

    ranks.on_first(write)


def load_model(model: LanguageModel, folder: Path) -> None:
    """Load what :func:`write_model` wrote, into the model's own memory.

    Raises:
        CheckpointError: the checkpoint is of another model; nothing was changed.
    """
    if model.is_lora:
        _load_adapter(model, folder)
        return
    own = saved_tensors(model)
    if own.keys() == sharded.saved(folder).keys() and _are_written_unchanged(model.network, own):
        _must_fit(folder, own, sharded.saved(folder))
        sharded.load(own, folder)
    else:
        _load_converted(model, folder)


def _are_written_unchanged(network: PreTrainedModel, own: Mapping[str, Tensor]) -> bool:
    """Whether transformers writes the tensors of this architecture without renaming or splitting."""
    from transformers.core_model_loading import revert_weight_conversion

    written = revert_weight_conversion(network, dict(own))
    return all(written.get(name) is tensor for name, tensor in own.items())


def _load_converted(model: LanguageModel, folder: Path) -> None:
    """Load with transformers, which reverses its renaming and splitting of tensors."""
    from transformers import AutoModelForCausalLM

    trust = model.config.trust_remote_code
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=model.network.dtype, trust_remote_code=trust).state_dict()
    own = model.network.state_dict()
    _must_fit(folder, own, saved)
    if not model.ranks.shards:
        model.network.load_state_dict(saved)
        return
    with torch.no_grad():
        for name, tensor in own.items():
            model.ranks.fill(tensor, saved[name])


def _load_adapter(model: LanguageModel, folder: Path) -> None:
    from peft import get_peft_model_state_dict

    network: PeftModel = model.network
    own = get_peft_model_state_dict(network, save_embedding_layers=model.saves_embeddings)
    _must_fit(folder, own, sharded.saved(folder))
    alpha = network.peft_config["default"].lora_alpha
    saved_alpha = json.loads((folder / LORA_FILE).read_text())["lora_alpha"]
    if alpha != saved_alpha:
        raise CheckpointError(f"{folder}: was made with lora_alpha={saved_alpha}, got {alpha}; set model.lora_alpha to match")
    sharded.load(own, folder)


def load_optimizer(optimizer: Optimizer, folder: Path) -> None:
    """Load moments, step counts and float32 masters. State of parameters that this model lacks is ignored."""
    masters = dict(zip(optimizer.names, optimizer.masters, strict=True))
    state = {}
    for name, saved in sharded.saved(folder).items():
        key, _, parameter = name.partition(".")
        if parameter in masters:
            state[name] = _allocate(key, saved, masters[parameter].detach())
    sharded.load(state, folder)
    optimizer.load_state(state)


def _allocate(key: str, saved: Tensor, master: Tensor) -> Tensor:
    """Memory for a tensor of the optimizer's state: on the master's device, and sharded like the master."""
    if key == "master":
        return master
    if saved.shape == master.shape:
        return torch.empty_like(master, dtype=saved.dtype)
    # The number of steps of this parameter.
    return torch.empty_like(saved, device="cpu")


def _must_fit(folder: Path, own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError: names or shapes differ."""
    own_shapes, saved_shapes = ({(name, tuple(tensor.shape)) for name, tensor in tensors.items()} for tensors in (own, saved))
    if others := own_shapes ^ saved_shapes:
        name, shape = min(others)
        raise CheckpointError(
            f"{folder}: is of another model ({name} of shape {shape} is in one of them only); use the model it was made from"
        )
