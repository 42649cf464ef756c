"""Checks before any weights are loaded: tokenizer, context length, number of parameters, and whether a model can be loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from cookbook.engine import quantized
from cookbook.engine.lora_targets import TrainedShare
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
from cookbook.utils import paths

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Shape:
    """Properties of a model that are known without its weights.

    ``max_length``: context length in tokens; None: unknown. ``weight_bytes``: size of the weights in memory; 0: unknown.
    ``trained``: which weights are trained; None: unknown. ``vocabulary_size``: number of embeddings; None: unknown.
    ``kv_numbers``: upper bound of the numbers that all layers together cache per token, as keys and values; 0: unknown.
    ``dtype``: element type of the weights, such as ``float32``.
    """

    tokenizer: PreTrainedTokenizerBase
    max_length: int | None
    weight_bytes: int = 0
    trained: TrainedShare | None = None
    vocabulary_size: int | None = None
    kv_numbers: int = 0
    dtype: str = "float32"


def shape_of(config: ModelConfig, *, recompute: bool = False) -> Shape | None:
    """Return properties of the model that ``load`` would load; None if the model would have to be downloaded first.

    Reads no weights and makes no network request. ``recompute``: also check that the model supports activation checkpointing.

    Raises:
        BackendError: the folder is missing, has no weights, or is not a causal language model.
        ConfigError: the model does not support the adapter, the attention or the checkpointing that is configured.
    """
    refuse_missing_folder(config.name)
    folder = local_folder(config)
    if folder is None:
        return None
    local = replace(config, name=str(folder), revision=None)
    tokenizer = load_tokenizer(local)
    base = _base(folder)
    if base is not None and local_folder(ModelConfig(base)) is None:
        return Shape(tokenizer, context_length(None, tokenizer))
    try:
        with torch.device("meta"):
            network = fresh_network(local)
    except BackendError as error:
        # The constructors of some models read tensor values, which raises RuntimeError on the meta device.
        if isinstance(error.__context__, RuntimeError):
            return Shape(tokenizer, context_length(None, tokenizer))
        raise
    if not config.random and Path(config.name).is_dir() and base is None:
        _refuse_missing_weights(folder)
    if recompute:
        recompute_activations(network, True)
    weight_bytes = quantized.weight_bytes(network)
    limit, rows = context_length(network.config, tokenizer), int(network.config.get_text_config().vocab_size)
    dtype = str(network.dtype).removeprefix("torch.")
    return Shape(tokenizer, limit, weight_bytes, TrainedShare.of(network), rows, kv_numbers(network.config), dtype)


def kv_numbers(architecture: PreTrainedConfig) -> int:
    """Return how many numbers the layers together cache per token, as keys and values; 0: unknown.

    An upper bound: a layer with a sliding window counts as one that keeps every token. Latent attention (DeepSeek) caches one
    compressed vector per layer. Recurrent layers cache nothing per token.
    """
    text = architecture.get_text_config()
    kinds = getattr(text, "layer_types", None)
    layers = int(text.num_hidden_layers) if not kinds else sum("linear" not in kind and "mamba" not in kind for kind in kinds)
    if rank := getattr(text, "kv_lora_rank", None):
        return layers * (int(rank) + int(getattr(text, "qk_rope_head_dim", 0)))
    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        return 0
    width = getattr(text, "head_dim", None) or int(text.hidden_size) // int(heads)
    return layers * 2 * int(width) * int(getattr(text, "num_key_value_heads", None) or heads)


def local_folder(config: ModelConfig) -> Path | None:
    """Return the model's folder, or its snapshot in the cache of the hub; None if the model would have to be downloaded."""
    from huggingface_hub import snapshot_download

    if Path(config.name).is_dir():
        return Path(config.name)
    try:
        folder = Path(snapshot_download(config.name, revision=config.revision, local_files_only=True))
    except (OSError, ValueError):
        return None
    # Missing in an incomplete download, or if only a single file was downloaded.
    needed = ("config.json", "tokenizer_config.json")
    return folder if all((folder / name).is_file() for name in needed) else None


def num_parameters(config: ModelConfig) -> int | None:
    """Estimate the number of parameters from the model's configuration; None if that is not local or lacks the sizes.

    Attention counts as four ``(H, H)`` matrices and each MLP as three ``(H, F)``, so the estimate is within a factor of two.
    """
    from transformers import AutoConfig

    folder = local_folder(config)
    if folder is not None and (base := _base(folder)) is not None:
        folder = local_folder(ModelConfig(base))
    if folder is None:
        return None
    try:
        architecture = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code).get_text_config()
        width, layers = int(architecture.hidden_size), int(architecture.num_hidden_layers)
        inner = int(getattr(architecture, "intermediate_size", None) or 4 * width)
        experts = int(getattr(architecture, "num_local_experts", None) or getattr(architecture, "num_experts", None) or 1)
        return int(architecture.vocab_size) * width + layers * (4 * width * width + 3 * width * inner * experts)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None


def is_adapter(config: ModelConfig) -> bool:
    """Whether a LoRA adapter is trained: a new adapter, or one loaded from the model's folder."""
    return config.lora_rank > 0 or paths.holds_adapter(config.name)


def _base(folder: Path) -> str | None:
    """Return the name of an adapter's base model; None if the folder holds no adapter."""
    file = folder / LORA_FILE
    return str(json.loads(file.read_text())["base_model_name_or_path"]) if file.is_file() else None


def _refuse_missing_weights(folder: Path) -> None:
    """Raise BackendError if a model's folder has no weights, or a safetensors file with an unreadable header."""
    files = [*folder.glob("*.safetensors")]
    if not files and not [*folder.glob("*.bin")]:
        raise BackendError(f"model.name: {str(folder)!r} has no weights; give a folder with *.safetensors files")
    for file in files:
        try:
            with safe_open(file, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            reason = str(error).partition("\n")[0]
            raise BackendError(f"model.name: cannot read {str(file)!r}: {reason}; save or download the model again") from None
