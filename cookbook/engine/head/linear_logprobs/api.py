"""Public functions: log-probabilities of target tokens under a linear output layer, without the full logits.

Shapes: ``N`` tokens, hidden size ``H``, vocabulary ``V``, ``K`` targets per token, LoRA rank ``r``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cookbook.engine.head.linear_logprobs.operator import CACHED, FROZEN, RECOMPUTE, Operands, forward
from cookbook.engine.head.linear_logprobs.scan import LIKELY_BITS, LN2, RowBlock, Tiling
from cookbook.engine.model import OneProductLinear
from cookbook.errors import BackendError

if TYPE_CHECKING:
    from peft.tuners.lora.layer import Linear as LoraLinear

CACHE_BYTES = 64 << 20
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
MODES = ("auto", RECOMPUTE, CACHED, FROZEN)


@dataclass(frozen=True)
class LinearLogprobs:
    """Scores of ``N`` tokens.

    ``logprobs``: in the shape of the targets, float32 (float64 for float64 operands), differentiable. ``entropy``: ``(N,)``
    nats, or None. ``hit``: ``(N,)`` bool, whether no token is more likely than the (first) target, or None.
    """

    logprobs: Tensor
    entropy: Tensor | None
    hit: Tensor | None


@dataclass(frozen=True)
class LowRank:
    """A LoRA adapter: the weight is ``W + scaling * B A``, where ``B A`` is never computed. ``a`` ``(r, H)``, ``b`` ``(V, r)``.

    Both have one dtype, which may be wider than the weight's: PEFT keeps float32 adapters on bfloat16 layers.
    """

    a: Tensor
    b: Tensor
    scaling: float


@dataclass(frozen=True)
class LogitTransform:
    """The model's function from the output ``z`` of its output layer to logits: ``softcap * tanh(scale * z / softcap)``."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        scaled = logits if self.scale == 1.0 else logits * self.scale
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)


class LinearLayer(NamedTuple):
    """A linear output layer: logits are ``transform(hidden W^T + bias)``, with the adapter ``low_rank`` added to ``W``."""

    # (V, H)
    weight: Tensor
    # (V,)
    bias: Tensor | None = None
    low_rank: LowRank | None = None
    transform: LogitTransform = LogitTransform()


def linear_logprobs(
    hidden: Tensor,
    layer: LinearLayer,
    targets: Tensor,
    temperature: Tensor | None = None,
    *,
    entropy: bool = False,
    entropy_gradient: bool = False,
    hit: bool = False,
    mode: str = "auto",
    cache_bytes: int = CACHE_BYTES,
) -> LinearLogprobs:
    """Return ``log softmax(softcap(scale * (hidden W^T + bias)) / temperature)`` at ``targets``, with gradients.

    ``hidden``: ``(N, H)``, in the dtype of the layer's weight. ``targets``: ``(N,)`` or ``(N, K)`` int64, in ``[0, V)``.
    ``temperature``: ``(N,)``, positive, not differentiated; None is 1. ``entropy``: return the entropy without a graph;
    ``entropy_gradient``: with a graph. ``hit``: return whether the target is the most likely token.

    ``mode`` does not change the numbers. ``recompute``: the backward pass recomputes the logits tile by tile. ``cached``: all
    logits are kept. ``frozen``: for a weight without gradient, the forward pass computes d logprob / d hidden, so the backward
    pass needs no matrix product. ``auto``: ``frozen`` if possible, else ``cached`` for logits of up to ``cache_bytes``, else
    ``recompute``.

    Raises:
        BackendError: shapes or dtypes do not match, an option is invalid, or the mode does not suit the operands.

    Source: online softmax in tiles, Milakov & Gimelshein 2018 (arXiv 1805.02867); recomputation of logits, Wijmans et al. 2024
    (arXiv 2411.09009). In ``frozen`` mode, d logprob / d hidden is ``(1 - p_t) W_t - sum_{j != t} p_j W_j``.
    """
    inputs = operands(hidden, layer, targets, temperature)
    wants_entropy = entropy or entropy_gradient
    mode = choose_mode(mode, inputs, cache_bytes)
    logprobs, entropies, hits, *_ = forward(*inputs, mode, wants_entropy, entropy_gradient, hit)
    return LinearLogprobs(
        logprobs.reshape(targets.shape),
        (entropies if entropy_gradient else entropies.detach()) if wants_entropy else None,
        hits if hit else None,
    )


