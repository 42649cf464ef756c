"""What a checkpoint holds of a model in training: how it gets into a folder, and back into an engine.

Where several ranks train one model, every one of them makes these calls.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cookbook.checkpoints import ranks, sharded
from cookbook.engine.model import LORA_FILE, LanguageModel
from cookbook.engine.optimizer import Optimizer
from cookbook.errors import CheckpointError


def write_model(model: LanguageModel, folder: Path, shard_bytes: int) -> None:
    """The model or its adapter, in the files of transformers or PEFT, and the tokenizer; the first rank writes them."""
    parts = folder / "parts"
    if ranks.several():  # nobody holds the whole; it comes together on the disk
        sharded.save(_tensors(model), parts, shard_bytes)
    # PEFT would otherwise ask the hub whether the embeddings were resized. They never are.
    options: dict[str, Any] = {"save_embedding_layers": False} if model.is_lora else {"max_shard_size": shard_bytes}

    def write() -> None:
        if parts.is_dir():
            options["state_dict"] = sharded.read(parts)
            shutil.rmtree(parts)
        model.network.save_pretrained(folder, **options)
        model.tokenizer.save_pretrained(folder)

    ranks.on_first(write)


def _tensors(model: LanguageModel) -> dict[str, Tensor]:
    """What a checkpoint holds of a model, under its names in memory; tied ones once."""
    if model.is_lora:
        return {name: parameter.detach() for name, parameter in model.trainable()}
    network = model.network
    once, all_names = ({name for name, _ in network.named_parameters(remove_duplicate=only)} for only in (True, False))
    left_out = {*(network._keys_to_ignore_on_save or ()), *(all_names - once)}
    return {name: tensor for name, tensor in network.state_dict().items() if name not in left_out}


def write_optimizer(state: Mapping[str, Tensor], folder: Path, shard_bytes: int) -> None:
    """Moments, step counts and float32 masters, of every rank its own part."""
    sharded.save(state, folder, shard_bytes)


def load_model(model: LanguageModel, folder: Path) -> None:
    """The inverse of :func:`write_model`, into the model's own memory.

    Raises:
        CheckpointError: it is of another model; nothing has changed.
    """
    if model.is_lora:
        _load_adapter(model.network, folder)
        return
    own = _tensors(model)
    if own.keys() == sharded.saved(folder).keys() and _written_as_they_are(model.network, own):
        _must_fit(folder, own, sharded.saved(folder))
        sharded.load(own, folder)
    else:
        _load_converted(model, folder)


def _written_as_they_are(network: Any, own: Mapping[str, Tensor]) -> bool:
    """Whether transformers writes this architecture's tensors neither under other names nor in other parts than it holds."""
    from transformers.core_model_loading import revert_weight_conversion

    written = revert_weight_conversion(network, dict(own))
    return all(written.get(name) is tensor for name, tensor in own.items())


def _load_converted(model: LanguageModel, folder: Path) -> None:
    """Through transformers, which knows how to put together what it took apart."""
    from transformers import AutoModelForCausalLM

    trust = model.config.trust_remote_code
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=model.network.dtype, trust_remote_code=trust).state_dict()
    _must_fit(folder, model.network.state_dict(), saved)
    model.network.load_state_dict(saved)


def _load_adapter(network: Any, folder: Path) -> None:
    from peft import get_peft_model_state_dict

    own = get_peft_model_state_dict(network, save_embedding_layers=False)
    _must_fit(folder, own, sharded.saved(folder))
    alpha = network.peft_config["default"].lora_alpha
    saved_alpha = json.loads((folder / LORA_FILE).read_text())["lora_alpha"]
    if alpha != saved_alpha:
        raise CheckpointError(f"{folder}: was made with lora_alpha={saved_alpha}, got {alpha}; set model.lora_alpha to match")
    sharded.load(own, folder)


def load_optimizer(optimizer: Optimizer, folder: Path) -> None:
    """The inverse of :func:`write_optimizer`; what belongs to no parameter of this model is passed over."""
    masters = dict(zip(optimizer.names, optimizer.masters, strict=True))
    found = {}
    for name, saved in sharded.saved(folder).items():
        key, _, parameter = name.partition(".")
        if parameter in masters:
            found[name] = _room(key, saved, masters[parameter].detach())
    sharded.load(found, folder)
    optimizer.load_state(found)


def _room(key: str, saved: sharded.Saved, master: Tensor) -> Tensor:
    """Memory for a tensor of the optimizer's: where the master is, and of a sharded one as much as this rank has of it."""
    if key == "master":
        return master
    if saved.shape == master.shape:
        return torch.empty_like(master, dtype=saved.dtype)
    return torch.empty(saved.shape, dtype=saved.dtype)  # the count of its steps


def _must_fit(folder: Path, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Before anything is overwritten: names and shapes are the same."""
    own_shapes, saved_shapes = ({(name, tuple(tensor.shape)) for name, tensor in one.items()} for one in (own, saved))
    if others := own_shapes ^ saved_shapes:
        name, shape = min(others)
        raise CheckpointError(
            f"{folder}: is of another model ({name} of shape {shape} is in one of them only); use the model it was made from"
        )
