"""What lies under a LoRA adapter, and the sum of both: full weights, under the names they would have without PEFT."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from cookbook.engine.model import LanguageModel


def full_network(model: LanguageModel, *, merged: bool = True) -> Any:
    """The Hugging Face module with its adapter added to what it adapts, or (not ``merged``) as it is without one.

    What no adapter touches is the model's own memory, and so is everything of a model that has no adapter.
    """
    if not model.is_lora:
        return model.network
    own = {id(parameter) for parameter in _adapted(model.network)} if merged else set()
    tensors = [*model.network.parameters(), *model.network.buffers()]
    made = copy.deepcopy(model.network, {id(tensor): tensor for tensor in tensors if id(tensor) not in own})
    if not merged:
        return made.unload()
    if unties(model):
        _untie(made.get_base_model())
    return made.merge_and_unload()


def unties(model: LanguageModel) -> bool:
    """Whether tied embeddings are two tensors when the adapter has been added: it is on one side of the model only."""
    network = model.network.get_base_model()
    ends = (network.get_input_embeddings(), network.get_output_embeddings())
    return bool(network.config.tie_word_embeddings) and any(hasattr(end, "base_layer") for end in ends)


def _adapted(network: Any) -> Iterator[torch.nn.Parameter]:
    from peft.tuners.lora.layer import LoraLayer

    for module in network.modules():
        if isinstance(module, LoraLayer):
            yield from module.get_base_layer().parameters()


def _untie(network: Any) -> None:
    head = network.get_output_embeddings()
    head = getattr(head, "base_layer", head)
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    network.config = copy.deepcopy(network.config)
    network.config.tie_word_embeddings = False