def linear_logits(hidden: Tensor, layer: LinearLayer) -> Tensor:
    """Return ``softcap(scale * (hidden W^T + bias))``, ``(N, V)`` in at least float32, for all tokens of the vocabulary.

    Logits of tokens with a probability above 1/64 are computed in float32, even where products are rounded to bfloat16.
    """
    targets = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
    projection = operands(hidden, layer, targets, None).projection()
    rows, vocabulary = projection.num_rows, projection.vocabulary
    block = RowBlock(projection, Tiling(rows, vocabulary, max(rows, 1), vocabulary))
    tile = slice(0, vocabulary)
    out = torch.empty(rows, vocabulary, dtype=projection.work_dtype, device=hidden.device)
    bits = block.bits(tile, out)
    if block.rounds_products and rows:
        block.recompute_likely(bits, tile, (bits * LN2).logsumexp(1) / LN2 + LIKELY_BITS)
    return bits.mul_(LN2)


def operands(hidden: Tensor, layer: LinearLayer, targets: Tensor, temperature: Tensor | None) -> Operands:
    """Return the operands of the operator, checked and converted.

    Raises:
        BackendError: shapes or dtypes do not match, or an option is invalid.
    """
    hidden, layer = under_autocast(hidden, layer)
    _check(hidden, layer, targets, temperature)
    weight, bias, low_rank, transform = layer
    if temperature is not None:
        temperature = temperature.detach().to(hidden.device, torch.promote_types(weight.dtype, torch.float32))
    low_hidden = low_weight = None
    if low_rank is not None:
        low_hidden = (low_rank.scaling * (hidden.to(low_rank.a.dtype) @ low_rank.a.T)).to(weight.dtype)
        low_weight = low_rank.b.to(weight.dtype)
    targets = targets if targets.ndim == 2 else targets[:, None]
    return Operands(hidden, weight, targets, bias, low_hidden, low_weight, temperature, transform.scale, transform.softcap)


def choose_mode(mode: str, inputs: Operands, cache_bytes: int) -> str:
    """Return the mode to use: resolve ``auto``, check any other ``mode``.

    Raises:
        BackendError: the mode is unknown, or is ``frozen`` and a parameter is trained.
    """
    if mode not in MODES:
        raise BackendError(f"linear_logprobs: mode must be one of {', '.join(MODES)}, got {mode!r}")
    if mode == FROZEN and inputs.trained:
        raise BackendError(
            "linear_logprobs: mode 'frozen' needs a weight that requires no gradient, got one that does; use mode 'auto'"
        )
    if mode != "auto":
        return mode
    if not inputs.trained:
        return FROZEN if torch.is_grad_enabled() and inputs.hidden.requires_grad else RECOMPUTE
    logits_bytes = len(inputs.targets) * len(inputs.weight) * inputs.work_dtype.itemsize
    return CACHED if logits_bytes <= cache_bytes else RECOMPUTE


def under_autocast(hidden: Tensor, layer: LinearLayer) -> tuple[Tensor, LinearLayer]:
    """Return the operands cast as ``torch.autocast`` casts those of ``F.linear``; unchanged outside autocast."""
    device = hidden.device.type
    if not torch.is_autocast_enabled(device):
        return hidden, layer
    dtype = torch.get_autocast_dtype(device)
    bias, low_rank = layer.bias, layer.low_rank
    if low_rank is not None:
        low_rank = LowRank(low_rank.a.to(dtype), low_rank.b.to(dtype), low_rank.scaling)
    bias = None if bias is None else bias.to(dtype)
    return hidden.to(dtype), LinearLayer(layer.weight.to(dtype), bias, low_rank, layer.transform)


