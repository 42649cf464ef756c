"""Frozen linear layers whose weights have 4 or 8 bits, under LoRA adapters (QLoRA, arXiv:2305.14314).

bitsandbytes packs and unpacks 4-bit weights; it has kernels for CPUs and GPUs. Products multiply by the dequantized weights, in
the dtype of the input. Autograd saves no weights: the backward pass dequantizes them again. So a quantized layer computes what
a layer with the dequantized weights computes, and that is the layer into which an adapter is merged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cookbook.errors import ConfigError
from cookbook.utils.freed_memory import return_freed_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NF4, INT8, NONE = "nf4", "int8", "none"
SCHEMES = (NF4, INT8, NONE)
# Weights of a row that share one scale, as in the paper.
BLOCK = 64


class QuantizedLinear(nn.Linear):
    """A frozen linear layer with quantized weights.

    ``weight`` is the matrix itself, dequantized at each access, so code that reads a linear layer's weight gets its value.

    nf4: two weights per byte, values of the 4-bit NormalFloat (section 3 of the paper), one float32 scale for 64 weights.
    int8: one byte per weight, in steps of 1/127 of the largest weight of its row.
    """

    def __init__(self, layer: nn.Linear, scheme: str) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.scheme = scheme
        self.dtype = layer.weight.dtype
        values, scales = _quantize(layer.weight.detach(), scheme)
        self.register_buffer("values", values)
        self.register_buffer("scales", scales)
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach(), requires_grad=False)

    values: Tensor
    scales: Tensor

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dequantized matrix ``(out_features, in_features)``, in the dtype that the weights were loaded in."""
        return self.dequantized(self.dtype)

    @property
    def num_weights(self) -> int:
        return self.in_features * self.out_features

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix ``(out_features, in_features)`` in ``dtype``: the values that products in ``dtype`` use."""
        if self.scheme == INT8:
            return (self.values * (self.scales / 127)[:, None]).to(dtype)
        shape = (self.out_features, self.in_features)
        matrix: Tensor = torch.ops.bitsandbytes.dequantize_4bit(self.values, self.scales, BLOCK, NF4, shape, dtype)
        return matrix

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input W^T + b``."""
        # There is no autocast on the meta device.
        if not input.is_meta and torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        rows = input.reshape(-1, self.in_features)
        product: Tensor = _Product.apply(rows, self)  # type: ignore[no-untyped-call]
        return product.view(*input.shape[:-1], self.out_features)

    def plain(self) -> nn.Linear:
        """Return a linear layer with the dequantized weights."""
        with torch.device("meta"):
            layer = nn.Linear(self.in_features, self.out_features, bias=False)
        layer.weight = nn.Parameter(self.weight, requires_grad=False)
        layer.bias = self.bias
        return layer

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scheme={self.scheme}"


class _Product(torch.autograd.Function):
    """Product of ``(rows, in_features)`` with a quantized weight, which has no gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(rows.dtype)
        return nn.functional.linear(rows, layer.dequantized(rows.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.dequantized(gradient.dtype), None


def check(scheme: str | None) -> None:
    """Raise ConfigError if ``model.quantize`` is no scheme, or bitsandbytes is missing."""
    if scheme not in (None, *SCHEMES):
        raise ConfigError(f"model.quantize: expected null or one of {', '.join(SCHEMES)}, got {scheme!r}")
    if scheme in (NF4, INT8):
        try:
            import bitsandbytes  # noqa: F401 - registers the operators
        except ImportError:
            raise ConfigError(
                "model.quantize: needs the package bitsandbytes; install it: pip install 'post-training-cookbook[lowbit]'"
            ) from None


def install(network: PreTrainedModel, scheme: str, excluded: Collection[str]) -> None:
    """Quantize the weights of the linear layers, in place.

    Embeddings and the output layer keep their weights, and so do the experts of a mixture that are one parameter.
    ``excluded``: paths of layers that keep theirs too.
    """
    head = network.get_output_embeddings()
    linear = [path for path, layer in network.named_modules() if type(layer) is nn.Linear and layer is not head]
    # Layer by layer, so that the original weights of one layer at a time exist beside the quantized ones.
    for path in linear:
        if path not in excluded:
            _replace(network, path, QuantizedLinear(network.get_submodule(path), scheme))
    # The original weights are holes between the quantized ones: 430 MB of a model of 135M parameters in bfloat16.
    return_freed_memory()


def uninstall(network: nn.Module) -> None:
    """Replace the quantized layers by layers with the dequantized weights, in place. Adapters stay where they are."""
    for path, layer in [*layers(network)]:
        _replace(network, path, layer.plain())


def layers(network: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    """Yield the quantized layers with their paths."""
    for path, module in network.named_modules():
        if isinstance(module, QuantizedLinear):
            yield path, module


def num_weights(network: nn.Module) -> int:
    """Return the number of quantized weights, which :meth:`~torch.nn.Module.parameters` does not list."""
    return sum(layer.num_weights for _, layer in layers(network))


def summary(network: nn.Module) -> str:
    """Return how many weights are quantized, and the names of the matrices that are not: ``... of 134,515,008 weights``."""
    count = num_weights(network)
    whole = {path: parameter for path, parameter in network.named_parameters() if ".lora_" not in path}
    total = count + sum(parameter.numel() for parameter in whole.values())
    names = {path.removesuffix(".weight").rpartition(".")[2] for path, parameter in whole.items() if parameter.ndim > 1}
    return f"{count:,} of {total:,} weights are quantized, not those of {', '.join(sorted(names))}"


def weight_bytes(network: nn.Module) -> int:
    """Return the bytes of all weights of a network, of quantized ones with their scales."""
    whole = sum(parameter.nbytes for parameter in network.parameters())
    return whole + sum(layer.values.nbytes + layer.scales.nbytes for _, layer in layers(network))


def _replace(network: nn.Module, path: str, layer: nn.Linear) -> None:
    parent, _, name = path.rpartition(".")
    module = network.get_submodule(parent)
    setattr(module, name, layer.train(getattr(module, name).training))


def _quantize(weight: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    if scheme == INT8:
        scales = weight.float().abs().amax(dim=1)
        steps = weight.float() * (127 / scales.clamp(min=torch.finfo(torch.float32).tiny))[:, None]
        return steps.round().to(torch.int8), scales
    values, scales = torch.ops.bitsandbytes.quantize_4bit(weight.contiguous(), BLOCK, NF4, torch.uint8)
    return values, scales
