"""Log-probabilities of given targets under a linear output layer, without the logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cookbook.engine.linear_logprobs.operator import CACHED, FROZEN, RECOMPUTE, forward
from cookbook.engine.linear_logprobs.projection import Projection
from cookbook.errors import BackendError

CACHE_BYTES = 64 << 20
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
MODES = ("auto", RECOMPUTE, CACHED, FROZEN)


@dataclass(frozen=True)
class LinearLogprobs:
    """Per row: ``logprobs`` in the targets' shape, float32 (float64 for float64 operands), differentiable.

    ``entropy`` ``(N,)`` nats, or None; ``hit`` ``(N,)`` bool, whether no other token is likelier than the (first) target, or
    None.
    """

    logprobs: Tensor
    entropy: Tensor | None
    hit: Tensor | None


@dataclass(frozen=True)
class LowRank:
    """A trainable addition to the weight, ``scaling * B A``, that is never formed. ``a`` ``(r, H)``, ``b`` ``(V, r)``.

    Both of one dtype, which may be wider than the weight's: PEFT keeps float32 adapters on bfloat16 layers.
    """

    a: Tensor
    b: Tensor
    scaling: float


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    low_rank: LowRank | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    entropy_gradient: bool = False,
    hit: bool = False,
    mode: str = "auto",
    cache_bytes: int = CACHE_BYTES,
    tile_bytes: int | None = None,
) -> LinearLogprobs:
    """``log softmax(softcap(scale * (hidden W^T + bias)) / temperature)`` at ``targets``, with gradients to every operand.

    ``hidden`` ``(N, H)``, ``weight`` ``(V, H)``, ``bias`` ``(V,)``, all of one dtype; ``targets`` ``(N,)`` or ``(N, K)``, in
    ``[0, V)``; ``temperature`` positive, one number or ``(N,)``, not differentiated. ``softcap`` c is ``c tanh(z / c)``.
    ``entropy`` asks for the entropy as a number, ``entropy_gradient`` for one that gradients flow through.

    Modes, which give the same numbers: ``recompute`` forms the logits again in the backward pass, a tile of ``tile_bytes`` at
    a time; ``cached`` keeps all of them; ``frozen``, for a weight that is not trained, leaves nothing to compute for the
    backward pass, whatever the loss. ``auto`` takes ``frozen`` where it can, and ``cached`` up to ``cache_bytes``.

    Raises:
        BackendError: shapes, dtypes or options that do not fit together, or a mode that the operands rule out.

    Source: online softmax in tiles, Milakov & Gimelshein 2018 (arXiv 1805.02867); recomputation of logits, Wijmans et al. 2024
    (arXiv 2411.09009). The frozen head's row, ``(1 - p_t) W_t - sum_{j != t} p_j W_j``, is d logprob / d hidden itself.
    """
    given = operands(hidden, weight, targets, bias, low_rank, scale=scale, softcap=softcap, temperature=temperature)
    wants_entropy = entropy or entropy_gradient
    logprobs, entropies, hits, *_ = forward(
        given.hidden,
        given.weight,
        given.projection.targets,
        given.bias,
        given.low_hidden,
        given.low_weight,
        given.temperature,
        given.scale,
        softcap,
        choose_mode(mode, given, cache_bytes),
        wants_entropy,
        entropy_gradient,
        hit,
        tile_bytes,
    )
    return LinearLogprobs(
        logprobs.reshape(targets.shape),
        (entropies if entropy_gradient else entropies.detach()) if wants_entropy else None,
        hits if hit else None,
    )


@dataclass(frozen=True)
class Operands:
    """What goes into the operator: checked, in one dtype, the low-rank addition as a second pair."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    bias: Tensor | None
    low_hidden: Tensor | None
    low_weight: Tensor | None
    temperature: Tensor | None
    scale: float
    softcap: float | None

    @property
    def work_dtype(self) -> torch.dtype:
        return torch.promote_types(self.weight.dtype, torch.float32)

    @property
    def trained(self) -> bool:
        """Whether anything but the hidden states gets a gradient."""
        parameters = (self.weight, self.bias, self.low_weight)
        return torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in parameters)

    @property
    def pairs(self) -> int:
        return 1 if self.low_hidden is None else 2

    @property
    def projection(self) -> Projection:
        low = () if self.low_hidden is None or self.low_weight is None else ((self.low_hidden, self.low_weight),)
        targets = self.targets if self.targets.ndim == 2 else self.targets[:, None]
        pairs = ((self.hidden, self.weight), *low)
        return Projection(pairs, targets, self.bias, self.temperature, self.scale, self.softcap)