def _check(hidden: Tensor, layer: LinearLayer, targets: Tensor, temperature: Tensor | None) -> None:
    def fail(what: str, got: object) -> None:
        raise BackendError(f"linear_logprobs: {what}, got {got}")

    weight, bias, _, transform = layer
    rows = len(hidden)
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        fail("hidden must be (N, H) and weight (V, H)", f"{tuple(hidden.shape)} and {tuple(weight.shape)}")
    if targets.ndim not in (1, 2) or len(targets) != rows or targets.dtype != torch.long:
        fail(f"targets must be ({rows},) or ({rows}, K) int64", f"{tuple(targets.shape)} {targets.dtype}")
    if temperature is not None and temperature.shape != (rows,):
        fail(f"temperature must be ({rows},)", tuple(temperature.shape))
    if bias is not None and bias.shape != (len(weight),):
        fail(f"bias must be ({len(weight)},)", tuple(bias.shape))
    if weight.dtype not in DTYPES or hidden.dtype != weight.dtype:
        fail("hidden and weight must be of one dtype: float32, float64 or bfloat16", f"{hidden.dtype} and {weight.dtype}")
    if not transform.scale > 0 or (transform.softcap is not None and not transform.softcap > 0):
        fail("scale and softcap must be positive", f"{transform.scale} and {transform.softcap}")


def joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate the scores of consecutive chunks; None if the scores were not computed."""
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors) if tensors else None


@contextlib.contextmanager
def captured_input(layer: torch.nn.Module, *, one_row: bool = False) -> Iterator[list[Tensor]]:
    """Context that yields a list of the inputs of each call of ``layer``, and lets the layer compute the last position only.

    ``one_row``: the layer computes that position of the first row only.
    """
    inputs: list[Tensor] = []

    def keep(_: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        inputs.append(args[0])
        return (args[0][: 1 if one_row else None, -1:], *args[1:])

    with layer.register_forward_pre_hook(keep):
        yield inputs


def low_rank_of(layer: Any, transform: LogitTransform = LogitTransform()) -> LinearLayer | None:
    """Return the current weight, bias and LoRA adapter of a linear ``layer``.

    None if the layer computes anything else (quantized, DoRA, dropout, several adapters, a merged adapter); the caller then has
    to call the layer itself. The adapter may be switched off, and the weight replaced, between calls.
    """
    # If the layer is PEFT's, its module has been imported. PEFT is not imported here: its import is slow.
    lora = sys.modules.get("peft.tuners.lora.layer")
    if lora is None or type(layer) is not lora.Linear:
        return LinearLayer(layer.weight, layer.bias, None, transform) if _is_plain(layer) else None
    if layer.merged or not _is_plain(layer.base_layer):
        return None
    low_rank = None
    if not layer.disable_adapters:
        low_rank = _adapter(layer)
        if low_rank is None:
            return None
    return LinearLayer(layer.base_layer.weight, layer.base_layer.bias, low_rank, transform)


def _is_plain(layer: torch.nn.Module) -> bool:
    """Whether ``layer`` computes what ``torch.nn.Linear`` does. Wrappers override it in a subclass or on the instance."""
    same = torch.nn.Linear.forward, OneProductLinear.forward
    return getattr(type(layer), "forward", None) in same and "forward" not in vars(layer)


def _adapter(layer: LoraLinear) -> LowRank | None:
    """Return the active adapter of a LoRA layer; None if several are active, or if the adapter is not ``scaling * B A``."""
    if len(layer.active_adapters) != 1:
        return None
    name = layer.active_adapters[0]
    if name not in layer.lora_A or name in layer.lora_variant or layer.fan_in_fan_out:
        return None
    a, b, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    drops = dropout.training and getattr(dropout, "p", 0.0) > 0
    if drops or b.bias is not None or not (_is_plain(a) and _is_plain(b)):
        return None
    return LowRank(a.weight, b.weight, float(layer.scaling[name]))
