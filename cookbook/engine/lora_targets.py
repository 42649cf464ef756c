"""The weights of a network that get a LoRA adapter, and how large their share is.

``all-linear`` means every matrix that a token is multiplied by: linear layers, and the experts of a mixture, which most
families store as one three-dimensional parameter. Routers and the output layer get no adapter: a router decides which weights
a token sees, so small changes of a router undo what the experts have learned.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from cookbook.engine import quantized
from cookbook.engine.quantized import QuantizedLinear

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"
ROUTERS = ("router", "shared_expert_gate")
# Names of a router that other layers have too; a router has as many outputs as there are experts.
MAYBE_ROUTERS = ("gate", "layer", "classifier")
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")


@dataclass(frozen=True)
class LoraTargets:
    """Targets in PEFT's terms: names of ``modules``, and of ``parameters`` of modules that are not linear layers."""

    modules: str | list[str]
    parameters: list[str]


def choose(network: PreTrainedModel, modules: str | Sequence[str], unfit: Sequence[str], lora: LoraConfig) -> LoraTargets:
    """Return the targets for ``model.lora_target_modules``.

    Args:
        unfit: names of linear layers that cannot have an adapter.
        lora: PEFT's configuration, whose conversion of old names the targets must survive.
    """
    if modules != ALL_LINEAR:
        return LoraTargets(modules, []) if isinstance(modules, str) else _named(network, modules)
    experts = sorted({_suffix(name) for name in expert_parameters(network)})
    routers = set(linear_routers(network))
    if not experts and not routers:
        return LoraTargets(ALL_LINEAR, [])
    head = network.get_output_embeddings()
    linear = {
        path: module
        for path, module in network.named_modules()
        if isinstance(module, nn.Linear) and module is not head and path.rpartition(".")[2] not in unfit
    }
    chosen = [path for path in linear if path not in routers]
    # The last part of a path names layers of every block, unless a router or the head has the same name.
    ambiguous = {path.rpartition(".")[2] for path in [*routers, *_paths_of(network, head)]}
    names = sorted({path if (leaf := path.rpartition(".")[2]) in ambiguous else leaf for path in chosen})
    unconverted = _unconverted(network, names, lora)
    # PEFT reads these names as those of fused experts. Their weights can be targeted as parameters, with the same result.
    converted = [name for name in names if name not in unconverted]
    return LoraTargets(unconverted, sorted({*experts, *(f"{name}.weight" for name in converted)}))


def _named(network: PreTrainedModel, names: Sequence[str]) -> LoraTargets:
    """Sort names into modules and parameters: ``q_proj`` is a module, ``experts.gate_up_proj`` a parameter."""
    paths = [path for path, _ in network.named_modules()]
    known = [name for name, _ in network.named_parameters()]
    parameters = [
        name
        for name in names
        if not any(_matches(path, name) for path in paths) and any(_matches(path, name) for path in known)
    ]
    return LoraTargets([name for name in names if name not in parameters], parameters)


def _matches(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def expert_parameters(network: nn.Module) -> Iterator[str]:
    """Yield the names of the parameters that hold the matrices of all experts of a layer."""
    for path, module in network.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) or not re.search("expert", f"{path}.{type(module).__name__}", re.I):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            # The experts of DBRX are two-dimensional, and its layers read them without calling the module that PEFT wraps.
            if parameter.ndim == 3 and "bias" not in name and "router" not in path:
                yield f"{path}.{name}"


def linear_routers(network: PreTrainedModel) -> Iterator[str]:
    """Yield the paths of linear layers that are routers."""
    config = network.config.get_text_config()
    counts = {getattr(config, name, None) for name in EXPERT_COUNTS} - {None}
    for path, module in network.named_modules():
        if isinstance(module, nn.Linear):
            parts = path.split(".")
            is_counted = parts[-1] in MAYBE_ROUTERS and module.out_features in counts
            if is_counted or any(part in ROUTERS for part in parts):
                yield path


def _paths_of(network: nn.Module, target: nn.Module | None) -> list[str]:
    return [path for path, module in network.named_modules() if module is target]


