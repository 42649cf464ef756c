"""Putting this package's functions into a Hugging Face model, where they compute what its own code computes.

Only the ``forward`` of single module objects is replaced, in their ``__dict__``: classes, parameters, the names in a state
dict and everything around a module (hooks, PEFT, checkpointing, copies) stay as they are. What a module computes is never
guessed from its name: it runs on random input beside its replacement, and where the two part, it keeps its own.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cookbook.engine.layers.gated import ACTIVATIONS, gated
from cookbook.engine.layers.norm import rms_norm
from cookbook.engine.layers.rotary import rotary

ROTARY = "apply_rotary_pos_emb"  # what Hugging Face's modules call, each a function of its own file
# Relative to the largest number. Roundings of two orders of computing part by less, other functions by much more. Most
# models normalize in float32 whatever their dtype.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class Ours(functools.partial):  # type: ignore[type-arg]
    """A forward of this module's, with the object it belongs to as first argument, so that a copy's belongs to the copy."""


def install(network: nn.Module) -> None:
    """Replaces every forward that has a faster equal; doing so again changes nothing."""
    network.eval()  # an adapter that drops out never does the same twice
    rotaries: dict[Callable[..., Any], Callable[..., Any]] = {}
    for module in network.modules():
        if "forward" not in vars(module):  # else it is ours, or somebody replaced it already
            found = _norm(module) or _mlp(module) or _attention(module, rotaries)
            if found is not None:
                module.forward = found


def uninstall(network: nn.Module) -> None:
    """Gives every module its own forward again."""
    for module in network.modules():
        if isinstance(vars(module).get("forward"), Ours):
            del module.forward


def are_installed(network: nn.Module) -> bool:
    """Whether a module of the network has a forward of this package's."""
    return any(isinstance(vars(module).get("forward"), Ours) for module in network.modules())


# ---- norms -----------------------------------------------------------------------------------------------------------


def _norm(module: nn.Module) -> Ours | None:
    """For a norm of one weight over the last dimension."""
    weight: Any = getattr(module, "weight", None)
    eps = next((vars(module)[name] for name in ("variance_epsilon", "eps") if name in vars(module)), None)
    if [name for name, _ in module.named_parameters()] != ["weight"] or weight.ndim != 1 or not isinstance(eps, float):
        return None
    x, trial = _random((3, len(weight)), weight, scale=eps**0.5), _random((len(weight),), weight)  # so small that eps matters

    def own(x: Tensor) -> Any:
        return functional_call(module, {"weight": trial}, (x,))

    for offset in (0.0, 1.0):
        if _agree(own, functools.partial(rms_norm, weight=trial, eps=eps, offset=offset), x, trial):
            return Ours(_normalize, module, eps, offset)
    return None


def _normalize(module: Any, eps: float, offset: float, x: Tensor, *rest: Any, **named: Any) -> Any:
    # Models round the product of two dtypes differently, and a norm that is called with more than it was tried with, as the
    # gated ones of Mamba2 are, computes something else.
    if rest or named or x.dtype != module.weight.dtype:
        return type(module).forward(module, x, *rest, **named)
    return rms_norm(x, module.weight, eps, offset)


# ---- gated MLPs ------------------------------------------------------------------------------------------------------


def _mlp(module: nn.Module) -> Ours | None:
    """For three projections with an activation between them. They are called as the modules they are, adapters and all."""
    children = dict(module.named_children())
    activation = _activation(getattr(module, "act_fn", None))
    if activation is None or not {"gate_proj", "up_proj", "down_proj"} <= set(children):
        return None
    gate, ours = children["gate_proj"], Ours(_project, module, activation)
    weight = next(gate.parameters())
    if weight.is_meta:  # an estimate's: there is nothing to multiply by
        return ours
    return ours if _agree(module.forward, ours, _random((3, getattr(gate, "in_features", 1)), weight)) else None


def _activation(own: Any) -> str | None:
    """By what name we know it. In float32: in half precision the two forms of GELU look alike."""
    x = torch.linspace(-6, 6, 49, requires_grad=True)
    return next((name for name, ours in ACTIVATIONS.items() if callable(own) and _agree(own, ours, x)), None)


def _project(module: Any, activation: str, x: Tensor, *rest: Any, **named: Any) -> Any:
    if rest or named:
        return type(module).forward(module, x, *rest, **named)
    projected: Tensor = module.down_proj(gated(module.gate_proj(x), module.up_proj(x), activation))
    return projected


# ---- rotary embeddings -----------------------------------------------------------------------------------------------


def _attention(module: nn.Module, rotaries: dict[Callable[..., Any], Callable[..., Any]]) -> Ours | None:
    """For a module whose forward turns queries and keys by a function of that name: the same forward, with another function.

    Its code runs with the global names of its file, of which one is exchanged; nobody else's are.
    """
    forward = type(module).forward
    original = getattr(forward, "__globals__", {}).get(ROTARY)
    if original is None or ROTARY not in forward.__code__.co_names:
        return None
    if original not in rotaries:
        rotaries[original] = functools.partial(_turn, original) if _turns(original, module) else original
    if rotaries[original] is original:
        return None
    names = {**forward.__globals__, ROTARY: rotaries[original]}
    changed = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    changed.__kwdefaults__ = forward.__kwdefaults__
    return Ours(changed, module)


def _turn(original: Callable[..., Any], q: Tensor, k: Tensor, *rest: Any, **named: Any) -> Any:
    """Ours where it is called as everywhere: four tensors, of which ``cos`` covers whole heads."""
    if len(rest) == 2 and not named and q.ndim == 4 and rest[0].ndim == 3:
        cos, sin = rest
        if q.shape[-1] == k.shape[-1] == cos.shape[-1] and q.dtype == k.dtype == cos.dtype:
            return rotary(q, k, cos, sin)
    return original(q, k, *rest, **named)


def _turns(original: Callable[..., Any], module: nn.Module) -> bool:
    """Whether it is the rotation of halves."""
    like = next(module.parameters())
    q, k, cos, sin = (_random(shape, like) for shape in ((2, 4, 5, 8), (2, 2, 5, 8), (2, 5, 8), (2, 5, 8)))

    def joined(function: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.cat(function(x, k, cos, sin), 1)

    return _agree(joined(original), joined(rotary), q)


# ---- the proof -------------------------------------------------------------------------------------------------------


def _random(shape: Sequence[int], like: Tensor, scale: float = 1.0) -> Tensor:
    """From a seed of its own, in the dtype and on the device of ``like`` (of none: the CPU), with a gradient."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * scale
    return drawn.to("cpu" if like.is_meta else like.device, like.dtype).requires_grad_()


@torch.enable_grad()
def _agree(own: Callable[[Tensor], Any], ours: Callable[[Tensor], Tensor], *inputs: Tensor) -> bool:
    """Whether both make the same of the first input, and the same gradients of all."""
    try:
        one, other = own(inputs[0]), ours(inputs[0])
        slope = _random(one.shape, one).detach()
        found = [(out, *torch.autograd.grad(out, inputs, slope)) for out in (one, other)]
    except Exception:  # noqa: BLE001 - a module of any architecture, which takes, or returns, something else
        return False
    return all(_close(*pair) for pair in zip(*found, strict=True))


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    allowed = TOLERANCE[one.dtype] * float(one.detach().abs().max())
    return bool((one - other).abs().max() <= allowed)