def operands(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    low_rank: LowRank | None,
    *,
    scale: float,
    softcap: float | None,
    temperature: float | Tensor,
) -> Operands:
    """Raises: BackendError: shapes, dtypes or options that do not fit together."""
    hidden, weight, bias, low_rank = under_autocast(hidden, weight, bias, low_rank)
    _check(hidden, weight, targets, bias, scale, softcap)
    work = torch.promote_types(weight.dtype, torch.float32)
    per_row, scale = _temperature(temperature, scale, softcap, len(targets), work, hidden.device)
    low_hidden = low_weight = None
    if low_rank is not None:
        low_hidden = (low_rank.scaling * (hidden.to(low_rank.a.dtype) @ low_rank.a.T)).to(weight.dtype)
        low_weight = low_rank.b.to(weight.dtype)
    return Operands(hidden, weight, targets, bias, low_hidden, low_weight, per_row, scale, softcap)


def choose_mode(mode: str, given: Operands, cache_bytes: int) -> str:
    """The mode that ``auto`` stands for; any other is checked.

    Raises:
        BackendError: an unknown mode, or ``frozen`` while a parameter is trained.
    """
    if mode not in MODES:
        raise BackendError(f"linear_logprobs: mode must be one of {', '.join(MODES)}, got {mode!r}")
    if mode == FROZEN and given.trained:
        raise BackendError("linear_logprobs: mode 'frozen' needs a weight without gradient, got one with; use mode 'auto'")
    if mode != "auto":
        return mode
    if not given.trained:
        return FROZEN if torch.is_grad_enabled() and given.hidden.requires_grad else RECOMPUTE
    logits_bytes = len(given.targets) * len(given.weight) * given.work_dtype.itemsize
    return CACHED if logits_bytes <= cache_bytes else RECOMPUTE


def under_autocast(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, low_rank: LowRank | None
) -> tuple[Tensor, Tensor, Tensor | None, LowRank | None]:
    """The operands in autocast's dtype, as ``torch.nn.functional.linear`` casts them; unchanged outside ``torch.autocast``."""
    device = hidden.device.type
    if not torch.is_autocast_enabled(device):
        return hidden, weight, bias, low_rank
    dtype = torch.get_autocast_dtype(device)
    if low_rank is not None:
        low_rank = LowRank(low_rank.a.to(dtype), low_rank.b.to(dtype), low_rank.scaling)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), low_rank


def _temperature(
    temperature: float | Tensor, scale: float, softcap: float | None, rows: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor | None, float]:
    """Per row, or None when it is one number that the scale can take in; and the scale."""
    if isinstance(temperature, Tensor) and temperature.ndim:
        if temperature.shape != (rows,):
            raise BackendError(f"linear_logprobs: temperature must be one number or ({rows},), got {tuple(temperature.shape)}")
        return temperature.detach().to(device, dtype), scale
    value = float(temperature)
    if not value > 0:
        raise BackendError(f"linear_logprobs: temperature must be positive, got {value}")
    if softcap is None:
        return None, scale / value
    return (None if value == 1.0 else torch.full((rows,), value, dtype=dtype, device=device)), scale


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, scale: float, softcap: float | None) -> None:
    def fail(what: str, got: Any) -> None:
        raise BackendError(f"linear_logprobs: {what}, got {got}")

    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        fail("hidden must be (N, H) and weight (V, H)", f"{tuple(hidden.shape)} and {tuple(weight.shape)}")
    if targets.ndim not in (1, 2) or len(targets) != len(hidden) or targets.dtype != torch.long:
        fail(f"targets must be ({len(hidden)},) or ({len(hidden)}, K) int64", f"{tuple(targets.shape)} {targets.dtype}")
    if bias is not None and bias.shape != (len(weight),):
        fail(f"bias must be ({len(weight)},)", tuple(bias.shape))
    if weight.dtype not in DTYPES or hidden.dtype != weight.dtype:
        fail("hidden and weight must be of one dtype: float32, float64 or bfloat16", f"{hidden.dtype} and {weight.dtype}")
    if not scale > 0 or (softcap is not None and not softcap > 0):
        fail("scale and softcap must be positive", f"{scale} and {softcap}")