def _suffix(name: str) -> str:
    """Return the part of a parameter's name after the number of its layer; the whole name without a number."""
    return re.split(r"\.\d+\.", name)[-1]


def _unconverted(network: PreTrainedModel, names: list[str], lora: LoraConfig) -> list[str]:
    """Return the names that PEFT does not convert from the layer names of transformers 4, under which experts were modules."""
    try:  # a function that PEFT does not document
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers as convert
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return names
    unconverted = []
    for name in names:
        trial = copy.deepcopy(lora)
        trial.target_modules = {name}
        try:
            convert(trial, network, get_model_conversion_mapping(network))
        except ValueError:
            # One of several layers that PEFT expects to find fused.
            continue
        if name in (trial.target_modules or ()):
            unconverted.append(name)
    return unconverted


@dataclass(frozen=True)
class TrainedShare:
    """Numbers of weights: ``trained`` ones, those that an adapter acts on (``adapted``), and those of the base model."""

    trained: int
    adapted: int
    base: int
    layers: tuple[str, ...]
    idle: tuple[str, ...]

    @classmethod
    def of(cls, network: nn.Module) -> TrainedShare:
        """Count the weights of a network, with or without an adapter."""
        trained = adapted = base = 0
        layers, idle = set(), set()
        # Names of what an adapter acts on, by the id of the weight, or of the layer if its weights are quantized.
        wrapped = {}
        for path, module in network.named_modules():
            if not hasattr(module, "base_layer"):
                continue
            name = getattr(module, "parameter_name", "weight")
            innermost = module
            while hasattr(innermost, "base_layer"):
                innermost = innermost.base_layer
            if isinstance(innermost, QuantizedLinear):
                wrapped[id(innermost)] = _shown(path, None)
            elif (weight := getattr(innermost, name, None)) is not None:
                wrapped[id(weight)] = _shown(path, getattr(module, "parameter_name", None))
        for path, parameter in network.named_parameters():
            if parameter.requires_grad:
                trained += parameter.numel()
            if ".lora_" in path or "trainable_tokens_" in path:
                continue
            base += parameter.numel()
            if id(parameter) in wrapped:
                adapted += parameter.numel()
                layers.add(wrapped[id(parameter)])
            elif parameter.ndim > 1:
                idle.add(_shown(path.removesuffix(".weight"), None))
        for path, layer in quantized.layers(network):
            base += layer.num_weights
            if id(layer) in wrapped:
                adapted += layer.num_weights
                layers.add(wrapped[id(layer)])
            else:
                idle.add(_shown(path, None))
        return cls(trained, adapted, base, tuple(sorted(layers)), tuple(sorted(idle)))

    @property
    def short(self) -> str:
        """A few words: ``1.20% of 134,515,008 weights``."""
        share = "all" if self.trained == self.base else f"{self.trained / self.base:.2%} of"
        return f"{share} {self.base:,} weights"

    @property
    def text(self) -> str:
        """One line: ``12,288 weights on q_proj, v_proj, ..., which hold 97.0% of the model's 2,000,000``."""
        if self.trained == self.base:
            return f"{self.trained:,} weights, 100% of the model's"
        share = f"{self.trained:,} weights ({self.trained / self.base:.2%} of the model's {self.base:,})"
        if not self.layers:
            return share
        idle = f"; unchanged: {', '.join(self.idle)}" if self.idle else ""
        return f"{share} on {', '.join(self.layers)}, which hold {self.adapted / self.base:.1%} of them{idle}"


def _shown(path: str, parameter: str | None) -> str:
    """Return a short name: the last part of the path, or of experts the parameter's name after it."""
    parts = [part for part in path.split(".") if part not in ("base_layer", "default") and not part.isdigit()]
    leaf = parts[-1] if parts else path
    if parameter is None:
        return ".".join(parts[-2:]) if leaf in ("gate_up_proj", "down_proj") and "experts" in parts[-2:] else leaf
    return leaf if parameter == "weight" and "expert" not in leaf else f"{leaf}.{parameter}"
