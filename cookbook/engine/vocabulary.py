"""Added tokens: entries of the tokenizer, and rows of the input and output embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import nn

from cookbook.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def check_tokens(tokens: Sequence[str]) -> None:
    """Raise ConfigError unless ``model.add_tokens`` is a list of different texts."""
    if isinstance(tokens, str) or not all(isinstance(token, str) and token for token in tokens):
        raise ConfigError(
            f"model.add_tokens: expected a list of texts, got {tokens!r}; write model.add_tokens=['<first>','<second>']"
        )
    if len(set(tokens)) < len(tokens):
        raise ConfigError(f"model.add_tokens: a token occurs twice, got {list(tokens)!r}; name each token once")


def extend(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> list[int]:
    """Add tokens that the tokenizer lacks, and return the ids of those.

    The tokens are not special: they stay in decoded text, so that a reward can read them.
    """
    from tokenizers import AddedToken

    known = tokenizer.get_vocab()
    fresh = [token for token in tokens if token not in known]
    # Without normalization, a token is found in the text exactly as it is written.
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in fresh])
    return [int(tokenizer.convert_tokens_to_ids(token)) for token in fresh]


@torch.no_grad()
def resize(network: PreTrainedModel, num_tokens: int, fresh: Sequence[int] = ()) -> None:
    """Give every token id below ``num_tokens`` a row of the embeddings. Rows are only added, never removed.

    Args:
        fresh: ids of added tokens, which may lie in rows that the model has in reserve. Their rows, and new ones, begin as the
            mean of the other tokens' rows: about the logit of an average token, so that the model's predictions hardly change.
    """
    rows = int(network.get_input_embeddings().weight.shape[0])
    added = sorted({*fresh, *range(rows, num_tokens)})
    if not added:
        return
    if num_tokens > rows:
        network.resize_token_embeddings(num_tokens, mean_resizing=False)
    # Rows in reserve after the added ones are untrained too.
    count = min(added)
    layers = [network.get_input_embeddings(), network.get_output_embeddings()]
    weights = {id(layer.weight): layer.weight for layer in layers if layer is not None}
    biases = [layer.bias for layer in layers if getattr(layer, "bias", None) is not None]
    for parameter in [*weights.values(), *biases]:
        parameter[added] = parameter[:count].float().mean(0).to(parameter.dtype)


def trainable_rows(network: PreTrainedModel, ids: Sequence[int]) -> dict[str, list[int]] | None:
    """Return PEFT's ``trainable_token_indices``: the rows to train of the input and of an untied output embedding.

    Raises:
        ConfigError: the output layer has a bias, which PEFT leaves out next to trained rows.
    """
    if not ids:
        return None
    head = network.get_output_embeddings()
    if isinstance(head, nn.Linear) and head.bias is not None:
        raise ConfigError(
            f"model.add_tokens: PEFT cannot train rows of an output layer with a bias, as {type(network).__name__} has; set "
            "model.lora_rank=0"
        )
    embedding = network.get_input_embeddings()
    layers = [embedding] if head is None or head.weight is embedding.weight else [embedding, head]
    names = {id(module): name for name, module in network.named_modules()}
    return {names[id(layer)]: list(ids) for layer in layers}


@torch.no_grad()
def begin_rows(network: nn.Module, tokens: Sequence[int]) -> None:
    """Let an adapter's rows of tokens that the model has in reserve begin as the mean of the rows before them."""
    for module in network.modules() if tokens else ():
        for name, rows in dict(getattr(module, "trainable_tokens_delta", {})).items():
            weight: torch.Tensor = module.get_base_layer().weight  # type: ignore[operator]
            mean = weight[: min(tokens)].float().mean(0).to(rows.dtype)
            places = [place for place, token in enumerate(module.token_indices[name]) if token in tokens]  # type: ignore[index]
            rows[places] = mean


def stored_rows(adapter: Path, network: PreTrainedModel) -> int | None:
    """Return the number of rows of the embeddings for which an adapter was made; None if its file does not show the number.

    The file shows it if it holds the embeddings, or factors of them. Other programs resize to a multiple of 64, or leave
    tokens without a row.
    """
    path = adapter / "adapter_model.safetensors"
    if not path.is_file():
        return None
    names = {name.rpartition(".")[2] for name in embedding_names(network)}
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - `file` is not iterable
            for suffix, axis in ((".weight", 0), (".base_layer.weight", 0), (".lora_embedding_A", 1), (".lora_B.weight", 0)):
                if any(key.endswith(f".{name}{suffix}") for name in names):
                    return int(file.get_slice(key).get_shape()[axis])
    return None


def embedding_names(network: PreTrainedModel) -> list[str]:
    """Return the names of the input and the output embedding."""
    layers = [network.get_input_embeddings(), network.get_output_embeddings()]
    return [name for name, module in network.named_modules() if any(module is layer for layer in layers)]
