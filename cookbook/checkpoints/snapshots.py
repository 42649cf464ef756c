"""Copies of an engine and of its state, and digests that identify a model."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from cookbook.checkpoints import tensor_digests
from cookbook.checkpoints.tensor_digests import tensor_info
from cookbook.engine import quantized
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.loss_gradient import LossFunction
from cookbook.engine.model import LanguageModel, network_copy
from cookbook.engine.parallel import Ranks, led
from cookbook.engine.ranks.commands import PerRank
from cookbook.types import Datum, ForwardBackwardOutput

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@led
def frozen(engine: Engine) -> Engine:
    """Return an engine on a copy of the trained weights, on the same device. Weights under an adapter are shared.

    A copy of sharded weights computes logprobs only. Parameters of the copy stay marked as trainable: torch multiplies by those
    in another order, and the copy must answer as the original does, bit for bit.
    """
    if engine.ranks.shards:
        return FrozenShards(engine)
    network = engine.model.network
    shared = {id(tensor): tensor for tensor in _constants(engine.model)}
    return Engine(_with(engine.model, network_copy(network, shared)), engine.options)


class FrozenShards(Engine):
    """An engine on a copy of this rank's parts, which take the place of the originals during a call.

    FSDP2 cannot copy a module. Swapping the parts costs less than a thousandth of a pass.
    """

    def __init__(self, engine: Engine) -> None:
        self.__dict__.update(engine.__dict__)
        parts = [engine.ranks.local(parameter.detach()) for _, parameter in engine.model.trainable()]
        self._parts = [(part, part.clone()) for part in parts]

    @led
    def forward(
        self, data: Sequence[Datum], loss: LossFunction | None = None, *, adapter: bool = True
    ) -> ForwardBackwardOutput:
        self._exchange()
        try:
            return super().forward(data, loss, adapter=adapter)
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for part, shard in self._parts:
            between = part.clone()
            part.copy_(shard)
            shard.copy_(between)


@dataclass(frozen=True)
class OptimizerState:
    """A copy of an optimizer's state."""

    tensors: dict[str, torch.Tensor]

    def state(self) -> dict[str, torch.Tensor]:
        return self.tensors


@dataclass
class CopiedTensors(LanguageModel):
    """A model of which a checkpoint gets ``tensors`` in the place of the network's own."""

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Snapshot(PerRank):
    """A copy of an engine's state, in host memory. It cannot compute: its model may be on two devices."""

    model: LanguageModel
    options: EngineOptions
    optimizer: OptimizerState
    step: int

    @property
    def ranks(self) -> Ranks:
        """The ranks that write it, while they train the original."""
        return self.model.ranks.in_background


@led
def on_host(engine: Engine, tokenizer: PreTrainedTokenizerBase) -> Snapshot:
    """Copy everything that a checkpoint holds, to be saved while the original continues to train.

    Args:
        tokenizer: a copy of the model's tokenizer, which cannot be saved while another thread uses it.
    """
    if engine.ranks.shards:
        return _parts_on_host(engine, tokenizer)
    network = engine.model.network
    memo: dict[int, torch.Tensor] = {id(tensor): tensor for tensor in _constants(engine.model)}
    for parameter in network.parameters():
        if id(parameter) not in memo:
            data = parameter.detach().to("cpu", copy=True)
            memo[id(parameter)] = torch.nn.Parameter(data, parameter.requires_grad)
    model = _with(engine.model, copy.deepcopy(network, memo))
    model.tokenizer = tokenizer
    state = engine.optimizer.state()
    # In host memory, `state` is the optimizer's own memory.
    if engine.model.device.type == "cpu" or engine.options.optimizer_offload:
        state = {name: tensor.clone() for name, tensor in state.items()}
    return Snapshot(model, engine.options, OptimizerState(state), engine.step)


def _parts_on_host(engine: Engine, tokenizer: PreTrainedTokenizerBase) -> Snapshot:
    """Copy this rank's parts. FSDP2 cannot copy a module, and a checkpoint needs no more of it than its configuration."""
    tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in saved_tensors(engine.model).items()}
    own = engine.model
    model = CopiedTensors(own.network, tokenizer, own.config, own.device, own.lineage, own.ranks, tensors)
    state = {name: tensor.clone() for name, tensor in engine.optimizer.state().items()}
    return Snapshot(model, engine.options, OptimizerState(state), engine.step)


def saved_tensors(model: LanguageModel) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a checkpoint under their names in memory; tied ones once."""
    if isinstance(model, CopiedTensors):
        return model.tensors
    if model.is_lora:
        return {name: parameter.detach() for name, parameter in model.trainable()}
    return tensors_once(model.network)


def tensors_once(network: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors of a network that are saved, under their names in memory; tied ones once."""
    once, all_names = ({name for name, _ in network.named_parameters(remove_duplicate=only)} for only in (True, False))
    left_out = {*(network._keys_to_ignore_on_save or ()), *(all_names - once)}
    return {name: tensor for name, tensor in network.state_dict().items() if name not in left_out}


@led
def digests_of(engine: Engine) -> dict[str, str]:
    """Return digests of the model of an engine, as :func:`digests`, and the ``precision`` of its training passes."""
    return {**digests(engine.model), "precision": str(engine.options.precision)}


def digests(model: LanguageModel) -> dict[str, str]:
    """Return digests of a model as it was loaded: ``weights``, ``tokenizer``, ``chat_template``.

    The digest of the weights covers every element, but not a fresh adapter: that follows from the seed, and its rounding
    differs between devices.
    """
    named = {name: tensor.detach() for name, tensor in model.network.named_parameters() if not is_adapters(name)}
    named |= {
        f"{path}.{name}": buffer for path, layer in quantized.layers(model.network) for name, buffer in layer.named_buffers()
    }
    if model.ranks.shards:
        # A tensor at a time, and all ranks in step.
        infos = {name: tensor_info(model.ranks.whole(tensor).cpu().contiguous()) for name, tensor in named.items()}
    else:
        # Each tensor is copied from the device for itself: there may be no host memory for a copy of the whole model.
        infos = tensor_digests.in_parallel(lambda name: tensor_info(named[name].cpu().contiguous()), named)
    weights = tensor_digests.digest_of(infos)
    return {"weights": weights[:16], **tokenizer_digests(model.tokenizer)}


def is_adapters(name: str) -> bool:
    """Whether a parameter is part of an adapter: a LoRA factor, or the trained row of an added token."""
    return "lora_" in name or "trainable_tokens_" in name


def tokenizer_digests(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return digests of a tokenizer: ``tokenizer``, ``chat_template``."""
    spelling = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    texts = {"tokenizer": spelling, "chat_template": json.dumps(tokenizer.chat_template)}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}


def _constants(model: LanguageModel) -> list[torch.Tensor]:
    """Tensors that training does not change."""
    shared = [parameter for parameter in model.network.parameters() if not parameter.requires_grad]
    return [*shared, *model.network.buffers()] if model.is_lora else shared


def _with(model: LanguageModel, network: PreTrainedModel | PeftModel) -> LanguageModel:
    made = copy.copy(model)
    made.network = network
    return made
