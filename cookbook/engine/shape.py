"""Facts of a model that need no weights and no network: its shape, its tokenizer, and whether it can be loaded at all."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from cookbook.engine.model import (
    LORA_FILE,
    ModelConfig,
    context_length,
    fresh_network,
    load_tokenizer,
    recompute_activations,
    refuse_missing_folder,
)
from cookbook.errors import BackendError


@dataclass(frozen=True)
class Shape:
    """Facts of a model that need no weights. ``max_length`` is in tokens; None: no limit is known."""

    tokenizer: Any
    max_length: int | None


def shape_of(config: ModelConfig, *, recompute: bool = False) -> Shape | None:
    """Facts of the model that :func:`load` would load, or None if it is on the hub and not in the cache here.

    Reads no weights and asks no network. ``recompute``: as :func:`recompute_activations`.

    Raises:
        BackendError: the folder is missing, has no weights, or is not a causal language model.
        ConfigError: the adapter or the attention that ``config`` asks for is impossible.
    """
    refuse_missing_folder(config.name)
    here = local_folder(config)
    if here is None:
        return None
    local = replace(config, name=str(here), revision=None)
    tokenizer = load_tokenizer(local)
    base = _base(here)
    if base is not None and local_folder(ModelConfig(base)) is None:
        return Shape(tokenizer, context_length(None, tokenizer))
    try:
        with torch.device("meta"):
            network = fresh_network(local)
    except BackendError as error:
        # Some models' own code computes with numbers while it is built, which tensors without storage refuse.
        if isinstance(error.__context__, RuntimeError):
            return Shape(tokenizer, context_length(None, tokenizer))
        raise
    if not config.random and Path(config.name).is_dir() and base is None:
        _refuse_missing_weights(here)
    if recompute:
        recompute_activations(network, True)
    return Shape(tokenizer, context_length(network.config, tokenizer))


def local_folder(config: ModelConfig) -> Path | None:
    """The model's folder, or that of its copy in the hub's cache; None: it would have to be downloaded."""
    from huggingface_hub import snapshot_download

    if Path(config.name).is_dir():
        return Path(config.name)
    try:
        found = Path(snapshot_download(config.name, revision=config.revision, local_files_only=True))
    except (OSError, ValueError):
        return None
    needed = ("config.json", "tokenizer_config.json")  # a download that was stopped, or of one file alone, lacks them
    return found if all((found / name).is_file() for name in needed) else None


def num_parameters(config: ModelConfig) -> int | None:
    """Parameters of the model, roughly, by the numbers in its configuration; None if it is not here or does not say.

    Attention counts as four square matrices and each MLP as three, so the number is within a factor of two.
    """
    from transformers import AutoConfig

    here = local_folder(config)
    if here is not None and (base := _base(here)) is not None:
        here = local_folder(ModelConfig(base))
    if here is None:
        return None
    try:
        architecture = AutoConfig.from_pretrained(here, trust_remote_code=config.trust_remote_code).get_text_config()
        width, layers = int(architecture.hidden_size), int(architecture.num_hidden_layers)
        inner = int(getattr(architecture, "intermediate_size", None) or 4 * width)
        experts = int(getattr(architecture, "num_local_experts", None) or getattr(architecture, "num_experts", None) or 1)
        return int(architecture.vocab_size) * width + layers * (4 * width * width + 3 * width * inner * experts)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None


def is_adapter(config: ModelConfig) -> bool:
    """Whether a LoRA adapter is trained: a new one, or that of the folder."""
    return config.lora_rank > 0 or (Path(config.name) / LORA_FILE).is_file()


def _base(folder: Path) -> str | None:
    """Name of the model that an adapter's folder adapts; None: the folder holds no adapter."""
    file = folder / LORA_FILE
    return str(json.loads(file.read_text())["base_model_name_or_path"]) if file.is_file() else None


def _refuse_missing_weights(folder: Path) -> None:
    """Raises BackendError: a model's folder has no file of weights, or one whose beginning cannot be read."""
    files = [*folder.glob("*.safetensors")]
    if not files and not [*folder.glob("*.bin")]:
        raise BackendError(f"model.name: {str(folder)!r} has no weights; give a folder with *.safetensors files")
    for file in files:
        try:
            with safe_open(file, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            reason = str(error).partition("\n")[0]
            raise BackendError(f"model.name: cannot read {str(file)!r}: {reason}; save the model again") from None
