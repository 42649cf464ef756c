"""Copies of an engine or of what it holds, and the digests that tell one model from another."""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch

from cookbook.checkpoints import weights
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.model import LanguageModel
from cookbook.engine.shared import network_copy


def frozen(engine: Engine) -> Engine:
    """An engine on a copy of what is trained, where it is. What an adapter lies on never changes, and is shared.

    Parameters stay marked as trainable: torch multiplies by those in another order, and the copy is to answer bit by bit as the
    original does.
    """
    network = engine.model.network
    shared = {id(tensor): tensor for tensor in _never_changing(engine.model)}
    return Engine(_with(engine.model, network_copy(network, shared)), engine.options)


@dataclass(frozen=True)
class Remembered:
    """What an optimizer remembered."""

    tensors: dict[str, torch.Tensor]

    def state(self) -> dict[str, torch.Tensor]:
        return self.tensors


@dataclass(frozen=True)
class Snapshot:
    """What an engine held, in host memory. It computes nothing: its model may lie on two devices."""

    model: LanguageModel
    options: EngineOptions
    optimizer: Remembered
    step: int


def on_host(engine: Engine, tokenizer: Any) -> Snapshot:
    """A copy of all that a checkpoint holds, to be saved while the original trains on.

    Args:
        tokenizer: one of its own: a tokenizer cannot be saved while another thread uses it.
    """
    network = engine.model.network
    memo: dict[int, Any] = {id(tensor): tensor for tensor in _never_changing(engine.model)}
    for parameter in network.parameters():
        if id(parameter) not in memo:
            data = parameter.detach().to("cpu", copy=True)
            memo[id(parameter)] = torch.nn.Parameter(data, parameter.requires_grad)
    model = _with(engine.model, copy.deepcopy(network, memo))
    model.tokenizer = tokenizer
    state = engine.optimizer.state()
    if engine.model.device.type == "cpu":  # then it is the original's own memory
        state = {name: tensor.clone() for name, tensor in state.items()}
    return Snapshot(model, engine.options, Remembered(state), engine.step)


def digests(model: LanguageModel) -> dict[str, str]:
    """What tells a model as it was loaded from another one of the same name: ``weights``, ``tokenizer``, ``chat_template``.

    Every element of the weights counts. A fresh adapter does not: it follows from the seed, and differs in rounding between
    devices.
    """
    named = {name: one.detach() for name, one in model.network.named_parameters() if "lora_" not in name}
    sizes = [tensor.nbytes for tensor in named.values()]
    facts = weights.in_parallel(lambda tensor: weights.fact(tensor.cpu().contiguous()), named.values(), sizes)
    return {"weights": weights.digest_of(dict(zip(named, facts, strict=True)))[:16], **tokenizer_digests(model.tokenizer)}


def tokenizer_digests(tokenizer: Any) -> dict[str, str]:
    """What tells a tokenizer from another one of the same name: ``tokenizer``, ``chat_template``."""
    spelling = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    texts = {"tokenizer": spelling, "chat_template": json.dumps(tokenizer.chat_template)}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}


def _never_changing(model: LanguageModel) -> list[torch.Tensor]:
    shared = [parameter for parameter in model.network.parameters() if not parameter.requires_grad]
    return [*shared, *model.network.buffers()] if model.is_lora else shared


def _with(model: LanguageModel, network: Any) -> LanguageModel:
    made = copy.copy(model)
    made.network = network
    return made
